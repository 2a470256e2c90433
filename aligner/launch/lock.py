"""One launch at a time on a directory, by a lock of the operating system's that ends with the process that has it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

import psutil

from aligner.errors import ConfigError
from aligner.paths import LOCK

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What a shared filesystem without locks answers, such as Lustre that is mounted without `flock`."""

_MOMENT_S = 0.25


@dataclass(frozen=True)
class Holder:
    """Who works on a directory, as its lock file says."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @property
    def is_seen(self) -> bool:
        """Whether this machine sees it run."""
        return self.host == socket.gethostname() and psutil.pid_exists(self.pid)


class LockedError(ConfigError):
    """Another launch works on the directory."""

    holder: Holder | str = "another process"

    @classmethod
    def of(cls, directory: Path, holder: Holder | None) -> LockedError:
        """`holder` is None where the other one has not said yet who it is."""
        held = holder or cls.holder
        error = cls(f"run.dir={directory}: in use by {held}; wait for its end or stop it, or give another run.dir or run.name")
        error.holder = held
        return error


@contextlib.contextmanager
def locked(directory: Path, wait: Callable[[LockedError], None] | None = None) -> Iterator[None]:
    """Alone with a directory, which is made where there is none. However the process ends, the lock ends with it.

    Where another process has it: raises LockedError at once, or calls `wait` again and again until it has not. The file is
    gone afterwards, and so are the directories that were made for this and that nothing came into. Raises ConfigError where
    none can be made.
    """
    made: list[Path] = []
    try:
        with _writable(directory):
            made += [path for path in (directory, *directory.parents) if not path.exists()]
            directory.mkdir(parents=True, exist_ok=True)
            file = _taken(directory, wait)
        with file:
            try:
                yield
            finally:
                (directory / LOCK).unlink(missing_ok=True)  # while it is held: whoever waits for this file finds it gone
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


@contextlib.contextmanager
def _writable(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"run.dir={directory}: cannot be written to: {why}; give another run.dir") from error


def refuse_locked(directory: Path) -> None:
    """Raise LockedError where another process works on the directory; nothing is made or changed."""
    try:
        file = (directory / LOCK).open("r+")
    except OSError:
        return
    with file:
        if not _try_lock(file, fcntl.LOCK_SH):  # which does not keep away others that only look
            raise LockedError.of(directory, _holder(file))


def _taken(directory: Path, wait: Callable[[LockedError], None] | None) -> IO[str]:
    """The lock file, locked and signed."""
    while True:
        file = (directory / LOCK).open("a+")
        try:
            if not _lock_soon(file):
                raise LockedError.of(directory, _holder(file))
            if _is_still_at(directory / LOCK, file):  # its holder before this one may just have removed it
                _sign(file)
                return file
        except LockedError as error:
            file.close()
            if wait is None:
                raise
            wait(error)
        except BaseException:
            file.close()
            raise
        else:
            file.close()


def _lock_soon(file: IO[str]) -> bool:
    """Whether the file is this process's, within the moment for which whoever only looks at the lock may have it."""
    deadline = time.monotonic() + _MOMENT_S
    while not _try_lock(file, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            return False
        time.sleep(_MOMENT_S / 5)
    return True


def _try_lock(file: IO[str], kind: int) -> bool:
    """Whether the file is this process's now."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return _is_free_by_name(file, error)
    return True


def _is_free_by_name(file: IO[str], error: OSError) -> bool:
    """Without locks, what the file says has to do: a process of this machine can be looked up, another's cannot."""
    holder = _holder(file)
    if holder is not None and holder.is_seen and holder.pid != os.getpid():
        return False
    unseen = "" if holder is None or holder.host == socket.gethostname() else f"; {holder} is taken to have ended"
    print(
        f"aligner: note: {file.name}: no locks here ({error.strerror}): launches on two machines are not kept apart{unseen}",
        file=sys.stderr,
    )
    return True


def _is_still_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _sign(file: IO[str]) -> None:
    holder = Holder(os.getpid(), socket.gethostname(), f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}")
    file.truncate(0)
    file.write(json.dumps(asdict(holder)) + "\n")
    file.flush()


def _holder(file: IO[str]) -> Holder | None:
    file.seek(0)
    try:
        return Holder(**json.loads(file.read()))
    except (ValueError, TypeError):  # it has the lock, and has not written yet
        return None
