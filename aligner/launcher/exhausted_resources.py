"""Find the machine resource that a failed rank has exhausted.

The resources are shared memory, memory and file descriptors. Sources are logs, exit codes, and
counters and limits of the kernel.
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

SHARED_MEMORY = Path("/dev/shm")
"""Directory of the machine's shared memory."""
RECOMMENDED_OPEN_FILES = 65536
"""Limit of open files per process that is sufficient for every run."""

_CGROUPS = Path("/sys/fs/cgroup")
# Shared memory counts as full if it has fewer free bytes.
_MIN_FREE_BYTES = 2**20
# Version 1 of control groups reports "no limit" as a number that is at least this large.
_UNLIMITED_BYTES = 2**60

# Shared memory is exhausted if a line matches both of the following patterns.
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
# Lines about GPU memory are not about the machine's memory.
_GPU = re.compile(r"\b(CUDA|GPU|NCCL|HIP|cuda\w*)\b", re.IGNORECASE)
_OPEN_FILES_FAILURES = re.compile(
    r"too many open files( in system)?|\bEMFILE\b|(\bENFILE\b)", re.IGNORECASE
)


def count_oom_kills() -> int:
    """Return the number of processes that the kernel has killed because of exhausted memory.

    The kernel counts these processes per memory control group. Without such a group, the count
    covers the whole machine.
    """
    for group in _memory_groups():
        for name in ("memory.events", "memory.oom_control"):
            if (count := _read_oom_kills(group / name)) is not None:
                return count
    return _read_oom_kills(Path("/proc/vmstat")) or 0


def exhausted_resources(
    lines: Sequence[str],
    exit_code: int | None = None,
    oom_kills: int = 0,
    is_local: bool = True,
) -> list[str]:
    """Return a sentence for each exhausted resource, with its limit and a remedy.

    Args:
        lines: Last lines of the logs of a failed process.
        exit_code: Exit code of the process, or the negative number of the signal that ended it.
        oom_kills: Number of processes that the kernel has killed for lack of memory since the
            process was started.
        is_local: Whether the process ran on this machine, with this process's limits. The limits of
            another machine are not known.
    """
    return [
        *_describe_shared_memory(lines, exit_code, is_local),
        *_describe_memory(lines, exit_code, oom_kills, is_local),
        *_describe_open_files(lines, is_local),
    ]


def full_shared_memory(error: BaseException) -> str | None:
    """Return the message for an error caused by a full `/dev/shm`, otherwise None.

    The error of a failed write does not name the file. Such an error is attributed to `/dev/shm` if
    `/dev/shm` is full.
    """
    if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
        return None
    directory = str(SHARED_MEMORY)
    is_named = error.filename is not None and str(error.filename).startswith(directory)
    if not is_named and (
        error.filename is not None or _free_shared_memory_bytes() >= _MIN_FREE_BYTES
    ):
        return None
    line = f"{error.filename or directory}: {error.strerror}"
    return "; ".join([line, *_describe_shared_memory([line], None, is_local=True)])


def _free_shared_memory_bytes() -> float:
    """Return the free bytes of `/dev/shm`; infinity if the machine has no `/dev/shm`."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return math.inf


def _describe_shared_memory(
    lines: Sequence[str], exit_code: int | None, is_local: bool
) -> Iterator[str]:
    """Yield a sentence if shared memory is exhausted."""
    is_named = any(
        _SHARED_MEMORY_WORDS.search(line) and _SHARED_MEMORY_FAILURES.search(line) for line in lines
    )
    if not is_local:
        if is_named:
            yield (
                f"shared memory is exhausted: {SHARED_MEMORY} of its node or container is too"
                " small or full; enlarge it: mount -o remount,size=8g"
                f" {SHARED_MEMORY}, or the container's --shm-size=8g"
            )
        return
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return
    # A process that writes to a mapped file of a full file system dies of SIGBUS.
    is_likely = exit_code == -signal.SIGBUS
    is_certain = is_named or usage.free < _MIN_FREE_BYTES
    if is_likely or is_certain:
        yield (
            f"shared memory is {'' if is_certain else 'probably '}exhausted: {SHARED_MEMORY} has"
            f" {format_bytes(usage.total)}, of which {format_bytes(usage.free)} are free now"
            " (Docker's default is 64 MB); enlarge it: docker run --shm-size=8g (or --ipc=host),"
            f" without Docker: mount -o remount,size=8g {SHARED_MEMORY}"
        )


def _describe_memory(
    lines: Sequence[str], exit_code: int | None, oom_kills: int, is_local: bool
) -> Iterator[str]:
    """Yield a sentence if memory is exhausted."""
    is_killed = oom_kills > 0 and exit_code != 0
    is_named = any(_MEMORY_FAILURES.search(line) and not _GPU.search(line) for line in lines)
    if not is_killed and not is_named:
        return
    cause = (
        f"the kernel killed {oom_kills} process{'es' * (oom_kills > 1)} for lack of memory"
        if is_killed
        else "a process could not allocate memory"
    )
    limit_text = (
        _describe_memory_limit() if is_local else "the limit is that of its job step or node"
    )
    yield (
        f"memory is exhausted: {cause}; {limit_text}; raise the limit (docker run --memory, sbatch"
        " --mem), or use less: `aligner validate` prints the memory that each role needs"
    )


def _describe_memory_limit() -> str:
    """Return a text with the memory that this process and its children may use."""
    limit = read_memory_limit()
    total = psutil.virtual_memory().total
    if limit is None or limit >= total:
        return f"the machine has {format_bytes(total)}"
    return f"the limit of the control group (container or job) is {format_bytes(limit)}"


def _describe_open_files(lines: Sequence[str], is_local: bool) -> Iterator[str]:
    """Yield a sentence if file descriptors are exhausted."""
    matches = [match for line in lines if (match := _OPEN_FILES_FAILURES.search(line))]
    if not matches:
        return
    # ENFILE: the limit of the whole machine, not of the process.
    if any(match[1] or match[2] for match in matches):
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
        f" raise the limit before the launch: ulimit -n {RECOMMENDED_OPEN_FILES}, in Docker:"
        f" --ulimit nofile={RECOMMENDED_OPEN_FILES}"
    )


def _memory_groups() -> Iterator[Path]:
    """Yield the directories of this process's memory control groups and of their parents.

    Both versions of control groups are supported. In a container, the container's own group is the
    root.
    """
    try:
        entries = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            hierarchy = _CGROUPS
        elif "memory" in controllers.split(","):
            hierarchy = _CGROUPS / "memory"
        else:
            continue
        own_group = hierarchy / path.lstrip("/")
        yield own_group
        for parent in own_group.parents:
            if parent.is_relative_to(hierarchy):
                yield parent


def read_memory_limit() -> int | None:
    """Return the smallest memory limit of this process's control groups in bytes, or None."""
    limits = []
    for group in _memory_groups():
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                limits.append(int((group / name).read_text()))
    return min((limit for limit in limits if limit < _UNLIMITED_BYTES), default=None)


def read_cpu_quota() -> float | None:
    """Return the number of cores to which the control group limits this process; None without a
    limit."""
    try:
        # The CPU time per period and the period, or `max` without a limit.
        quota, period = (_CGROUPS / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _read_oom_kills(file: Path) -> int | None:
    """Return the value of `oom_kill` in a file of kernel counters; None if the value is missing."""
    try:
        match = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if match is None else int(match[1])


def format_bytes(size: int) -> str:
    """Return a size in MiB or GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
