"""Functions that worker ranks run for the tests of `aligner.data.collectives`."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

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
