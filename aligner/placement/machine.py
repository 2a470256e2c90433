"""The hardware of a run: cores, memory and GPUs of this machine, or of the nodes of a cluster."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from aligner.errors import ConfigError
from aligner.placement.roles import count_gpus, uses_gpus
from aligner.schema import Config

# Memory of a GPU that the CUDA context and the communication buffers use.
_CUDA_CONTEXT_GIB = 4.0
# Remaining memory of a GPU with 80 GB, the default for the nodes of a cluster.
_NODE_GPU_GIB = 76.0
_MEMORY_LIMIT_FILE = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Machine:
    """This machine, or one of the identical nodes of a cluster."""

    cores: int
    memory_gib: float
    """Host memory in GiB."""
    gpus: int = 0
    """Number of GPUs that the roles of the run use; 0 if they compute on CPUs."""
    gpu_memory_gib: float = 0.0
    """Memory of each GPU in GiB that models and their computation may use."""
    max_nodes: int = 1
    """Maximum number of nodes."""


def measure_machine(config: Config) -> Machine:
    """Return the machine or cluster on which the roles of a run will be placed.

    Raises:
        ConfigError: The memory of the GPUs cannot be determined.
    """
    cores = len(os.sched_getaffinity(0))
    memory_gib = psutil.virtual_memory().total / 2**30
    # The file contains `max` if the container has no limit.
    if (
        _MEMORY_LIMIT_FILE.is_file()
        and (limit := _MEMORY_LIMIT_FILE.read_text().strip()).isdecimal()
    ):
        memory_gib = min(memory_gib, int(limit) / 2**30)

    if config.cluster.kind != "local":
        gpu_memory_gib = (
            (config.cluster.device_memory_gib or _NODE_GPU_GIB) if uses_gpus(config) else 0.0
        )
        # The submitting machine may have no GPUs, so the nodes are described by configuration keys.
        return Machine(
            cores,
            memory_gib,
            config.cluster.devices_per_node if gpu_memory_gib else 0,
            gpu_memory_gib,
            max_nodes=64,
        )

    gpus = count_gpus()
    if not gpus:
        return Machine(cores, memory_gib)
    # A rank may get any of the GPUs, so the smallest one determines what fits.
    gpu_memory_gib = config.cluster.device_memory_gib or min(_read_gpu_memory_gib())
    return Machine(cores, memory_gib, gpus, gpu_memory_gib)


def _read_gpu_memory_gib() -> list[float]:
    """Return the usable memory of each GPU in GiB."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        return [float(line) / 2**10 - _CUDA_CONTEXT_GIB for line in output.split()]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"nvidia-smi did not report the memory of the GPUs ({error}); set"
            " cluster.device_memory_gib, or use an experiment (experiment=NAME)"
        ) from error
