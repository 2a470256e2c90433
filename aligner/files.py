"""Files that are complete whenever they are there, and errors that say which file could not be written."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from aligner.errors import ConfigError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_file(path: Path, content: str | bytes) -> None:
    """Write all of a file or nothing, also where the process is killed or the machine loses power; text as UTF-8.

    One writer at a time: what a killed one leaves, `NAME.tmp`, is written over by the next. Raises OSError, which names the
    file.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with naming(path):
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
            _to_disk(temporary)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # whatever keeps it from being removed is not what went wrong
            temporary.unlink(missing_ok=True)
        raise
    _to_disk(path.parent)


def append(path: Path, content: str | bytes) -> None:
    """Write behind a file's end, all or an unfinished part where that fails; text as UTF-8. Raises OSError, which names it."""
    with naming(path), path.open("ab") as file:
        file.write(content.encode() if isinstance(content, str) else content)


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
    """What to tell where an error says that the disk, or the user's share of it, is full; None for any other."""
    if not isinstance(error, OSError) or error.errno not in _FULL:
        return None
    what = error.filename or "standard output"
    return f"{what}: {error.strerror}; make room, and go on from the last complete checkpoint with run.resume=auto"


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
