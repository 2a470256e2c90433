"""What each rank is started with: its command and its environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from aligner.launch.kernel import LAUNCHER_PID
from aligner.launch.task import IS_TASK
from aligner.placement.addresses import LOOPBACK

Command = Callable[[str, Path], tuple[str, ...]]
"""From a role, or a server group, and the run's config file to the command of its ranks."""

_SERVED_MODEL = {"generator": "generate", "critic": "critic_infer", "reward": "reward_model"}


def served_model(group: str) -> str:
    """The Triton model that must be ready for a server group to be healthy."""
    return _SERVED_MODEL[group.partition(".")[0]]


def role_command(role: str, config_file: Path, program: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """The command of a role's or a server group's ranks; `prepare` is a role too. `program` is this one if not given."""
    actions = {"prepare": ("prepare",), "trainer": ("train",)}
    action = actions.get(role, ("serve", f"role={role}"))
    return (*(program or (sys.executable, "-m", "aligner")), *action, "--config", str(config_file))


def rank_environment(rank: int, ranks: int, master_port: int, threads: int) -> dict[str, str]:
    """What the environment of a rank on this machine adds to the launcher's own."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        LAUNCHER_PID: str(os.getpid()),
        **world_environment(ranks, ranks, LOOPBACK, master_port, threads),
    }


def task_environment(ranks: int, ranks_per_node: int, master: str, master_port: int, threads: int) -> dict[str, str]:
    """The same for the tasks of a job step, which learn from Slurm which rank they are."""
    return {IS_TASK: "1", **world_environment(ranks, ranks_per_node, master, master_port, threads)}


def world_environment(ranks: int, ranks_per_node: int, master: str, master_port: int, threads: int) -> dict[str, str]:
    """What all ranks of a role have in common."""
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(master_port),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # Threads that spin between parallel regions take the cores of the other ranks.
        "OMP_WAIT_POLICY": "PASSIVE",
        # Large temporary tensors come from the heap and stay there: given back and mapped anew for every micro-batch, their
        # pages are zeroed by the kernel each time.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
