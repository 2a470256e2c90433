"""Removal of the shared memory and directories of Triton servers whose process was killed.

A server process has a claim: a directory in /dev/shm that names the process and lists the paths
that Triton creates for it. The next server on the machine removes the files of claims whose process
has exited.
"""

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

# All users can write to this directory. Files of other users are never changed or removed, whatever
# their names are.
_SHARED_MEMORY = Path("/dev/shm")
HEALTH_SOCKET = "health"
"""Name of the Unix socket in a claim on which the gateway serves health checks."""
_PATHS_FILE = "paths"
_ENVIRONMENT_PREFIX = "python_env_"
_TRACKER_TIMEOUT_S = 3.0


def find_triton_environments() -> set[Path]:
    """Return the directories in which Triton's Python backends unpack environments.

    aligner gives its backends no environments, so these directories are empty.
    """
    # Triton always uses /tmp, whatever TMPDIR is.
    return set(Path("/tmp").glob(f"{_ENVIRONMENT_PREFIX}*"))


def claim_triton_files() -> Path:
    """Return this process's claim, and remove the files of server processes that were killed.

    The claim is a directory that only this user can access.

    Containers may share /dev/shm of the machine, but each has its own process ids. Therefore only
    the claims of this process's pid namespace are considered.
    """
    own_pid = os.getpid()
    # `mkdtemp` creates a private directory under an unpredictable name, so that another user cannot
    # create it first.
    directory = next(_find_claims(own_pid), None)
    if directory is None:
        prefix = f"{_get_claim_prefix()}{own_pid}-"
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=_SHARED_MEMORY))
    for claim in _find_claims():
        # A claim's name ends with the process id and the random part of `mkdtemp`.
        pid = int(claim.name.split("-")[-2])
        if not psutil.pid_exists(pid):
            remove_triton_files(pid)
    return directory


def find_health_socket() -> Path | None:
    """Return the Unix socket for health checks of this process's server; None before it starts."""
    claim = next(_find_claims(os.getpid()), None)
    return None if claim is None else claim / HEALTH_SOCKET


def claim_paths(paths: Iterable[Path]) -> None:
    """Set the paths to remove with this process's files; they replace the paths of earlier
    calls."""
    for claim in _find_claims(os.getpid()):
        new_file = claim / f"{_PATHS_FILE}.new"
        new_file.write_text("".join(f"{path}\n" for path in paths))
        # Replace the file atomically, because the process may be killed at any time.
        new_file.replace(claim / _PATHS_FILE)


def restrict_triton_memory() -> None:
    """Remove other users' access to this process's shared memory, if Triton has granted it."""
    for file in _SHARED_MEMORY.glob(f"pytrtion{os.getpid()}-*"):  # PyTriton's spelling
        if _is_owned(file, stat.S_ISREG):
            file.chmod(0o600)


def remove_triton_files(pid: int) -> None:
    """Remove the files and the claim of a process that has exited, or of this process."""
    remove_claimed_paths(pid)
    for claim in _find_claims(pid):
        shutil.rmtree(claim, ignore_errors=True)


def remove_claimed_paths(pid: int) -> None:
    """Remove the files of a process, but not its claim, so that Triton can be started again."""
    for claim in _find_claims(pid):
        for claimed in _read_claimed_paths(claim):
            if claimed.parent == _SHARED_MEMORY:
                _unlink(claimed)
            elif claimed.name.startswith(_ENVIRONMENT_PREFIX):
                # The directory may belong to another server that started at the same time. Only an
                # empty directory is removed.
                with contextlib.suppress(OSError):
                    claimed.rmdir()
            else:
                shutil.rmtree(claimed, ignore_errors=True)
    for file in _SHARED_MEMORY.glob(f"pytrtion{pid}-*"):  # PyTriton's spelling
        _unlink(file)


def kill_processes(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, but let Python's resource trackers among them remove shared memory first.

    A resource tracker exits when the processes whose memory it tracks have exited. A tracker that
    does not exit, for example because it is suspended, is killed, too.
    """
    trackers = [process for process in processes if _is_resource_tracker(process)]
    others = [process for process in processes if process not in trackers]
    for group in (others, trackers):
        if group is trackers:
            deadline = time.monotonic() + _TRACKER_TIMEOUT_S
            while any(map(is_alive, trackers)) and time.monotonic() < deadline:
                time.sleep(0.02)
        for process in group:
            with contextlib.suppress(psutil.Error):  # the process has exited, or is another user's
                process.kill()


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs.

    A process that has exited does not run, even if its parent has not waited for it yet.
    """
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Return whether a process is a resource tracker of Python's multiprocessing."""
    with contextlib.suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
    return False


def _find_claims(pid: int | None = None) -> Iterator[Path]:
    """Yield the claims of one process id, or all claims, in this process's pid namespace."""
    pid_pattern = r"\d+" if pid is None else str(pid)
    pattern = re.compile(re.escape(_get_claim_prefix()) + pid_pattern + r"-\w+")
    for claim in [*_SHARED_MEMORY.iterdir()]:
        if pattern.fullmatch(claim.name) and _is_owned(claim, _is_private_directory):
            yield claim


def _unlink(file: Path) -> None:
    """Remove a regular file of this user."""
    if _is_owned(file, stat.S_ISREG):
        file.unlink(missing_ok=True)


def _read_claimed_paths(claim: Path) -> list[Path]:
    """Return the paths that `claim_paths` has written."""
    try:
        return [*map(Path, (claim / _PATHS_FILE).read_text().splitlines())]
    except FileNotFoundError:
        return []


def _is_owned(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Return whether a path belongs to this user and has the right type.

    Symbolic links are not followed.

    Args:
        path: The path.
        is_kind: Checks the type in the path's mode.
    """
    # Another user may replace a file by a link, so that a file of this user would be deleted.
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and is_kind(status.st_mode)


def _is_private_directory(mode: int) -> bool:
    return stat.S_ISDIR(mode) and stat.S_IMODE(mode) == stat.S_IRWXU


def _get_claim_prefix() -> str:
    """Return the beginning of the names of claims, which contains the pid namespace."""
    namespace = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    return f"aligner-server-{namespace}-"
