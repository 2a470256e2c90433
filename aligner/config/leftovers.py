"""What a server that was killed leaves behind on its machine: the shared memory between Triton and its Python helpers."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

_PLACE = Path("/dev/shm")


def claim_shared_memory() -> None:
    """Say that this process has PyTriton set some up, and free that of processes which said so and were killed.

    Containers may share their machine's memory, but not its process ids: those of this process's own world alone are judged.
    """
    with contextlib.suppress(PermissionError):  # another user's process had this number, and was killed
        _claim(os.getpid()).touch()
    for claim in _PLACE.glob(_claim("*").name):
        pid = int(claim.name.rpartition("-")[2])
        if not psutil.pid_exists(pid):
            remove_shared_memory(pid)


def remove_shared_memory(pid: int) -> None:
    """Free what an ended process, or this one, had PyTriton set up."""
    for file in (*_PLACE.glob(f"pytrtion{pid}-*"), _claim(pid)):  # PyTriton's spelling
        with contextlib.suppress(PermissionError):  # another user's process had that number
            file.unlink(missing_ok=True)


def _claim(pid: int | str) -> Path:
    world = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    return _PLACE / f"aligner-server-{world}-{pid}"
