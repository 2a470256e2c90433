"""`status.json`: the launcher's word on its run, for whoever looks at the run directory from
outside."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from aligner.errors import AlignerError
from aligner.exit_codes import exit_code
from aligner.files import write_file
from aligner.launcher.processes import process_start
from aligner.paths import early_end, run_paths
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
