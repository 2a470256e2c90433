"""`status.json`: the launcher's word on its run, for whoever looks at the run directory from outside."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType

from aligner.errors import RESUMABLE, AlignerError
from aligner.files import write_file
from aligner.launch.interrupts import Interrupted
from aligner.launch.kernel import process_start

HEARTBEAT_S = 10.0
"""So often the launcher touches the file."""


@dataclass(frozen=True)
class RoleState:
    """A role, or a server group."""

    ranks: int
    healthy: bool = False
    """Whether it was when the launcher last asked; the trainer is not asked."""
    restarts: int = 0


@dataclass(frozen=True)
class RunState:
    """What the file says."""

    pid: int
    """The launcher's, on its host."""
    pid_start: int | None
    """When that process was started (`aligner.launch.kernel.process_start`)."""
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
    heartbeat: float = field(default=0.0, compare=False)
    """When the launcher last touched the file: not written in it."""


def write_state(state: RunState, path: Path) -> None:
    """Write the file, whole."""
    content = asdict(state)
    del content["heartbeat"]
    write_file(path, json.dumps(content, indent=1) + "\n")


def read_state(path: Path) -> RunState | None:
    """Read the file; None where there is none. Raises AlignerError for something else."""
    try:
        heartbeat = path.stat().st_mtime
        content = json.loads(path.read_text())
        roles = {name: RoleState(**role) for name, role in content.pop("roles").items()}
        return RunState(**content, roles=roles, heartbeat=heartbeat)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise AlignerError(f"{path} is not what a launcher writes: {error}") from error


def launcher_is_gone(state: RunState, now: float) -> bool:
    """Whether the launcher has ended without a word: its process, or where that is elsewhere, its heartbeat."""
    if state.ended is not None:
        return False
    if state.job is None and state.host == socket.gethostname():
        return process_start(state.pid) != state.pid_start
    return now - state.heartbeat > 6 * HEARTBEAT_S


class StateRecorder:
    """Keeps a run's `status.json` while the launcher runs it: the `with` block's end is the run's.

    Where the file cannot be written, on a full disk, the run goes on without.
    """

    def __init__(self, path: Path, roles: Mapping[str, int], job: str | None = None) -> None:
        """`roles` has the number of ranks of each."""
        self._path = path
        pid, ranks = os.getpid(), {name: RoleState(count) for name, count in roles.items()}
        self._state = RunState(pid, process_start(pid), socket.gethostname(), time.time(), ranks, job)
        self._touched = 0.0
        self._early: str | None = None

    def __enter__(self) -> StateRecorder:
        self._write(self._state)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        code, reason = (0, None) if self._early is None else (RESUMABLE, self._early)
        if isinstance(error, Interrupted):
            code, reason = 128 + error.number, f"stopped by {error}"
        elif error is not None:
            code, reason = 1, (str(error) or type(error).__name__).splitlines()[0]
            if isinstance(error, AlignerError):
                code, reason = error.exit_code, error.summary
        self._write(replace(self._state, ended=time.time(), exit_code=code, reason=reason))

    def update(self, role: str, *, healthy: bool, restarts: int = 0) -> None:
        """How a role is now; the file is written when that has changed."""
        now = replace(self._state.roles[role], healthy=healthy, restarts=restarts)
        if now != self._state.roles[role]:
            self._write(replace(self._state, roles={**self._state.roles, role: now}))

    def stopped_early(self, reason: str) -> None:
        """The run was told to stop, and has done so before its end."""
        self._early = reason

    def queued_again(self) -> None:
        """So its job is queued again; it may not have time to say more."""
        self._write(replace(self._state, ended=time.time(), exit_code=RESUMABLE, reason=self._early, queued_again=True))

    def beat(self) -> None:
        """The launcher lives: to be called every second or so."""
        if time.monotonic() - self._touched > HEARTBEAT_S:
            with contextlib.suppress(OSError):
                os.utime(self._path)
            self._touched = time.monotonic()

    def _write(self, state: RunState) -> None:
        self._state, self._touched = state, time.monotonic()
        with contextlib.suppress(OSError):
            write_state(state, self._path)
