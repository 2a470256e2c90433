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
_RESOURCE_TRACKER = b"multiprocessing.resource_tracker"


def terminate_group(timeout_s: float) -> None:
    """Terminate all other processes of this process group: first with SIGTERM, then with SIGKILL.

    Python's resource trackers are left alone, since they exit by themselves after their processes.

    Args:
        timeout_s: Time until SIGKILL, in seconds. The function then waits one more second at most.
    """
    for signal_number, seconds in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, 1.0)):
        deadline = time.monotonic() + seconds
        # The signal is repeated, since the group's processes may start new ones in the meantime.
        while others := [
            process_id
            for process_id in _find_members(os.getpgrp())
            if not _is_resource_tracker(process_id)
        ]:
            for process_id in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal_number)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)


def _find_members(group_id: int) -> list[int]:
    """Return the ids of the living processes of a process group, without this process."""
    process_ids = []
    for directory in Path("/proc").glob("[0-9]*"):
        # A process may exit while its file is read.
        with contextlib.suppress(OSError, IndexError):
            # The command in parentheses may contain spaces. After it come state, parent and group.
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            state, _, process_group = fields[:3]
            process_id = int(directory.name)
            # Z is a zombie, X is a dead process.
            is_alive = state not in "ZX"
            if int(process_group) == group_id and is_alive and process_id != os.getpid():
                process_ids.append(process_id)
    return process_ids


def _is_resource_tracker(process_id: int) -> bool:
    """Return whether a process is a resource tracker; False if the process has exited."""
    with contextlib.suppress(OSError):
        return _RESOURCE_TRACKER in Path(f"/proc/{process_id}/cmdline").read_bytes()
    return False
