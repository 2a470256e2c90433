"""What a killed Triton server leaves on its machine: shared memory and directories."""

import contextlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil

_PLACE = Path("/dev/shm")
"""Where anyone may write: what is not this user's own there, under whatever name, is left alone."""
_PATHS = "paths"
_ENVIRONMENT = "python_env_"
_TRACKERS_S = 3.0


def triton_environments() -> set[Path]:
    """Where Triton's Python backends on this machine would unpack environments, of which we give
    ours none."""
    return set(Path("/tmp").glob(f"{_ENVIRONMENT}*"))  # Triton's own choice, whatever TMPDIR says


def claim_triton_files() -> Path:
    """Say that this process has PyTriton set something up, and remove that of processes which said
    so and were killed.

    Returns a directory that is this process's, and closed to other users.

    Containers may share their machine's memory, but not its process ids: those of this process's
    own world alone are judged.
    """
    own = os.getpid()
    # A directory that nobody else can write to, under a name that nobody could take before.
    directory = next(_claims(own), None) or Path(
        tempfile.mkdtemp(prefix=f"{_prefix()}{own}-", dir=_PLACE)
    )
    for claim in _claims():
        pid = int(claim.name.split("-")[-2])
        if not psutil.pid_exists(pid):
            remove_triton_files(pid)
    return directory


def claim_paths(paths: Iterable[Path]) -> None:
    """Have these removed with the rest of this process's, instead of those of an earlier call."""
    for claim in _claims(os.getpid()):
        (written := claim / f"{_PATHS}.new").write_text("".join(f"{path}\n" for path in paths))
        written.replace(claim / _PATHS)  # a process may be killed at any time


def close_triton_memory() -> None:
    """Take other users' rights to this process's shared memory, where Triton has given them
    some."""
    for file in _PLACE.glob(f"pytrtion{os.getpid()}-*"):
        if _is_own(file, stat.S_ISREG):
            file.chmod(0o600)


def remove_triton_files(pid: int) -> None:
    """Remove what an ended process, or this one, had PyTriton set up."""
    remove_claimed_paths(pid)
    for claim in _claims(pid):
        shutil.rmtree(claim, ignore_errors=True)


def remove_claimed_paths(pid: int) -> None:
    """As `remove_triton_files`, but keep the process's claim, for another start of Triton."""
    for claim in _claims(pid):
        for claimed in _claimed_paths(claim):
            if claimed.parent == _PLACE:
                _unlink(claimed)
            elif claimed.name.startswith(_ENVIRONMENT):
                # it may be another's, started in the same moment: not if it is filled
                with contextlib.suppress(OSError):
                    claimed.rmdir()
            else:
                shutil.rmtree(claimed, ignore_errors=True)
    for file in _PLACE.glob(f"pytrtion{pid}-*"):  # PyTriton's spelling
        _unlink(file)


def kill_processes(processes: Sequence[psutil.Process]) -> None:
    """Kill these, and have Python's resource trackers among them remove the shared memory of the
    others before they end.

    A tracker ends when those whose memory it knows have; one that does not, because it is stopped,
    is killed, too.
    """
    trackers = [process for process in processes if _is_resource_tracker(process)]
    for group in ([process for process in processes if process not in trackers], trackers):
        if group is trackers:
            deadline = time.monotonic() + _TRACKERS_S
            while any(map(is_alive, trackers)) and time.monotonic() < deadline:
                time.sleep(0.02)
        for process in group:
            with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
                process.kill()


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended. One that has, and that nobody has waited for yet, is there all the
    same."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_resource_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
    return False


def _claims(pid: int | None = None) -> Iterator[Path]:
    """The directories by which this process id, or any, has said so, in this process's world."""
    name = re.compile(re.escape(_prefix()) + (r"\d+" if pid is None else str(pid)) + r"-\w+")
    for claim in [*_PLACE.iterdir()]:
        if name.fullmatch(claim.name) and _is_own(claim, _is_private_directory):
            yield claim


def _unlink(file: Path) -> None:
    if _is_own(file, stat.S_ISREG):
        file.unlink(missing_ok=True)


def _claimed_paths(claim: Path) -> list[Path]:
    try:
        return [*map(Path, (claim / _PATHS).read_text().splitlines())]
    except FileNotFoundError:
        return []


def _is_own(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Whether it is this user's and, itself and not what a link leads to, of that kind."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and is_kind(status.st_mode)


def _is_private_directory(mode: int) -> bool:
    return stat.S_ISDIR(mode) and stat.S_IMODE(mode) == stat.S_IRWXU


def _prefix() -> str:
    world = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    return f"aligner-server-{world}-"
