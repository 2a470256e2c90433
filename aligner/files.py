"""Writing files and directories that are complete whenever they are there; errors that say what
could not be written."""

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

_FULL = (errno.ENOSPC, errno.EDQUOT)
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What a shared filesystem without locks answers, such as Lustre that is mounted without `flock`.
"""


@dataclass(frozen=True)
class Holder:
    """Who works on something, for others to be told."""

    pid: int
    host: str
    since: str

    @staticmethod
    def here() -> "Holder":
        """This process, from now on."""
        return Holder(
            os.getpid(), socket.gethostname(), f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}"
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


def write_file(path: Path, content: str | bytes) -> None:
    """Write all of a file or nothing, also where the process is killed or the machine loses power;
    text as UTF-8.

    One writer at a time: what a killed one leaves is written over by the next. Raises OSError,
    which names the file.
    """
    with _complete_file(path, unfinished(path)) as file, naming(path):
        file.write(_encoded(content))


def create_private_file(path: Path, content: str | bytes) -> None:
    """`write_file`, of a file that only its owner may read, unless there is one: of several writers
    the first one's stays."""
    with (
        contextlib.suppress(FileExistsError),
        _complete_file(path, _own_name(path), os.link, mode=0o600) as file,
    ):
        file.write(_encoded(content))


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write bit by bit, which takes the place of `path` when the block ends well; else
    nothing is left of it."""
    with _complete_file(path, _own_name(path)) as file:
        yield file


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """A directory to fill, which gets its name when the block ends well; else nothing is left of
    it.

    Of several processes that make the same one the first wins: the others get FileExistsError at
    the end.
    """
    temporary = _own_name(directory)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        try:
            temporary.rename(directory)
        except OSError as error:
            if not directory.is_dir():
                raise
            raise FileExistsError(
                error.errno, "another process has created it in the meantime", str(directory)
            ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def start_directory(directory: Path) -> Path:
    """Make a directory for several processes to fill, under a name that none knows which was
    stopped; removes earlier ones."""
    for left in directory.parent.glob(f"{directory.name}.*tmp"):
        shutil.rmtree(left, ignore_errors=True)
    started = unfinished(directory.with_name(f"{directory.name}.{secrets.token_hex(8)}"))
    started.mkdir(parents=True)
    return started


def finish_directory(started: Path, directory: Path) -> None:
    """Give what `start_directory` has made its name, in the place of what has it."""
    shutil.rmtree(directory, ignore_errors=True)
    started.replace(directory)


def unfinished(path: Path) -> Path:
    """What a file or directory is called until it is complete, where one writer at a time makes
    it."""
    return path.with_name(f"{path.name}.tmp")


def _own_name(path: Path) -> Path:
    """What it is called until it is complete, where several processes may make it at a time."""
    return path.absolute().with_name(f".{path.name}.{secrets.token_hex(16)}")


@contextlib.contextmanager
def _complete_file(
    path: Path, temporary: Path, put: Callable[[Path, Path], None] = os.replace, mode: int = 0o666
) -> Iterator[BinaryIO]:
    """The temporary file, which `put` gives its name once it is on disk."""
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            with naming(path):
                file.flush()
                os.fsync(file.fileno())
        put(temporary, path)
    finally:
        # whatever keeps it from being removed is not what went wrong
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    _to_disk(path.parent)


def append(path: Path, content: str | bytes, *, to_disk: bool = False) -> None:
    """Write behind a file's end, all or an unfinished part where that fails; text as UTF-8. Raises
    OSError, which names it. With `to_disk` it returns once the bytes survive a loss of power."""
    with naming(path), path.open("ab") as file:
        file.write(_encoded(content))
        if to_disk:
            file.flush()
            os.fsync(file.fileno())


def newer_half(file: BinaryIO, limit: int) -> bytes | None:
    """The whole lines among the last `limit / 2` bytes of a file that has more than `limit`; None
    of a shorter one."""
    size = file.seek(0, os.SEEK_END)
    if size <= limit:
        return None
    file.seek(size - limit // 2)
    file.readline()
    return file.read()


def drop_older_half(path: Path, limit: int) -> int:
    """Have a file of more than `limit` bytes begin with its newer half, while others append to it;
    how many were dropped.

    What is written in the same moment may be lost. Raises OSError.
    """
    with path.open("r+b") as file:
        if (kept := newer_half(file, limit)) is None:
            return 0
        dropped = file.tell() - len(kept)
        file.seek(0)
        file.write(kept)
        file.truncate()
        return dropped


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raises OSErrors from inside with the file's name: those of writing and closing have none."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


@contextlib.contextmanager
def asked_for(path: Path) -> Iterator[None]:
    """Raises ConfigError where what a user has asked to have written there cannot be."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


def full_disk(error: BaseException) -> str | None:
    """What to tell where an error says that the disk, or the user's share of it, is full; None for
    any other."""
    if not isinstance(error, OSError) or error.errno not in _FULL:
        return None
    what = error.filename or "standard output"
    return (
        f"{what}: {error.strerror}; free disk space, and resume from the latest complete checkpoint"
        " with run.resume=auto"
    )


def _encoded(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _to_disk(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
