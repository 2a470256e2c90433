"""What a run computes on, known without asking torch and, for a cluster, without being there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from aligner.schema import Config


def has_gpu() -> bool:
    """Whether this machine has a GPU to use: asking the driver's files costs nothing, asking torch costs its import."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(Path("/proc/driver/nvidia/gpus").glob("*"))


def uses_gpus(config: Config) -> bool:
    """Whether the roles' devices are GPUs: of this machine where the run stays here.

    A Slurm job's are, whatever the machine that submits it has, unless none are asked for and nothing needs one.
    """
    if config.cluster.kind == "local":
        return has_gpu()
    return config.cluster.slurm.gpus != "none" or config.engine.kind == "tensorrt_llm"


@dataclass(frozen=True)
class Device:
    """What a model computes on, and how many bytes a number of its layers takes there."""

    gpus: bool
    itemsize: int


def device_of(config: Config, precision: str) -> Device:
    """Of a role, or engine, at a precision: auto is bf16 on GPUs and fp32 on CPUs."""
    gpus = uses_gpus(config)
    return Device(gpus, 2 if precision == "bf16" or (precision == "auto" and gpus) else 4)
