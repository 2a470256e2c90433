"""What a run's servers leave in shared memory and temporary files, on a machine where other runs have theirs."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from pathlib import Path
from types import TracebackType

import psutil

from benchmarks.runs import run_of

_PLACES = ("dev/shm/pytrtion*", "dev/shm/psm_*", "dev/shm/aligner-server-*", "tmp/folder*", "tmp/python_env_*")
_MAKER = re.compile(r"pytrtion(\d+)-|aligner-server-\d+-(\d+)-")
"""Names that tell the process id of who has made them."""
_LOOK_S = 0.2
_TOLD_S = 60.0
"""For servers of other runs, which say what directories they have when they have started."""


class Leftovers:
    """Watches, while the `with` block runs, which of the files that appear are of another run than the one in `directory`.

    That is told by the processes that use them, while these live.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self._before = _present()
        self._known: dict[Path, bool] = {}
        """Whether a file is another's."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="leftovers", daemon=True)

    def __enter__(self) -> Leftovers:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ends.set()
        self._thread.join()

    def left(self) -> list[str]:
        """What the run has left behind, now that it has ended."""
        end = time.monotonic() + _TOLD_S
        while True:
            self._look()
            left = sorted(str(path) for path in _present() - self._before if not self._known.get(path, False))
            if not left or time.monotonic() > end:
                return left
            time.sleep(_LOOK_S)

    def _watch(self) -> None:
        while not self._ends.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        unknown = _present() - self._before - self._known.keys()
        if not unknown:
            return
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                used = _used(process)
                found = {path for path in unknown if path.name in used or _maker(path) == process.pid}
                if found:
                    is_another = run_of(process) != self._directory
                    self._known |= dict.fromkeys(found, is_another)
                    unknown -= found


def _present() -> set[Path]:
    return {path for pattern in _PLACES for path in Path("/").glob(pattern)}


def _used(process: psutil.Process) -> str:
    """What a process has mapped, what it was started with, and what it says is its own (`aligner.triton_cleanup`)."""
    claims = Path("/dev/shm").glob(f"aligner-server-*-{process.pid}-*/directories")
    files = [Path(f"/proc/{process.pid}/maps"), *claims]
    return "\n".join([*(file.read_text() for file in files), *process.cmdline()])


def _maker(path: Path) -> int | None:
    found = _MAKER.match(path.name)
    return None if found is None else int(found[1] or found[2])
