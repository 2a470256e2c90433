"""Atomic writing of files and directories, and errors that name the file.

A file or directory that is written atomically is complete as soon as it exists.
"""

import contextlib
import errno
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from aligner.errors import ConfigError

_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Error numbers of a shared filesystem without locks, such as Lustre mounted without `flock`."""


@dataclass(frozen=True)
class LockHolder:
    """Description of the process that holds a lock, for error messages of other processes."""

    pid: int
    host: str
    since: str

    @staticmethod
    def for_this_process() -> "LockHolder":
        """Return the description of this process as the holder of a lock."""
        return LockHolder(
            os.getpid(), socket.gethostname(), f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}"
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically, even if the process is killed or the machine loses power.

    Only one process may write the file at a time: the temporary file of a killed writer is
    overwritten by the next writer.

    Args:
        path: The file.
        content: Content of the file; text is encoded as UTF-8.

    Raises:
        OSError: If the file cannot be written; the error names it.
    """
    with _open_atomic_file(path, get_temporary_path(path)) as file, name_file_in_errors(path):
        file.write(_encode(content))


def create_private_file(path: Path, content: str | bytes) -> None:
    """Write a file that only its owner may read, atomically, unless the file already exists.

    If several processes write the file, the content of the first process remains.
    """
    with (
        contextlib.suppress(FileExistsError),
        # Unlike a rename, a link fails if the file exists.
        _open_atomic_file(path, _get_unique_temporary_path(path), os.link, mode=0o600) as file,
    ):
        file.write(_encode(content))


@contextlib.contextmanager
def open_new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that can be written in parts. It replaces `path` if the block succeeds, and is
    deleted if the block raises."""
    with _open_atomic_file(path, _get_unique_temporary_path(path)) as file:
        yield file


@contextlib.contextmanager
def create_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed to `directory` when the block succeeds.

    If the block raises, the directory is deleted.

    Raises:
        FileExistsError: At the end of the block, if another process has created the directory in
            the meantime.
    """
    temporary = _get_unique_temporary_path(directory)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        try:
            temporary.rename(directory)
        except OSError as error:
            # Distinguish a directory that exists from a filesystem that does not work.
            if not directory.is_dir():
                raise
            raise FileExistsError(
                error.errno, "another process has created it in the meantime", str(directory)
            ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def start_directory(directory: Path) -> Path:
    """Create a temporary directory that several processes fill, and return its path.

    The name is random, so that a suspended process of an earlier attempt cannot write to the new
    directory. Temporary directories of earlier attempts are deleted.
    """
    for leftover in directory.parent.glob(f"{directory.name}.*tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = get_temporary_path(directory.with_name(f"{directory.name}.{secrets.token_hex(8)}"))
    temporary.mkdir(parents=True)
    return temporary


def finish_directory(temporary: Path, directory: Path) -> None:
    """Rename the directory of `start_directory` to its final name, replacing an existing
    directory."""
    # A rename cannot replace a directory that is not empty.
    shutil.rmtree(directory, ignore_errors=True)
    temporary.replace(directory)


def get_temporary_path(path: Path) -> Path:
    """Return the temporary path of a file or directory that only one process writes at a time."""
    return path.with_name(f"{path.name}.tmp")


def _get_unique_temporary_path(path: Path) -> Path:
    """Return a unique temporary path of a file or directory that several processes may write."""
    return path.absolute().with_name(f".{path.name}.{secrets.token_hex(16)}")


@contextlib.contextmanager
def _open_atomic_file(
    path: Path,
    temporary: Path,
    move: Callable[[Path, Path], None] = os.replace,
    mode: int = 0o666,
) -> Iterator[BinaryIO]:
    """Yield a temporary file, which gets its final name once it is on disk.

    Args:
        path: The final name.
        temporary: The temporary name.
        move: Function that gives the temporary file its final name.
        mode: Mode of the file, before the umask.
    """
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            with name_file_in_errors(path):
                file.flush()
                os.fsync(file.fileno())
        move(temporary, path)
    finally:
        # An error of this deletion must not hide the error of the block.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    # A power failure may undo the rename until the directory is on disk too.
    _sync_directory(path.parent)


def append_to_file(path: Path, content: str | bytes, *, to_disk: bool = False) -> None:
    """Append content to a file. If the write fails, a part of the content may be in the file.

    Args:
        path: The file.
        content: The appended content; text is encoded as UTF-8.
        to_disk: Whether to return only once the content survives a power failure.

    Raises:
        OSError: If the content cannot be written; the error names the file.
    """
    with name_file_in_errors(path), path.open("ab") as file:
        file.write(_encode(content))
        if to_disk:
            file.flush()
            os.fsync(file.fileno())


def read_newer_half(file: BinaryIO, limit: int) -> bytes | None:
    """Return the complete lines in the last `limit / 2` bytes of a file that has more than `limit`
    bytes; None for a smaller file. Without a line break, return all of these bytes."""
    size = file.seek(0, os.SEEK_END)
    if size <= limit:
        return None

    # The first line is probably incomplete. Other processes may append to the file faster than this
    # process reads, so the end of the file is not awaited.
    file.seek(size - limit // 2)
    newer = file.read(limit // 2)
    return newer[newer.find(b"\n") + 1 :]


@contextlib.contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add the file's name to OSErrors of the block, because errors of writing and closing do not
    contain it."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


@contextlib.contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Convert OSErrors of the block to ConfigError, for an output path that a user has chosen."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


def describe_full_disk(error: BaseException) -> str | None:
    """Return a message if an error means that the disk or the user's quota is full; None for any
    other error."""
    if not isinstance(error, OSError) or error.errno not in _DISK_FULL_ERRORS:
        return None
    file_name = error.filename or "standard output"
    return (
        f"{file_name}: {error.strerror}; free disk space, and resume from the latest complete"
        " checkpoint with run.resume=auto"
    )


def _encode(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _sync_directory(directory: Path) -> None:
    """Return once the entries of a directory are on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
