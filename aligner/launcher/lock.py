"""One launch at a time on a directory, by a lock of the operating system's that ends with the
process that has it."""

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO

import psutil

from aligner.errors import ConfigError
from aligner.files import NO_LOCKS, Holder
from aligner.paths import LOCK

_PATIENCE_S = 0.25  # for whoever only looks at the lock, and has it meanwhile


class LockedError(ConfigError):
    """Another launch works on the directory."""

    holder: Holder | str = "another process"


@contextlib.contextmanager
def locked(
    directory: Path,
    wait: Callable[[LockedError], None] | None = None,
    patience_s: float = 0.0,
    mode: int = 0o777,
) -> Iterator[None]:
    """Alone with a directory, which is made where there is none. However the process ends, the lock
    ends with it.

    Where another process has it after `patience_s`: raises LockedError, or calls `wait` again and
    again until it has not. The file is removed, as are directories that were made for it and are
    empty. Raises ConfigError where none can be made. `mode` is that of the directory where it is
    made; those above it are made as usual.
    """
    made: list[Path] = []
    try:
        try:
            made += [path for path in (directory, *directory.parents) if not path.exists()]
            directory.mkdir(mode, parents=True, exist_ok=True)
            file = _locked_file(directory, wait, max(patience_s, _PATIENCE_S))
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(
                f"run.dir={directory}: is not writable: {why}; choose another run.dir"
            ) from error
        with file:
            try:
                yield
            finally:
                # while it is held: whoever waits for this file finds it gone
                (directory / LOCK).unlink(missing_ok=True)
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


def refuse_locked(directory: Path) -> None:
    """Raise LockedError where another process works on the directory; nothing is made or
    changed."""
    try:
        file = (directory / LOCK).open("r+")
    except OSError:
        return
    with file:
        if not _try_lock(file, fcntl.LOCK_SH):  # which does not keep away others that only look
            raise _locked_error(directory, file)


def _locked_file(
    directory: Path, wait: Callable[[LockedError], None] | None, patience_s: float
) -> IO[str]:
    """The lock file, locked and signed."""
    path = directory / LOCK
    while True:
        with contextlib.ExitStack() as until_taken:
            file = until_taken.enter_context(path.open("a+"))
            if not _try_lock(file, fcntl.LOCK_EX, patience_s):
                error = _locked_error(directory, file)
            elif _is_still_at(path, file):
                file.truncate(0)
                file.write(json.dumps(asdict(Holder.here())) + "\n")
                file.flush()
                until_taken.pop_all()
                return file
            else:  # its holder before this one has just removed it
                continue
        if wait is None:
            raise error
        wait(error)


def _locked_error(directory: Path, file: IO[str]) -> LockedError:
    holder = _holder(file) or LockedError.holder  # it has the lock, and may not have written yet
    error = LockedError(
        f"run.dir={directory}: in use by {holder}; wait until the other launch ends or stop that"
        " launch, or set another run.dir or run.name"
    )
    error.holder = holder
    return error


def _try_lock(file: IO[str], kind: int, patience_s: float = 0.0) -> bool:
    """Whether the file is this process's, now or within so long."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PATIENCE_S / 5)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return _is_free_by_name(file, error)
        else:
            return True


def _is_free_by_name(file: IO[str], error: OSError) -> bool:
    """Without locks, what the file says has to do: a process of this machine can be looked up,
    another's cannot."""
    holder, unseen = _holder(file), ""
    if holder is not None and holder.host != socket.gethostname():
        unseen = f"; aligner assumes that {holder} has ended"
    elif holder is not None and holder.pid != os.getpid() and psutil.pid_exists(holder.pid):
        return False
    print(
        f"aligner: note: {file.name}: the file system does not support locks ({error.strerror}), so"
        f" simultaneous launches on two machines are not detected{unseen}",
        file=sys.stderr,
    )
    return True


def _is_still_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _holder(file: IO[str]) -> Holder | None:
    file.seek(0)
    try:
        return Holder(**json.loads(file.read()))
    except (ValueError, TypeError):
        return None
