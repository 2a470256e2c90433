"""A run's directory, for one launch alone: made ready, resumed, and left with the run's timeline
and summary."""

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil
from rich.console import Console

from aligner.config.compose import save_config
from aligner.config.resume import check_directory, dated, is_unused, settled
from aligner.data.claim import take_run
from aligner.errors import AlignerError, ConfigError, Stopped, exit_code
from aligner.files import NO_LOCKS, Holder, write_file
from aligner.launcher.failure import next_steps
from aligner.launcher.processes import process_start
from aligner.observability.console import print_line, print_summary
from aligner.observability.metrics import read_metrics
from aligner.observability.trace import write_trace
from aligner.paths import LOCK, PRIVATE, RunPaths, early_end, run_paths
from aligner.placement.addresses import create_access_key
from aligner.placement.roles import role_ranks
from aligner.schema import Config

HEARTBEAT_S = 10.0
"""So often the launcher touches the file."""


@dataclass(frozen=True)
class RoleState:
    """A role, or a server group."""

    ranks: int
    healthy: bool = False
    """Whether it was when the launcher last asked; of the trainer, which is not asked, whether it
    is not being replaced."""
    restarts: int = 0
    silent: bool = False
    """Whether one of its ranks, or the server, has not shown life for a while."""


@dataclass(frozen=True)
class LauncherState:
    """What the file says."""

    pid: int
    """The launcher's, on its host."""
    pid_start: int | None
    """When that process was started (`aligner.launcher.processes.process_start`)."""
    host: str
    started: float
    """Seconds since the epoch, as are the other times."""
    roles: Mapping[str, RoleState]
    job: str | None = None
    """The cluster's job that it runs in; the launcher's host is then none to look for it on."""
    ended: float | None = None
    exit_code: int | None = None
    reason: str | None = None
    queued_again: bool = False
    """Whether the job, which has ended, waits in its queue to go on."""

    def is_gone(self, heartbeat: float) -> bool:
        """Whether the launcher has ended without a word: its process or, where that is elsewhere,
        the file's last touch."""
        if self.ended is not None:
            return False
        if self.job is None and self.host == socket.gethostname():
            return process_start(self.pid) != self.pid_start
        return time.time() - heartbeat > 6 * HEARTBEAT_S

    @property
    def why_ended(self) -> str | None:
        """Why a run that has ended did so."""
        if self.ended is not None:
            return self.reason
        where = f"job {self.job}" if self.job is not None else f"process {self.pid} on {self.host}"
        return f"the launcher ({where}) is no longer running and did not record the end of the run"

    def write(self, path: Path) -> None:
        """Write the file, whole."""
        write_file(path, json.dumps(asdict(self), indent=1) + "\n")


def read_state(path: Path) -> LauncherState | None:
    """Read the file; None where there is none. Raises AlignerError for something else."""
    try:
        content = json.loads(path.read_text())
        roles = {name: RoleState(**role) for name, role in content.pop("roles").items()}
        return LauncherState(**content, roles=roles)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise AlignerError(f"{path}: not a valid status file: {error}") from error


class StateRecorder:
    """Keeps a run's `status.json` for as long as the `with` block; a full disk, where it cannot be
    written, ends no run."""

    def __init__(self, config: Config, job: str | None = None) -> None:
        self._paths = run_paths(config)
        self._path = self._paths.status
        pid, ranks = (
            os.getpid(),
            {name: RoleState(count) for name, count in role_ranks(config).items()},
        )
        self._state = LauncherState(
            pid, process_start(pid), socket.gethostname(), time.time(), ranks, job
        )
        self._touched = 0.0

    def __enter__(self) -> "StateRecorder":
        self._write()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(error)

    def update(self, role: str, restarts: int, *, healthy: bool, silent: bool) -> None:
        """How a role is now; the file is written when that has changed."""
        now = replace(self._state.roles[role], healthy=healthy, restarts=restarts, silent=silent)
        if now != self._state.roles[role]:
            self._write(roles={**self._state.roles, role: now})

    def beat(self) -> None:
        """The launcher lives: to be called every second or so."""
        if time.monotonic() - self._touched > HEARTBEAT_S:
            with contextlib.suppress(OSError):
                os.utime(self._path)
            self._touched = time.monotonic()

    def end(self, error: BaseException | None, queued_again: bool = False) -> None:
        """The run has ended, and its job may be queued again."""
        if error is None:
            reason = early_end(self._paths)
        else:
            told = error.summary if isinstance(error, AlignerError) else str(error)
            reason = (told or type(error).__name__).splitlines()[0]
        queued_again = queued_again or self._state.queued_again
        self._write(
            ended=time.time(), exit_code=exit_code(error), reason=reason, queued_again=queued_again
        )

    def _write(self, **changes: Any) -> None:
        self._state, self._touched = replace(self._state, **changes), time.monotonic()
        with contextlib.suppress(OSError):
            self._state.write(self._path)


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


@contextlib.contextmanager
def run_directory(config: Config, console: Console, patience_s: float = 0.0) -> Iterator[Config]:
    """Alone with the run's directory, ready to start or to resume; gives the configuration with
    run.resume settled.

    Writes the trace and, unless the run failed, prints a summary. Raises ConfigError where the
    directory is another run's, or after `patience_s` still another launch's. Nothing is left of a
    run that is refused before its trainer starts.
    """
    paths = run_paths(config)
    with locked(paths.root, patience_s=patience_s, mode=PRIVATE):
        check_directory(config)
        # from here on a trainer of an earlier launch changes nothing that is looked at
        if not (is_new := is_unused(paths)):
            take_run(config)
        config = dated(settled(config))
        if not config.run.resumes:
            _set_training_aside(paths, console)
        stopped = None
        try:
            save_config(config, paths.config)
            create_access_key(config)
            yield config
        except ConfigError:
            if is_new:
                shutil.rmtree(paths.root)
            raise
        except Stopped as error:
            stopped = error
        finally:
            try:
                write_trace(paths)
            except (AlignerError, OSError) as error:  # the run does not fail for want of it
                print_line(console, f"could not write {paths.trace}: {error}")
        metrics = read_metrics(paths.metrics)
        print_summary(metrics, paths, console)
        if (ended := early_end(paths)) is not None:
            print_line(console, ended)
        for line in next_steps(config, int(metrics[-1]["step"]) if metrics else 0):
            print_line(console, line)
        if stopped is not None:
            raise stopped


def _set_training_aside(paths: RunPaths, console: Console) -> None:
    """Move what a start that did not come to its first checkpoint has left out of the way; of what
    is empty nothing stays.

    Raises ConfigError for what cannot be moved.
    """
    left = [path for path in paths.of_training if path.exists()]
    if any(
        file.is_file() and file.stat().st_size for path in left for file in (path, *path.rglob("*"))
    ):
        aside = next(
            place for n in itertools.count(1) if not (place := paths.set_aside / str(n)).exists()
        )
        try:
            aside.mkdir(parents=True)
            for path in left:
                path.rename(aside / path.name)
        except OSError as error:
            raise ConfigError(
                f"run.dir={paths.root}: files of an earlier launch cannot be moved to another"
                f" directory: {error}; choose another run.dir"
            ) from error
        print_line(
            console,
            "no complete checkpoint: the run starts again from step 0. The files of the earlier"
            f" launch were moved to {aside}",
        )
    for path in left:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
