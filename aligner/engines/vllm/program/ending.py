"""How the program ends all that it has started, with nothing but the standard library."""

import contextlib
import os
import signal
import time
from pathlib import Path

_TRACKER = b"multiprocessing.resource_tracker"
"""The process that removes shared memory of those that were killed; it ends by itself behind them.
"""


def end_group(within_s: float) -> None:
    """End every process of this one's group but itself, and those that track shared memory: they
    end behind it."""
    for kill, seconds in ((signal.SIGTERM, within_s), (signal.SIGKILL, 1.0)):
        end = time.monotonic() + seconds
        while others := [each for each in _members(os.getpgrp()) if not _is_tracker(each)]:
            for each in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, kill)
            if time.monotonic() > end:
                break
            time.sleep(0.05)


def _members(group: int) -> list[int]:
    """Its living processes, without this one."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            state, _, its_group = (place / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX" and int(place.name) != os.getpid():
                found.append(int(place.name))
    return found


def _is_tracker(process: int) -> bool:
    with contextlib.suppress(OSError):
        return _TRACKER in Path(f"/proc/{process}/cmdline").read_bytes()
    return False
