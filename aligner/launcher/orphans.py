"""Ends what a launcher that was killed has left: `python -m aligner.launcher.orphans MARK SECONDS`,
at the end of its input.

The kernel sends ranks SIGTERM when their launcher dies, so that they end in order; one that is
stopped or deaf, and what it has started, would stay. So a launcher has this process beside it,
whose input is a pipe that ends with the launcher.
"""

import contextlib
import sys
import time

import psutil

from aligner.triton_cleanup import kill_processes, remove_triton_files

START = "ALIGNER_START"
"""Environment variable of whatever comes of one start of a rank, its helpers' helpers included: the
mark of that start."""
_TIMEOUT_S = 30.0
"""A process that the kernel does not let go is not waited for any longer."""


def end_orphans(mark: str, patience_s: float) -> None:
    """Give the processes whose mark begins so some time to end by themselves, then kill them and
    remove what Triton left."""
    kill_at, seen = time.monotonic() + patience_s, set[int]()
    while (left := _marked(mark)) and time.monotonic() < kill_at + _TIMEOUT_S:
        seen.update(process.pid for process in left)
        if time.monotonic() > kill_at:
            kill_processes(left)
        time.sleep(0.1)
    for pid in seen.difference(process.pid for process in left):
        remove_triton_files(pid)


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or one that has ended
            if process.environ().get(START, "").startswith(f"{mark}-"):
                found.append(process)
    return found


if __name__ == "__main__":
    sys.stdin.read()
    end_orphans(sys.argv[1], float(sys.argv[2]))
