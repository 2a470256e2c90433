"""Termination of all processes that the program has started.

The module uses only the standard library.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

# Part of the command line of Python's resource tracker, a process that removes the shared memory of
# killed processes. It exits by itself after the processes that it tracks.
_TRACKER = b"multiprocessing.resource_tracker"


def end_group(within_s: float) -> None:
    """Terminate all other processes of this process group: first with SIGTERM, then with SIGKILL.

    Python's resource trackers are left alone, since they exit by themselves after their processes.

    Args:
        within_s: Time until SIGKILL, in seconds. The function then waits one more second at most.
    """
    for signal_number, seconds in ((signal.SIGTERM, within_s), (signal.SIGKILL, 1.0)):
        deadline = time.monotonic() + seconds
        # The signal is repeated, since the group's processes may start new ones in the meantime.
        while others := [process for process in _members(os.getpgrp()) if not _is_tracker(process)]:
            for process in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal_number)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)


def _members(group: int) -> list[int]:
    """Return the ids of the living processes of a process group, without this process."""
    processes = []
    for directory in Path("/proc").glob("[0-9]*"):
        # A process may exit while its file is read.
        with contextlib.suppress(OSError, IndexError):
            # The command in parentheses may contain spaces. After it come state, parent and group.
            state, _, its_group = (directory / "stat").read_text().rpartition(")")[2].split()[:3]
            # Z is a zombie, X is a dead process.
            if int(its_group) == group and state not in "ZX" and int(directory.name) != os.getpid():
                processes.append(int(directory.name))
    return processes


def _is_tracker(process: int) -> bool:
    """Return whether a process is a resource tracker; False if the process has exited."""
    with contextlib.suppress(OSError):
        return _TRACKER in Path(f"/proc/{process}/cmdline").read_bytes()
    return False
