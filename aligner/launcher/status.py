"""What a run does, for `aligner status`: from its directory, its servers and Slurm's queue."""

import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from aligner.config.compose import load_config
from aligner.errors import FINISHED, RESUMABLE, ConfigError, is_stopped
from aligner.launcher.failure import resume_command
from aligner.launcher.rank_environment import is_healthy
from aligner.launcher.run_directory import LauncherState, RoleState, read_state
from aligner.launcher.slurm.slurm_commands import is_in_queue
from aligner.observability.console import WINDOW, Pace, describe_step
from aligner.observability.metrics import read_metrics
from aligner.paths import RunPaths, can_resume, early_end, run_paths
from aligner.placement.addresses import load_endpoints
from aligner.schema import Config

_SLURM_S = 5.0  # how long Slurm is waited for
_ANSWER_S = 2.0  # how long a server is waited for
_GOES_ON = ("starting", "running")
OVER = ("finished", "failed", "stopped")


@dataclass(frozen=True)
class RoleStatus:
    """How a role is."""

    ranks: int
    health: str
    """starting, healthy, restarting, not answering, or gone."""
    restarts: int

    def __str__(self) -> str:
        return self.health + (
            f" ({self.restarts} restart{'s' * (self.restarts > 1)})" if self.restarts else ""
        )


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
    """Why it has ended, and how to go on; of one that has finished, by what it reached if not by
    its steps."""


def read_status(run: Path) -> RunStatus:
    """The status of a run directory. Raises ConfigError where `run` is none."""
    if not run.is_dir():
        raise ConfigError(
            f"{run}: no such directory; give a run directory, whose path `aligner launch` prints"
        )
    paths = RunPaths(run.absolute())
    if not paths.config.is_file():
        raise ConfigError(
            f"{run}: not a run directory, because it has no config.yaml; `aligner launch` prints"
            " the path of the run directory"
        )
    return status_of(paths, load_config(paths.config), read_metrics(paths.metrics))


def status_of(
    paths: RunPaths, config: Config, metrics: Sequence[Mapping[str, float]], *, asking: bool = True
) -> RunStatus:
    """The same of what was read already; of the metrics the newest few suffice.

    Without `asking` nothing but the run's files is looked at: its launcher's word on the servers
    stands, and Slurm's queue is not known.
    """
    now, launcher = time.time(), read_state(paths.status)
    config = replace(config, run=replace(config.run, dir=str(paths.root)))  # it may have been moved
    pace = Pace(config.run.steps)
    for record in metrics[-WINDOW:]:
        pace.add(record)
    step = int(metrics[-1]["step"]) if metrics else 0
    last_step = paths.metrics.stat().st_mtime if metrics else None
    state = _state(config, launcher, step, last_step)
    in_queue = _is_in_queue(config, launcher, asking) if state == "stopped" else False
    if in_queue:
        state = "queued"
    resumable = (
        state in OVER
        and step < config.run.steps
        and early_end(paths) is None
        and can_resume(config)
    )
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
        roles={} if launcher is None else _roles(config, launcher, state, asking),
        job=None if launcher is None else launcher.job,
        exit_code=None if launcher is None else launcher.exit_code,
        note=_note(config, launcher, state, resumable, in_queue),
    )


def describe_status(status: RunStatus) -> str:
    """A line for what it does, and one for why it does no more."""
    parts = [status.state, f"step {status.step}/{status.steps}"]
    parts += describe_step(status.metrics, status.seconds_per_step, status.seconds_left)
    if status.last_step_age_s is not None:
        parts.append(f"last step {timedelta(seconds=round(status.last_step_age_s))} ago")
    if status.job is not None:
        parts.append(f"job {status.job}")
    line = f"{status.name}: {'  '.join(parts)}"
    if status.roles and status.state in _GOES_ON:
        line += "  [" + ", ".join(f"{name} {role}" for name, role in status.roles.items()) + "]"
    return line if status.note is None else f"{line}\n  {status.note}"


def _state(
    config: Config, launcher: LauncherState | None, step: int, last_step: float | None
) -> str:
    is_done = step >= config.run.steps or early_end(run_paths(config)) is not None
    if launcher is None:
        waiting = "queued" if config.cluster.kind == "slurm" else "stopped"
        return "finished" if is_done else waiting
    if launcher.queued_again:
        return "queued"
    if launcher.exit_code == FINISHED:
        return "finished" if is_done else "stopped"  # run.stop_after
    if launcher.exit_code is not None:
        return "stopped" if is_stopped(launcher.exit_code) else "failed"
    if launcher.is_gone(run_paths(config).status.stat().st_mtime):
        return "stopped"
    return "starting" if last_step is None or last_step < launcher.started else "running"


def _is_in_queue(config: Config, launcher: LauncherState | None, asking: bool) -> bool | None:
    """Whether Slurm will start a stopped run again, as after a preemption or a node's failure;
    None: not known."""
    if launcher is None or launcher.job is None or launcher.exit_code in (FINISHED, RESUMABLE):
        return False
    if config.cluster.kind != "slurm" or not config.cluster.slurm.requeue:
        return False
    return is_in_queue(launcher.job, _SLURM_S) if asking else None


def _roles(
    config: Config, launcher: LauncherState, state: str, asking: bool
) -> dict[str, RoleStatus]:
    file = run_paths(config).endpoints
    endpoints = load_endpoints(file) if file.is_file() else {}

    def health(name: str, role: RoleState) -> str:
        if state not in _GOES_ON:
            return "gone"
        if role.silent:  # whatever its Triton says, which may outlive its ranks' life
            return "not answering"
        if name not in endpoints:
            if role.restarts and not role.healthy:
                return "restarting"
            return "healthy" if state == "running" else "starting"
        endpoint = endpoints[name]
        if not asking:
            answers = role.healthy
        elif (
            endpoint.host in ("127.0.0.1", "localhost", "::1")
            and launcher.host != socket.gethostname()
        ):
            answers = role.healthy  # it cannot be asked from here
        else:
            answers = is_healthy(config, name, endpoint, _ANSWER_S)
        if answers:
            return "healthy"
        if role.healthy:
            return "not answering"
        return "restarting" if role.restarts else "starting"

    return {
        name: RoleStatus(role.ranks, health(name, role), role.restarts)
        for name, role in launcher.roles.items()
    }


def _note(
    config: Config,
    launcher: LauncherState | None,
    state: str,
    resumable: bool,
    in_queue: bool | None,
) -> str | None:
    """Why the run does no more, and how it goes on; None for one that runs or has done all of its
    steps."""
    paths = run_paths(config)
    jobs = (
        f"squeue --name={config.run.name}" if launcher is None else f"squeue --jobs={launcher.job}"
    )
    if in_queue:
        how = f"the run's Slurm job is in the queue and will resume the run: {jobs}"
    elif state == "queued":
        log = paths.job_log("*" if launcher is None else str(launcher.job))
        return (
            f"the run's Slurm job is waiting to start: {jobs}; if the job is no longer queued, see"
            f" {log}"
        )
    elif state in ("failed", "stopped"):
        command = (
            f"sbatch {shlex.quote(str(paths.job_script))}"
            if config.cluster.kind == "slurm"
            else resume_command(config)
        )
        how = f"{'resume' if resumable else 'restart'} the run with: {command}"
        if in_queue is None:
            how = (
                f"if the run's job is still queued ({jobs}), the job resumes the run; otherwise"
                f" {how}"
            )
    else:
        return early_end(paths) if state == "finished" else None
    why = "no status.json" if launcher is None else launcher.why_ended
    return f"{why}; {how}" if why else how
