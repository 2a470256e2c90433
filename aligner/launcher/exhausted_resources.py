"""Which resource of the machine a failed rank has exhausted: shared memory, memory or file
descriptors.
"""

import contextlib
import errno
import math
import re
import resource
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_SHARED_MEMORY = Path("/dev/shm")
_SPARE_BYTES = 2**20
_UNLIMITED_BYTES = 2**60
"""Version 1 of control groups has such a number for "no limit"."""
_OPEN_FILES = 65536
"""Open files of a process that are enough for any run."""

_SHARED_MEMORY_WORDS = re.compile(
    r"/dev/shm|shared memory|\bshm\b|/psm_|/torch_\d|nccl-\w+", re.IGNORECASE
)
_SHARED_MEMORY_FAILURES = re.compile(
    r"no space left|bus error|unable to|failed|could not|cannot allocate|error while|out of shared",
    re.IGNORECASE,
)
_MEMORY_FAILURES = re.compile(
    r"\bMemoryError\b|std::bad_alloc|cannot allocate memory|can't allocate memory"
    r"|\bout of memory\b|\boom[-_ ]?kill",
    re.IGNORECASE,
)
_GPU = re.compile(r"\b(CUDA|GPU|NCCL|HIP|cuda\w*)\b", re.IGNORECASE)
_FILES = re.compile(r"too many open files( in system)?|\bEMFILE\b|(\bENFILE\b)", re.IGNORECASE)


def count_oom_kills() -> int:
    """Return how many processes of this process's control group the kernel has killed because they
    needed too much memory; the machine's processes if it has no control groups for memory."""
    for group in _memory_groups():
        for name in ("memory.events", "memory.oom_control"):
            if (count := _counter(group / name)) is not None:
                return count
    return _counter(Path("/proc/vmstat")) or 0


def exhausted_resources(
    lines: Sequence[str],
    exit_code: int | None = None,
    oom_kills: int = 0,
    is_local: bool = True,
) -> list[str]:
    """Return a sentence for each resource that was exhausted, with its limit and a remedy.

    Args:
        lines: Last lines of the logs of a failed process.
        exit_code: Its exit code, negative for a signal.
        oom_kills: Processes that the kernel has killed for lack of memory since it was started.
        is_local: Whether it ran on this machine, with this process's limits. The limits of another
            machine are not known.
    """
    return [
        *_shared_memory(lines, exit_code, is_local),
        *_memory(lines, exit_code, oom_kills, is_local),
        *_open_files(lines, is_local),
    ]


def full_shared_memory(error: BaseException) -> str | None:
    """Return the message of an error that says that `/dev/shm` is full, None for any other error.

    The error of a write names no file. It is then attributed to `/dev/shm` if that is full.
    """
    if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
        return None
    place = str(_SHARED_MEMORY)
    is_named = error.filename is not None and str(error.filename).startswith(place)
    if not is_named and (error.filename is not None or _free_bytes() >= _SPARE_BYTES):
        return None
    line = f"{error.filename or place}: {error.strerror}"
    return "; ".join([line, *_shared_memory([line], None, is_local=True)])


def _free_bytes() -> float:
    try:
        return shutil.disk_usage(_SHARED_MEMORY).free
    except OSError:
        return math.inf


def _shared_memory(lines: Sequence[str], exit_code: int | None, is_local: bool) -> Iterator[str]:
    is_named = any(
        _SHARED_MEMORY_WORDS.search(line) and _SHARED_MEMORY_FAILURES.search(line) for line in lines
    )
    if not is_local:
        if is_named:
            yield (
                f"shared memory is exhausted: {_SHARED_MEMORY} of its node or container is too"
                " small or full; enlarge it: mount -o remount,size=8g"
                f" {_SHARED_MEMORY}, or the container's --shm-size=8g"
            )
        return
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        return
    # A process that writes to a mapped file of a full file system dies of SIGBUS.
    is_likely = exit_code == -signal.SIGBUS
    is_certain = is_named or usage.free < _SPARE_BYTES
    if is_likely or is_certain:
        yield (
            f"shared memory is {'' if is_certain else 'probably '}exhausted: {_SHARED_MEMORY} has"
            f" {_size(usage.total)}, of which {_size(usage.free)} are free now (Docker's default is"
            " 64 MB); enlarge it: docker run --shm-size=8g (or --ipc=host), without Docker:"
            f" mount -o remount,size=8g {_SHARED_MEMORY}"
        )


def _memory(
    lines: Sequence[str], exit_code: int | None, oom_kills: int, is_local: bool
) -> Iterator[str]:
    is_killed = oom_kills > 0 and exit_code != 0
    is_named = any(_MEMORY_FAILURES.search(line) and not _GPU.search(line) for line in lines)
    if not is_killed and not is_named:
        return
    how = (
        f"the kernel killed {oom_kills} process{'es' * (oom_kills > 1)} for lack of memory"
        if is_killed
        else "a process could not allocate memory"
    )
    where = _memory_text() if is_local else "the limit is that of its job step or node"
    yield (
        f"memory is exhausted: {how}; {where}; raise the limit (docker run --memory, sbatch --mem),"
        " or use less: `aligner validate` prints the memory that each role needs"
    )


def _memory_text() -> str:
    """Return how much memory this process and its children may use."""
    limit = _memory_limit()
    total = psutil.virtual_memory().total
    if limit is None or limit >= total:
        return f"the machine has {_size(total)}"
    return f"the limit of the control group (container or job) is {_size(limit)}"


def _open_files(lines: Sequence[str], is_local: bool) -> Iterator[str]:
    found = [match for line in lines if (match := _FILES.search(line))]
    if not found:
        return
    if any(match[1] or match[2] for match in found):
        limit = Path("/proc/sys/fs/file-max").read_text().strip()
        yield (
            f"file descriptors are exhausted: the machine's limit fs.file-max is {limit}; raise it:"
            " sysctl -w fs.file-max=NUMBER"
        )
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = f"a process may have {soft} open files (hard limit {hard})"
    yield (
        f"file descriptors are exhausted: {limits if is_local else 'see ulimit -n on its node'};"
        f" raise the limit before the launch: ulimit -n {_OPEN_FILES}, in Docker: --ulimit"
        f" nofile={_OPEN_FILES}"
    )


def _memory_groups() -> Iterator[Path]:
    """Yield the directories of this process's control group for memory, of version 2 and 1, and of
    the groups above it.

    In a container, the directory of the container's own group is the root.
    """
    try:
        entries = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            root = _CGROUPS
        elif "memory" in controllers.split(","):
            root = _CGROUPS / "memory"
        else:
            continue
        own = root / path.lstrip("/")
        yield own
        for parent in own.parents:
            if parent.is_relative_to(root):
                yield parent


def _memory_limit() -> int | None:
    """Return the smallest memory limit of this process's control groups in bytes, None without
    one."""
    limits = []
    for group in _memory_groups():
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                limits.append(int((group / name).read_text()))
    return min((limit for limit in limits if limit < _UNLIMITED_BYTES), default=None)


def _counter(file: Path) -> int | None:
    """Return the value of `oom_kill` in a file of names and numbers, None without it."""
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1])


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
