"""What Linux offers for keeping hold of a process tree."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from aligner.errors import AlignerError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

LAUNCHER_PID = "ALIGNER_LAUNCHER_PID"
"""Environment variable by which a rank knows its launcher."""


def _prctl(option: int, argument: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, *(ctypes.c_ulong(value) for value in (argument, 0, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, instead of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def process_start(pid: int) -> int | None:
    """When a living process was started, in clock ticks since boot: with its id, what tells it from any other. None where
    there is none."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def end_with_launcher() -> None:
    """Have SIGTERM sent to this process when its launcher dies, however it dies; nothing without a launcher."""
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None:
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):
        raise AlignerError("the launcher died while this rank was starting")
