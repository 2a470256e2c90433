"""Detect shared memory and temporary files that the servers of a run leave behind, on a machine on
which other runs may also have such files."""

from __future__ import annotations

import contextlib
import re
import threading
from pathlib import Path
from types import TracebackType

import psutil

from benchmarks.runs import run_of

_PLACES = (
    "dev/shm/pytrtion*",
    "dev/shm/psm_*",
    "dev/shm/aligner-server-*",
    "tmp/folder*",
    "tmp/python_env_*",
)
_MAKER = re.compile(r"pytrtion(\d+)-|aligner-server-\d+-(\d+)-")
"""File names that contain the process id of their creator."""
_LOOK_S = 0.5


class Leftovers:
    """Finds the files that a run leaves behind. A context manager.

    While the block runs, a thread records which new files are used by processes of the run in
    `directory`. The creator of a file cannot be determined after its process has exited, and other
    runs on the machine may leave files behind as well.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self._before = _present()
        self._own: set[Path] = set()
        self._is_own: dict[psutil.Process, bool] = {}
        """Whether each process belongs to the run."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="leftovers", daemon=True)

    def __enter__(self) -> Leftovers:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ends.set()
        self._thread.join()

    def left(self) -> list[str]:
        """Return the files of the run that still exist. Call it after the run has ended."""
        return sorted(str(path) for path in self._own if path.exists())

    def _watch(self) -> None:
        while not self._ends.wait(_LOOK_S):
            unknown = _present() - self._before - self._own
            for process in psutil.process_iter() if unknown else ():
                with contextlib.suppress(psutil.Error, OSError):
                    if process not in self._is_own:
                        self._is_own[process] = run_of(process) == self._directory
                    if self._is_own[process]:
                        used = _used(process)
                        self._own |= {
                            path
                            for path in unknown
                            if path.name in used or _maker(path) == process.pid
                        }


def _present() -> set[Path]:
    return {path for pattern in _PLACES for path in Path("/").glob(pattern)}


def _used(process: psutil.Process) -> str:
    """Return the memory maps and the command line of a process, and the paths that it claims
    (`aligner.triton_cleanup`), as one text."""
    claims = Path("/dev/shm").glob(f"aligner-server-*-{process.pid}-*/paths")
    files = [Path(f"/proc/{process.pid}/maps"), *claims]
    return "\n".join([*(file.read_text() for file in files), *process.cmdline()])


def _maker(path: Path) -> int | None:
    found = _MAKER.match(path.name)
    return None if found is None else int(found[1] or found[2])
