"""What a run has to compute on: cores, memory and GPUs."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from aligner.errors import ConfigError
from aligner.placement.roles import gpu_count, uses_gpus
from aligner.schema import Config

_CONTEXT_GIB = 4.0
"""Of a GPU's memory that its context and communication buffers take."""
_NODE_GPU_GIB = 76.0
"""What that leaves of the GPUs that most clusters have, of 80 GB."""
_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Machine:
    """This machine, or a node of a cluster of equal ones."""

    cores: int
    memory_gib: float
    """Of the host."""
    gpus: int = 0
    """That the run's roles use; 0: they compute on the cores."""
    gpu_memory_gib: float = 0.0
    """Of each, for models and what they compute."""
    most_nodes: int = 1


def machine_of(config: Config) -> Machine:
    """Where a run's roles are to be placed. Raises ConfigError where it cannot be told what memory
    the GPUs have."""
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().total / 2**30
    if _LIMIT.is_file() and (limit := _LIMIT.read_text().strip()).isdecimal():
        memory = min(memory, int(limit) / 2**30)
    if config.cluster.kind == "slurm":
        of_gpu = (config.cluster.device_memory_gib or _NODE_GPU_GIB) if uses_gpus(config) else 0.0
        return Machine(
            cores, memory, config.cluster.devices_per_node if of_gpu else 0, of_gpu, most_nodes=64
        )
    if not (gpus := gpu_count()):
        return Machine(cores, memory)
    return Machine(cores, memory, gpus, config.cluster.device_memory_gib or min(_gpu_memory()))


def _gpu_memory() -> list[float]:
    """GiB of each GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        return [float(line) / 2**10 - _CONTEXT_GIB for line in told.split()]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"nvidia-smi did not report the memory of the GPUs ({error}); set"
            " cluster.device_memory_gib, or use an experiment (experiment=NAME)"
        ) from error
