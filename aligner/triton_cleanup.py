"""What a killed Triton server leaves on its machine: shared memory and directories."""

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import psutil

_PLACE = Path("/dev/shm")
_ENVIRONMENT = "python_env_"


def triton_environments() -> set[Path]:
    """Where Triton's Python backends on this machine would unpack environments, of which we give ours none."""
    return set(Path("/tmp").glob(f"{_ENVIRONMENT}*"))  # Triton's own choice, whatever TMPDIR says


def claim_triton_files() -> None:
    """Say that this process has PyTriton set something up, and remove that of processes which said so and were killed.

    Containers may share their machine's memory, but not its process ids: those of this process's own world alone are judged.
    """
    with contextlib.suppress(PermissionError):  # another user's process had this number, and was killed
        _claim(os.getpid()).touch()
    for claim in _PLACE.glob(_claim("*").name):
        pid = int(claim.name.rpartition("-")[2])
        if not psutil.pid_exists(pid):
            remove_triton_files(pid)


def claim_directories(directories: Iterable[Path]) -> None:
    """Have these removed with the rest of this process's, instead of those of an earlier call."""
    with contextlib.suppress(PermissionError):
        _claim(os.getpid()).write_text("".join(f"{directory}\n" for directory in directories))


def remove_triton_files(pid: int) -> None:
    """Remove what an ended process, or this one, had PyTriton set up."""
    for directory in _directories(_claim(pid)):
        if directory.name.startswith(_ENVIRONMENT):
            with contextlib.suppress(OSError):  # it may be another's, started in the same moment: not if it is filled
                directory.rmdir()
        else:
            shutil.rmtree(directory, ignore_errors=True)
    for file in (*_PLACE.glob(f"pytrtion{pid}-*"), _claim(pid)):  # PyTriton's spelling
        with contextlib.suppress(PermissionError):  # another user's process had that number
            file.unlink(missing_ok=True)


def _directories(claim: Path) -> list[Path]:
    """Those that a claim of this user's names: anyone may write to the place."""
    try:
        with os.fdopen(os.open(claim, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as file:
            return [*map(Path, file.read().splitlines())] if os.fstat(file.fileno()).st_uid == os.geteuid() else []
    except OSError:
        return []


def _claim(pid: int | str) -> Path:
    world = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    return _PLACE / f"aligner-server-{world}-{pid}"
