"""`aligner status`: what a run does, from its directory and its servers."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aligner.errors import RESUMABLE, ConfigError

if TYPE_CHECKING:
    from aligner.launch.state import RoleState, RunState
    from aligner.paths import RunPaths
    from aligner.schema import Config

_WATCH_S = 5.0
_SLURM_S = 5.0
"""How long Slurm is waited for."""
_GOES_ON = ("starting", "running")
_OVER = ("finished", "failed", "stopped")


@dataclass(frozen=True)
class RoleStatus:
    """How a role is."""

    ranks: int
    health: str
    """starting, healthy, restarting, not answering, or gone."""
    restarts: int


@dataclass(frozen=True)
class RunStatus:
    """How a run is."""

    name: str
    directory: str
    state: str
    """queued, starting, running, finished, failed or stopped."""
    resumable: bool
    """Whether it has ended, and can be continued from a checkpoint."""
    step: int
    steps: int
    metrics: Mapping[str, float]
    """Of the last step."""
    seconds_per_step: float | None
    seconds_left: float | None
    last_step_age_s: float | None
    roles: Mapping[str, RoleStatus]
    job: str | None
    exit_code: int | None
    note: str | None
    """Why it has ended, and how to go on."""


def read_status(run: Path) -> RunStatus:
    """The status of a run directory. Raises ConfigError where `run` is none."""
    from aligner.config.compose import load_config
    from aligner.launch.state import read_state
    from aligner.observability.console import WINDOW, Pace
    from aligner.observability.metrics import read_metrics
    from aligner.paths import RunPaths

    if not run.is_dir():
        raise ConfigError(f"{run}: no such directory; give a run directory, as `aligner launch` prints it first")
    paths, now = RunPaths(run.absolute()), time.time()
    if not paths.config.is_file():
        raise ConfigError(
            f"{run}: not a run directory, it has no config.yaml; `aligner launch` prints a run's directory first"
        )
    config, launcher = load_config(paths.config), read_state(paths.status)
    metrics, pace = read_metrics(paths.metrics), Pace(config.run.steps)
    for record in metrics[-WINDOW:]:
        pace.add(record)
    step = int(metrics[-1]["step"]) if metrics else 0
    last_step = paths.metrics.stat().st_mtime if metrics else None
    state = _state(config, launcher, step, last_step, now)
    is_in_queue = _is_in_queue(config, launcher) if state == "stopped" else False
    if is_in_queue:
        state = "queued"
    resumable = state in _OVER and step < config.run.steps and _has_checkpoint(config, paths)
    return RunStatus(
        name=str(config.run.name),
        directory=str(paths.root),
        state=state,
        resumable=resumable,
        step=step,
        steps=config.run.steps,
        metrics=metrics[-1] if metrics else {},
        seconds_per_step=pace.seconds_per_step,
        seconds_left=pace.seconds_left if state in _GOES_ON else None,
        last_step_age_s=None if last_step is None else max(0.0, now - last_step),
        roles={} if launcher is None else _roles(config, paths, launcher, state),
        job=None if launcher is None else launcher.job,
        exit_code=None if launcher is None else launcher.exit_code,
        note=_note(config, paths, launcher, state, resumable, is_in_queue),
    )


def describe_status(status: RunStatus) -> str:
    """A line for what it does, and one for why it does no more."""
    from aligner.observability.console import describe_learning

    parts = [status.state, f"step {status.step}/{status.steps}", *describe_learning(status.metrics)]
    if status.seconds_per_step is not None:
        parts.append(f"{status.seconds_per_step:.2f} s/step")
    if status.seconds_left is not None:
        parts.append(f"ETA {timedelta(seconds=round(status.seconds_left))}")
    if status.last_step_age_s is not None:
        parts.append(f"last step {timedelta(seconds=round(status.last_step_age_s))} ago")
    if status.job is not None:
        parts.append(f"job {status.job}")
    line = f"{status.name}: {'  '.join(parts)}"
    if status.roles and status.state in _GOES_ON:
        line += "  [" + ", ".join(f"{name} {_describe_role(role)}" for name, role in status.roles.items()) + "]"
    return line if status.note is None else f"{line}\n  {status.note}"


def _describe_role(role: RoleStatus) -> str:
    return role.health + (f" ({role.restarts} restart{'s' * (role.restarts > 1)})" if role.restarts else "")


def _state(config: Config, launcher: RunState | None, step: int, last_step: float | None, now: float) -> str:
    from aligner.launch.state import launcher_is_gone

    is_done = step >= config.run.steps
    if launcher is None:
        waiting = "queued" if config.cluster.kind == "slurm" else "stopped"
        return "finished" if is_done else waiting
    if launcher.queued_again:
        return "queued"
    if launcher.ended is not None:
        if launcher.exit_code == 0:
            return "finished" if is_done else "stopped"  # run.stop_after
        return "stopped" if launcher.exit_code == RESUMABLE or (launcher.exit_code or 0) > 128 else "failed"
    if launcher_is_gone(launcher, now):
        return "stopped"
    return "starting" if last_step is None or last_step < launcher.started else "running"


def _is_in_queue(config: Config, launcher: RunState | None) -> bool | None:
    """Whether Slurm has the job of a run that others have stopped in its queue, and so starts it again; None: not known.

    A preemption, a node that fails and `scontrol requeue` end the launcher as does what ends the run for good.
    """
    from aligner.launch.slurm.commands import is_in_queue

    if launcher is None or launcher.job is None or launcher.exit_code in (0, RESUMABLE):
        return False
    return config.cluster.kind == "slurm" and config.cluster.slurm.requeue and is_in_queue(launcher.job, _SLURM_S)


def _roles(config: Config, paths: RunPaths, launcher: RunState, state: str) -> dict[str, RoleStatus]:
    from aligner.placement.addresses import load_endpoints

    endpoints = load_endpoints(paths.endpoints) if paths.endpoints.is_file() else {}

    def health(name: str, role: RoleState) -> str:
        if state not in _GOES_ON:
            return "gone"
        if name not in endpoints:
            return "healthy" if state == "running" else "starting"
        answers = _answers(config, name, endpoints[name], launcher)
        if answers if answers is not None else role.healthy:
            return "healthy"
        if role.healthy:
            return "not answering"
        return "restarting" if role.restarts else "starting"

    return {name: RoleStatus(role.ranks, health(name, role), role.restarts) for name, role in launcher.roles.items()}


def _answers(config: Config, group: str, endpoint: Any, launcher: RunState) -> bool | None:
    """Whether the server says that it is ready; None where it cannot be asked from here."""
    from aligner.launch.endpoints import health_address, is_ready
    from aligner.launch.roles import served_model

    if endpoint.host in ("127.0.0.1", "localhost", "::1") and launcher.host != socket.gethostname():
        return None
    return is_ready(health_address(config, endpoint), served_model(group), timeout_s=2.0)


def _has_checkpoint(config: Config, paths: RunPaths) -> bool:
    from dataclasses import replace

    from aligner.paths import can_resume

    return can_resume(replace(config, run=replace(config.run, dir=str(paths.root))))


def _note(
    config: Config, paths: RunPaths, launcher: RunState | None, state: str, resumable: bool, is_in_queue: bool | None
) -> str | None:
    jobs = f"squeue --name={config.run.name}" if launcher is None else f"squeue --jobs={launcher.job}"
    if is_in_queue:
        how = f"Slurm has its job in the queue, and it goes on by itself: {jobs}"
    elif state == "queued":
        log = paths.job_log("*" if launcher is None else str(launcher.job))
        return f"its job waits for its start: {jobs}; where it does not any more, {log} says why"
    elif state in ("failed", "stopped"):
        how = f"{'resume it' if resumable else 'start it again'} with: {_starts_again(config, paths)}"
        if is_in_queue is None:
            how = f"where its job is in the queue ({jobs}) it goes on by itself, otherwise {how}"
    else:
        return None
    why = _why(launcher)
    return f"{why}; {how}" if why else how


def _why(launcher: RunState | None) -> str | None:
    """Why a run has ended."""
    if launcher is None:
        return "it has no status.json"
    if launcher.ended is not None:
        return launcher.reason
    where = f"job {launcher.job}" if launcher.job is not None else f"process {launcher.pid} on {launcher.host}"
    return f"its launcher, {where}, is gone without having ended it"


def _starts_again(config: Config, paths: RunPaths) -> str:
    """The command that goes on with a run where it is, or begins it there where there is nothing to go on from."""
    if config.cluster.kind == "slurm":
        return f"sbatch {shlex.quote(str(paths.job_script))}"
    launched = config.run.command or f"aligner launch experiment={config.run.experiment}"
    return f"{launched} {shlex.quote(f'run.dir={paths.root}')} run.resume=auto"


def add_status(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    what = "tell what a run does: its step, reward, pace, time left, and the health of its roles"
    command = commands.add_parser("status", help=what, description=what, allow_abbrev=False)
    command.add_argument("run_directory", type=Path, metavar="RUN", help="a run directory, as `aligner launch` prints it")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a line")
    command.add_argument("--watch", action="store_true", help=f"tell again every {_WATCH_S:g} s until the run has ended")
    command.set_defaults(run=_status)


def _status(parsed: argparse.Namespace) -> None:
    with contextlib.suppress(KeyboardInterrupt):  # the way to end --watch
        while True:
            status = read_status(parsed.run_directory)
            print(json.dumps(asdict(status)) if parsed.json else describe_status(status), flush=True)
            if not parsed.watch or status.state in _OVER:
                return
            time.sleep(_WATCH_S)
