"""Functions that worker ranks run for the tests of `aligner.data.collectives`."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from aligner.data import collectives
from aligner.data.collectives import run_on_rank0
from aligner.errors import AlignerError, ConfigError, TransientError


def get_answer(
    seconds: float = 0, timeout_s: float = 60, heartbeat_s: float | None = None
) -> dict[str, Any]:
    """Return the rank's answer for an action of rank 0 that sleeps, and the action's caller."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), dist.group.WORLD)
    callers = []

    def act() -> tuple[str, int]:
        callers.append(dist.get_rank())
        time.sleep(seconds)
        return "answer", 1

    try:
        return {"answer": run_on_rank0(act, heartbeat_s=heartbeat_s), "callers": callers}
    finally:
        distributed_c10d._set_pg_timeout(timedelta(seconds=60), dist.group.WORLD)


def get_error(kind: str, heartbeat_s: float | None) -> str:
    """Return type and message of the rank's error for an action that fails on rank 0."""
    error = {
        "listed": TransientError("the server restarts"),
        "other": ConfigError("the key is unknown"),
        "foreign": ValueError("3 is too large"),
    }[kind]

    def act() -> None:
        raise error

    try:
        run_on_rank0(act, error_types=(TransientError,), heartbeat_s=heartbeat_s)
    except (AlignerError, ValueError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return "no error"


def count_broadcasts_with_lost_peer() -> int:
    """Return how many broadcasts rank 0 starts if its heartbeats fail; the other ranks start none.

    The failure is simulated, because the ranks of a world whose connection is lost cannot return.
    """
    if dist.get_rank() > 0:
        return 0
    broadcasts = []

    def fail(value: Any, *args: Any, **options: Any) -> None:
        broadcasts.append(value)
        raise RuntimeError("connection closed by peer")

    broadcast = collectives.broadcast_json
    collectives.broadcast_json = fail
    try:
        run_on_rank0(lambda: time.sleep(1), heartbeat_s=0.05)
    except RuntimeError:
        return len(broadcasts)
    finally:
        collectives.broadcast_json = broadcast
    return -1
