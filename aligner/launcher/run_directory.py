"""The run directory on the launcher's side: its lock, its `status.json`, and its use by one launch.

`open_run_directory` locks and prepares the directory, and writes the timeline and the summary at
the end. `StateRecorder` keeps `status.json` up to date, which `aligner status` and the viewer read.
A lock of the operating system, which ends with the process, ensures that only one launch at a time
uses a directory.
"""

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil
from pydantic import TypeAdapter
from rich.console import Console

from aligner.cache_entries import record_use
from aligner.config.compose import save_config
from aligner.config.resume import check_directory, is_unused, with_date, with_decided_resume
from aligner.data.fencing import claim_run
from aligner.errors import AlignerError, ConfigError, Stopped, get_exit_code
from aligner.file_limits import MAX_CONFIG_BYTES, parse_json, read_limited_bytes
from aligner.files import NO_LOCKS, LockHolder, write_file
from aligner.launcher.failure import describe_next_steps
from aligner.launcher.processes import read_start_ticks
from aligner.masking import mask_secrets
from aligner.models.model_source import gguf_file, model_directory
from aligner.observability.console import RunConsole, print_line, print_summary
from aligner.observability.metrics import read_metrics
from aligner.observability.trace import write_trace
from aligner.paths import LOCK, PRIVATE_MODE, RunPaths, get_run_paths, read_early_end
from aligner.placement.addresses import create_access_key
from aligner.placement.roles import count_role_ranks
from aligner.schema import Config
from aligner.schema.references import find_read_paths
from aligner.terminal import print_note
from aligner.vllm_environment import get_default_vllm_directory

HEARTBEAT_S = 10.0
"""Seconds between two updates of the modification time of `status.json`."""


@dataclass(frozen=True)
class RoleState:
    """State of a role or server group, as `status.json` records it."""

    ranks: int
    healthy: bool = False
    """Result of the last health check; the trainer is healthy while it is not being replaced."""
    restarts: int = 0
    silent: bool = False
    """Whether a rank, or the server, has sent no heartbeat for half of its timeout."""


@dataclass(frozen=True)
class LauncherState:
    """The content of `status.json`: the state of the launcher and of all roles."""

    pid: int
    """Process id of the launcher on its host."""
    pid_start: int | None
    """Start time of the launcher's process in clock ticks
    (`aligner.launcher.processes.read_start_ticks`)."""
    host: str
    started: float
    """Start of the launch in seconds since the epoch, like `ended`."""
    roles: Mapping[str, RoleState]
    job: str | None = None
    """Slurm job id of the launcher; None for a local run."""
    ended: float | None = None
    exit_code: int | None = None
    reason: str | None = None
    queued_again: bool = False
    """Whether the job was requeued and will resume the run."""

    def is_gone(self, heartbeat: float) -> bool:
        """Return whether the launcher has exited without recording the end of the run.

        For a local run, the result depends on the process table if this is the launcher's host.
        Otherwise, it depends on the age of the last heartbeat.

        Args:
            heartbeat: Modification time of `status.json`, in seconds since the epoch.
        """
        if self.ended is not None:
            return False
        if self.job is None and self.host == socket.gethostname():
            return read_start_ticks(self.pid) != self.pid_start
        # Six missed heartbeats tolerate a slow shared file system.
        return time.time() - heartbeat > 6 * HEARTBEAT_S

    @property
    def end_reason(self) -> str | None:
        """Reason for the end of a run that has ended; None if the run ended without an error."""
        if self.ended is not None:
            return self.reason
        launcher = (
            f"job {self.job}" if self.job is not None else f"process {self.pid} on {self.host}"
        )
        return (
            f"the launcher ({launcher}) is no longer running and did not record the end of the run"
        )

    def write(self, path: Path) -> None:
        """Write the state to a file, atomically."""
        write_file(path, json.dumps(asdict(self), indent=1) + "\n")


def read_state(path: Path) -> LauncherState | None:
    """Return the state in a `status.json`; None if the file does not exist.

    Raises:
        AlignerError: The file is not a valid status file.
    """
    try:
        content = parse_json(read_limited_bytes(path, MAX_CONFIG_BYTES))
        return TypeAdapter(LauncherState).validate_python(content)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise AlignerError(f"{path}: not a valid status file: {error}") from error


class StateRecorder:
    """Context manager that keeps a run's `status.json` up to date.

    If the disk is full, the file is not updated, and the run continues.
    """

    def __init__(self, config: Config, job: str | None = None) -> None:
        """Create the state of a launch that begins now.

        Args:
            config: The run's configuration.
            job: Slurm job id; None on a local machine.
        """
        self._paths = get_run_paths(config)
        self._path = self._paths.status
        pid = os.getpid()
        roles = {name: RoleState(count) for name, count in count_role_ranks(config).items()}
        self._state = LauncherState(
            pid, read_start_ticks(pid), socket.gethostname(), time.time(), roles, job
        )
        self._touched_at = 0.0

    def __enter__(self) -> "StateRecorder":
        self._write()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.record_end(error)

    def update_role(self, role: str, restarts: int, *, healthy: bool, silent: bool) -> None:
        """Record the current state of a role; write the file only if the state has changed.

        Args:
            role: Role or server group.
            restarts: Number of its restarts in this launch.
            healthy: See `RoleState`.
            silent: See `RoleState`.
        """
        role_state = replace(
            self._state.roles[role], healthy=healthy, restarts=restarts, silent=silent
        )
        if role_state != self._state.roles[role]:
            self._write(roles={**self._state.roles, role: role_state})

    def record_heartbeat(self) -> None:
        """Update the file's modification time if `HEARTBEAT_S` seconds have passed.

        The supervisor calls this method several times per second.
        """
        if time.monotonic() - self._touched_at > HEARTBEAT_S:
            with contextlib.suppress(OSError):
                os.utime(self._path)
            self._touched_at = time.monotonic()

    def record_end(self, error: BaseException | None, queued_again: bool = False) -> None:
        """Record the end of the run.

        Args:
            error: The error that ended the run; None for a run that ended as configured.
            queued_again: Whether the job was requeued.
        """
        if error is None:
            reason = read_early_end(self._paths)
        else:
            message = error.summary if isinstance(error, AlignerError) else str(error)
            reason = mask_secrets((message or type(error).__name__).splitlines()[0])
        queued_again = queued_again or self._state.queued_again
        self._write(
            ended=time.time(),
            exit_code=get_exit_code(error),
            reason=reason,
            queued_again=queued_again,
        )

    def _write(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        self._touched_at = time.monotonic()
        with contextlib.suppress(OSError):
            self._state.write(self._path)


# Minimum time to wait for a lock: `require_unlocked` holds the lock for a moment.
_MIN_LOCK_TIMEOUT_S = 0.25


class LockedError(ConfigError):
    """Another launch uses the directory."""

    holder: LockHolder | str = "another process"
    """Process that holds the lock."""


@contextlib.contextmanager
def lock_directory(
    directory: Path,
    wait: Callable[[LockedError], None] | None = None,
    timeout_s: float = 0.0,
    mode: int = 0o777,
) -> Iterator[None]:
    """Hold the lock of a directory in a `with` block, and create the directory if necessary.

    The kernel releases the lock when the process ends, even if it is killed. At the end of the
    block, the lock file is removed. Directories that this function created are removed if they are
    empty.

    Args:
        directory: The directory.
        wait: Function that is called repeatedly while another process holds the lock after the
            timeout. It may raise an exception.
        timeout_s: Seconds to wait for the lock.
        mode: Mode of the directory if it is created; its new parents get the usual mode.

    Raises:
        LockedError: Another process holds the lock after the timeout, and `wait` is None.
        ConfigError: The directory cannot be created or written.
    """
    created: list[Path] = []
    try:
        try:
            created += [path for path in (directory, *directory.parents) if not path.exists()]
            directory.mkdir(mode, parents=True, exist_ok=True)
            file = _acquire_lock(directory, wait, max(timeout_s, _MIN_LOCK_TIMEOUT_S))
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(
                f"run.dir={directory}: is not writable: {reason}; choose another run.dir"
            ) from error
        with file:
            try:
                yield
            finally:
                # Unlink the file before its release. A process that waits for this file then
                # notices in `_is_same_file` that it must open a new one.
                (directory / LOCK).unlink(missing_ok=True)
    finally:
        # Remove the deepest directory first. A directory that contains files is kept.
        for path in created:
            with contextlib.suppress(OSError):
                path.rmdir()


def reserve_directory(directory: Path) -> Path:
    """Create a directory that no other process uses, and return it.

    If the directory exists, its name gets the suffix `-2`, `-3` and so on. The creation is the
    reservation: of several processes that call this function at the same time, each gets a
    directory of its own.

    Args:
        directory: Preferred directory. Its parents are created if necessary.

    Raises:
        ConfigError: The directory cannot be created.
    """
    for number in itertools.count(1):
        candidate = directory if number == 1 else directory.with_name(f"{directory.name}-{number}")
        try:
            candidate.parent.mkdir(parents=True, exist_ok=True)
            candidate.mkdir(PRIVATE_MODE)
        except FileExistsError:
            # A parent that is a file raises this error, too, for every candidate.
            if not directory.parent.is_dir():
                raise ConfigError(
                    f"run.dir={directory}: {directory.parent} is not a directory; choose another"
                    " run.dir"
                ) from None
        except OSError as error:
            raise ConfigError(
                f"run.dir={directory}: cannot be created: {error.strerror or error}; choose another"
                " run.dir"
            ) from error
        else:
            return candidate
    raise AssertionError  # itertools.count() has no end


@contextlib.contextmanager
def reserve_run_directory(config: Config) -> Iterator[Config]:
    """Reserve a new directory for a run with the default name in a `with` block.

    The default name contains the time of the launch in seconds, so that launches in the same second
    have the same name. At the end of the block, the directory is removed if it is empty.

    Args:
        config: Configuration with the default name and directory.

    Yields:
        The configuration with the name and directory of the reserved directory.
    """
    preferred = get_run_paths(config).root
    created = [path for path in preferred.parents if not path.exists()]
    reserved = reserve_directory(preferred)
    try:
        yield replace(config, run=replace(config.run, name=reserved.name, dir=str(reserved)))
    finally:
        for path in (reserved, *created):
            with contextlib.suppress(OSError):
                path.rmdir()


def require_unlocked(directory: Path) -> None:
    """Raise LockedError if another process holds the lock of a directory.

    Nothing is created or changed.
    """
    try:
        file = (directory / LOCK).open("r+")
    except OSError:
        return
    with file:
        # A shared lock does not conflict with other processes that only check the lock.
        if not _try_lock(file, fcntl.LOCK_SH):
            raise _build_locked_error(directory, file)


def _acquire_lock(
    directory: Path, wait: Callable[[LockedError], None] | None, timeout_s: float
) -> IO[str]:
    """Lock the lock file of a directory, write this process's identity into it, and return it."""
    path = directory / LOCK
    while True:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(path.open("a+"))
            if not _try_lock(file, fcntl.LOCK_EX, timeout_s):
                error = _build_locked_error(directory, file)
            elif _is_same_file(path, file):
                file.truncate(0)
                file.write(json.dumps(asdict(LockHolder.for_this_process())) + "\n")
                file.flush()
                stack.pop_all()
                return file
            else:  # the previous holder removed the file while this process waited for it
                continue
        if wait is None:
            raise error
        wait(error)


def _build_locked_error(directory: Path, file: IO[str]) -> LockedError:
    # A process that has just acquired the lock may not have written its identity yet.
    holder = _read_holder(file) or LockedError.holder
    error = LockedError(
        f"run.dir={directory}: in use by {holder}; wait until the other launch ends or stop that"
        " launch, or set another run.dir or run.name"
    )
    error.holder = holder
    return error


def _try_lock(file: IO[str], kind: int, timeout_s: float = 0.0) -> bool:
    """Return whether this process has locked the file within the timeout.

    Args:
        file: The open lock file.
        kind: `fcntl.LOCK_EX` or `fcntl.LOCK_SH`.
        timeout_s: Seconds to wait.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_MIN_LOCK_TIMEOUT_S / 5)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return _is_holder_gone(file, error)
        else:
            return True


def _is_holder_gone(file: IO[str], error: OSError) -> bool:
    """Return whether the process in the lock file has ended, if the file system has no locks.

    The process table contains only processes of this machine. A process of another machine is
    assumed to have ended, and a note reports this assumption.
    """
    holder = _read_holder(file)
    assumption = ""
    if holder is not None and holder.host != socket.gethostname():
        assumption = f"; aligner assumes that {holder} has ended"
    elif holder is not None and holder.pid != os.getpid() and psutil.pid_exists(holder.pid):
        return False
    print_note(
        f"{file.name}: the file system does not support locks ({error.strerror}), so simultaneous"
        f" launches on two machines are not detected{assumption}"
    )
    return True


def _is_same_file(path: Path, file: IO[str]) -> bool:
    """Return whether the path still refers to the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _read_holder(file: IO[str]) -> LockHolder | None:
    """Return the process that a lock file names; None for an empty or invalid file."""
    file.seek(0)
    try:
        return LockHolder(**parse_json(file.read()))
    except (ValueError, TypeError):
        return None


@contextlib.contextmanager
def open_run_directory(
    config: Config, console: RunConsole, timeout_s: float = 0.0
) -> Iterator[Config]:
    """Lock a run directory, and prepare it for a start or a resume.

    At the end of the block, the function writes the trace. Unless the run failed, it also prints a
    summary and the next steps. If the configuration is rejected in the block, a new directory is
    removed.

    Args:
        config: The run's configuration.
        console: Console for the summary.
        timeout_s: Seconds to wait for another launch to release the directory.

    Yields:
        The configuration with a final value of `run.resume`.

    Raises:
        ConfigError: The directory belongs to another run, or another launch still uses it after the
            timeout.
    """
    paths = get_run_paths(config)
    with lock_directory(paths.root, timeout_s=timeout_s, mode=PRIVATE_MODE):
        check_directory(config)
        # Fencing: from here on, a trainer of an earlier launch cannot write to the directory.
        if not (is_new := is_unused(paths)):
            claim_run(config)
        config = with_date(with_decided_resume(config))
        if not config.run.should_resume:
            _move_training_files(paths, console)
        stopped = None
        try:
            save_config(config, paths.config)
            create_access_key(config)
            record_cache_uses(config)
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
            except (AlignerError, OSError) as error:  # a missing trace does not fail the run
                print_line(console, f"could not write {paths.trace}: {error}")

        metrics = read_metrics(paths.metrics)
        with console.showing_result():
            print_summary(metrics, paths, console)
            if (end_text := read_early_end(paths)) is not None:
                print_line(console, end_text)
            for line in describe_next_steps(config, int(metrics[-1]["step"]) if metrics else 0):
                print_line(console, line)
        if stopped is not None:
            raise stopped


def record_cache_uses(config: Config) -> None:
    """Record which entries of the cache a run uses, for `aligner cache`."""
    inputs = [Path(path) for path in find_read_paths(config).values()]
    if config.model.source == "gguf":
        inputs += [gguf_file(config.model), model_directory(config)]
    if config.engine.kind == "vllm" and config.algorithm.generates_samples:
        inputs += [Path(config.engine.vllm.python or get_default_vllm_directory())]
    for path in inputs:
        record_use(path, get_run_paths(config).root)


def _move_training_files(paths: RunPaths, console: Console) -> None:
    """Move the files of a launch that wrote no complete checkpoint to another directory.

    Empty files and directories are deleted instead.

    Raises:
        ConfigError: A file cannot be moved.
    """
    files = [path for path in paths.training_files if path.exists()]
    has_content = any(
        file.is_file() and file.stat().st_size
        for path in files
        for file in (path, *path.rglob("*"))
    )
    if has_content:
        target = next(
            candidate
            for number in itertools.count(1)
            if not (candidate := paths.set_aside / str(number)).exists()
        )
        try:
            target.mkdir(parents=True)
            for path in files:
                path.rename(target / path.name)
        except OSError as error:
            raise ConfigError(
                f"run.dir={paths.root}: files of an earlier launch cannot be moved to another"
                f" directory: {error}; choose another run.dir"
            ) from error
        print_line(
            console,
            "no complete checkpoint: the run starts again from step 0. The files of the earlier"
            f" launch were moved to {target}",
        )
    for path in files:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
