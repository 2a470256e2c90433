"""Checks of the file systems on which runs, the cache and temporary files are stored."""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from aligner.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from aligner.files import NO_LOCKS
from aligner.launcher.exhausted_resources import format_bytes
from aligner.paths import get_cache_directory

_GIB = 2**30
_MIN_FREE_BYTES = 20 * _GIB
# With less space, not even the smallest experiment can save a checkpoint.
_SMALLEST_FREE_BYTES = _GIB // 2
# Difference of two clocks in seconds that confuses the ages of files, such as heartbeats.
_MAX_CLOCK_DIFFERENCE_S = 2.0
# Time before which no machine with a correct clock runs this release: 2026-01-01.
_MIN_TIME = 1767225600


def check_storage(runs: Path) -> Iterator[Finding]:
    """Check the file systems of the runs, of the cache and of temporary files.

    Args:
        runs: Directory of the runs, which need not exist.
    """
    yield from _check_directory("runs", runs, "run.dir=DIRECTORY")
    yield from _check_directory("cache", get_cache_directory(), "ALIGNER_CACHE=DIRECTORY")
    yield from _check_directory("temporary files", Path(tempfile.gettempdir()), "TMPDIR=DIRECTORY")


def _check_directory(subject: str, directory: Path, setting: str) -> Iterator[Finding]:
    """Check the space, the locks and the clock of a directory's file system.

    Args:
        subject: Name of the findings.
        directory: The directory, or a directory that a run would create.
        setting: Setting that selects another directory.
    """
    candidates = (directory.absolute(), *directory.absolute().parents)
    existing = next(candidate for candidate in candidates if candidate.is_dir())
    usage = shutil.disk_usage(existing)
    found = (
        f"{directory.absolute()}: {format_bytes(usage.free)} of {format_bytes(usage.total)} free"
    )
    try:
        problem = _probe_file_system(existing)
    except OSError as error:
        reason = "is a read-only file system" if error.errno == errno.EROFS else error.strerror
        yield Finding(
            subject,
            ERROR,
            f"{existing} cannot be written: {reason}",
            f"set {setting}, or correct the permissions",
        )
        return
    inodes = os.statvfs(existing)
    if usage.free < _SMALLEST_FREE_BYTES:
        yield Finding(subject, ERROR, f"{found}; no run fits", f"free space, or set {setting}")
    elif inodes.f_files and inodes.f_favail < 1000:
        yield Finding(
            subject,
            ERROR,
            f"{found}, but only {inodes.f_favail} more files can be created",
            f"delete files, or set {setting}",
        )
    elif usage.free < _MIN_FREE_BYTES and subject != "temporary files":
        yield Finding(
            subject,
            NOTE,
            f"{found}; checkpoints of models with billions of parameters need more",
            f"set {setting} to a larger disk for such models",
        )
    else:
        yield Finding(subject, OK, found)
    if problem is not None:
        yield Finding(subject, WARNING, f"{existing}: {problem}", f"set {setting} to another disk")


def _probe_file_system(directory: Path) -> str | None:
    """Return a problem of a directory's file system: locks, hard links or the clock of its server.

    Returns:
        The problem and its consequence; None without a problem.

    Raises:
        OSError: The directory cannot be written.
    """
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".aligner-doctor-") as file:
        file.write(b"x")
        file.flush()
        difference_s = os.fstat(file.fileno()).st_mtime - time.time()
        if abs(difference_s) > _MAX_CLOCK_DIFFERENCE_S:
            return (
                f"the clock of the file system differs by {difference_s:.0f} s from this machine's;"
                " `aligner status` would take running runs for dead ones"
            )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return (
                "the file system has no locks, so that two launches of one run on different"
                " machines are not detected"
            )
        link = Path(f"{file.name}.link")
        try:
            os.link(file.name, link)
        except OSError:
            return "the file system has no hard links, which the run's access key needs"
        link.unlink()
    return None


def check_clock() -> Iterator[Finding]:
    """Check that this machine's clock is plausible."""
    now = time.time()
    if now < _MIN_TIME:
        yield Finding(
            "clock",
            ERROR,
            f"shows {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(now))} UTC, which is in the"
            " past; certificates and the ages of files would be wrong",
            "set the clock, for example with chronyd or timedatectl set-ntp true",
        )
