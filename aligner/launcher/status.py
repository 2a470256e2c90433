"""The status of a run, for `aligner status`.

Sources are the files of the run directory, the servers and the queue of the cluster.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from aligner.config.compose import load_config
from aligner.errors import FINISHED, RESUMABLE, AlignerError, ConfigError, is_stop_code
from aligner.launcher.failure import resume_command
from aligner.launcher.job_systems import get_job_system
from aligner.launcher.rank_environment import is_healthy
from aligner.launcher.run_directory import (
    LauncherState,
    LockedError,
    RoleState,
    read_state,
    require_unlocked,
)
from aligner.observability.console import WINDOW_STEPS, Pace, describe_step
from aligner.observability.metrics import read_metrics
from aligner.observability.timeline import read_stages
from aligner.paths import RunPaths, can_resume, get_run_paths, read_early_end
from aligner.placement.addresses import load_endpoints
from aligner.schema import Config

_QUEUE_TIMEOUT_S = 5.0
_SERVER_TIMEOUT_S = 2.0
_ACTIVE_STATES = ("starting", "running")
ENDED_STATES = ("finished", "failed", "stopped")


@dataclass(frozen=True)
class RoleStatus:
    """Status of one role or server group."""

    ranks: int
    health: str
    """`starting`, `healthy`, `restarting`, `not answering`, `finished` (the run has finished) or
    `gone` (the run has ended early)."""
    restarts: int
    """Number of restarts in the current launch."""

    def __str__(self) -> str:
        return self.health + (
            f" ({self.restarts} restart{'s' * (self.restarts > 1)})" if self.restarts else ""
        )


@dataclass(frozen=True)
class RunStatus:
    """Status of one run. `aligner status --json` prints these fields."""

    name: str
    directory: str
    """Absolute path of the run directory."""
    state: str
    """`queued`, `starting`, `running`, `finished`, `failed` or `stopped`."""
    resumable: bool
    """Whether the run has ended and can be resumed from a checkpoint."""
    step: int
    """Last completed step."""
    steps: int
    """Number of steps of the whole run (`run.steps`)."""
    metrics: Mapping[str, float]
    """Metrics of the last step; empty before the first step."""
    seconds_per_step: float | None
    seconds_left: float | None
    """Estimated time until the last step; None for a run that is not active."""
    last_step_age_s: float | None
    """Seconds since the last step was recorded; None before the first step."""
    roles: Mapping[str, RoleStatus]
    job: str | None
    """Id of the job on its cluster; None for a local run."""
    exit_code: int | None
    """Exit code of the launcher; None while it runs."""
    stages: Mapping[str, str]
    """Current stage of each role that is starting, with the progress of long stages."""
    note: str | None
    """Reason for the end of the run, and the command that resumes it; None for an active run.

    For a finished run, the note names the end rule that the run reached before its last step, if
    any.
    """


def read_status(run: Path) -> RunStatus:
    """Return the status of the run in a directory.

    Args:
        run: The run directory.

    Raises:
        ConfigError: `run` is not a run directory.
    """
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
    return build_status(paths, load_config(paths.config), read_metrics(paths.metrics))


def build_status(
    paths: RunPaths,
    config: Config,
    metrics: Sequence[Mapping[str, float]],
    *,
    query_services: bool = True,
) -> RunStatus:
    """Return the status of a run whose configuration and metrics have been read already.

    Args:
        paths: Paths of the run directory.
        config: The run's configuration.
        metrics: Metrics of the newest steps; the last few steps suffice.
        query_services: Whether to send requests to the servers and to the cluster. Otherwise, the
            health of the servers is read from `status.json`, and the state of the queue is
            unknown.
    """
    now = time.time()
    launcher = read_state(paths.status)
    # The run directory may have been moved since the launch.
    config = replace(config, run=replace(config.run, dir=str(paths.root)))
    pace = Pace(config.run.steps)
    for record in metrics[-WINDOW_STEPS:]:
        pace.add(record)

    step = int(metrics[-1]["step"]) if metrics else 0
    last_step_at = paths.metrics.stat().st_mtime if metrics else None
    state = _run_state(config, launcher, step, last_step_at)
    in_queue = _is_in_queue(config, launcher, query_services) if state == "stopped" else False
    if in_queue:
        state = "queued"
    resumable = (
        state in ENDED_STATES
        and step < config.run.steps
        and read_early_end(paths) is None
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
        seconds_left=pace.seconds_left if state in _ACTIVE_STATES else None,
        last_step_age_s=None if last_step_at is None else max(0.0, now - last_step_at),
        roles={} if launcher is None else _role_statuses(config, launcher, state, query_services),
        job=None if launcher is None else launcher.job,
        exit_code=None if launcher is None else launcher.exit_code,
        stages=read_stages(paths) if state == "starting" else {},
        note=_describe_end(config, launcher, state, resumable, in_queue),
    )


def read_active_state(run: Path) -> str | None:
    """Return the state of a run that is queued, starting or running.

    The result is None if the run has ended, or if the directory contains no run that this release
    can read. A run counts as running if this user may not read its files.
    """
    try:
        require_unlocked(run)
        state = read_status(run).state
    except (LockedError, PermissionError):
        return "running"
    except AlignerError:
        return None
    return None if state in ENDED_STATES else state


def describe_status(status: RunStatus) -> str:
    """Return a line with the state and progress of a run, and further lines with the stages of its
    start and its note."""
    parts = [status.state, f"step {status.step}/{status.steps}"]
    parts += describe_step(status.metrics, status.seconds_per_step, status.seconds_left)
    if status.last_step_age_s is not None:
        parts.append(f"last step {timedelta(seconds=round(status.last_step_age_s))} ago")
    if status.job is not None:
        parts.append(f"job {status.job}")
    line = f"{status.name}: {'  '.join(parts)}"
    if status.roles and status.state in _ACTIVE_STATES:
        line += "  [" + ", ".join(f"{name} {role}" for name, role in status.roles.items()) + "]"
    stage_lines = [f"{role}: {stage}" for role, stage in status.stages.items()]
    note_lines = [] if status.note is None else [status.note]
    return "\n  ".join([line, *stage_lines, *note_lines])


def _run_state(
    config: Config, launcher: LauncherState | None, step: int, last_step_at: float | None
) -> str:
    """Return the state of a run from its files.

    Args:
        config: The run's configuration.
        launcher: Content of `status.json`.
        step: Last completed step.
        last_step_at: Time of the last step, in seconds since the epoch.
    """
    is_done = step >= config.run.steps or read_early_end(get_run_paths(config)) is not None
    if launcher is None:
        unlaunched_state = "stopped" if config.cluster.kind == "local" else "queued"
        return "finished" if is_done else unlaunched_state
    if launcher.queued_again:
        return "queued"
    if launcher.exit_code == FINISHED:
        return "finished" if is_done else "stopped"  # run.stop_after
    if launcher.exit_code is not None:
        return "stopped" if is_stop_code(launcher.exit_code) else "failed"
    if launcher.is_gone(get_run_paths(config).status.stat().st_mtime):
        return "stopped"
    return "starting" if last_step_at is None or last_step_at < launcher.started else "running"


def _is_in_queue(
    config: Config, launcher: LauncherState | None, query_services: bool
) -> bool | None:
    """Return whether the cluster will start a stopped run again, for example after a preemption.

    The result is None if this is not known.
    """
    if launcher is None or launcher.job is None or launcher.exit_code in (FINISHED, RESUMABLE):
        return False
    if not config.cluster.is_requeued:
        return False
    if not query_services:
        return None
    return get_job_system(config).is_in_queue(config, launcher.job, _QUEUE_TIMEOUT_S)


def _role_statuses(
    config: Config, launcher: LauncherState, state: str, query_services: bool
) -> dict[str, RoleStatus]:
    """Return the status of each role that the launcher recorded."""
    endpoints_file = get_run_paths(config).endpoints
    endpoints = load_endpoints(endpoints_file) if endpoints_file.is_file() else {}

    def health(name: str, role: RoleState) -> str:
        """Return the health of one role (see `RoleStatus.health`)."""
        if state not in _ACTIVE_STATES:
            return "finished" if state == "finished" else "gone"
        # Triton may still respond although the ranks of the server are silent.
        if role.silent:
            return "not answering"
        if name not in endpoints:
            if role.restarts and not role.healthy:
                return "restarting"
            return "healthy" if state == "running" else "starting"
        endpoint = endpoints[name]
        if not query_services:
            is_responding = role.healthy
        elif (
            endpoint.host in ("127.0.0.1", "localhost", "::1")
            and launcher.host != socket.gethostname()
        ):
            is_responding = role.healthy  # the loopback address belongs to another machine
        else:
            is_responding = is_healthy(config, name, endpoint, _SERVER_TIMEOUT_S)
        if is_responding:
            return "healthy"
        if role.healthy:
            return "not answering"
        return "restarting" if role.restarts else "starting"

    return {
        name: RoleStatus(role.ranks, health(name, role), role.restarts)
        for name, role in launcher.roles.items()
    }


def _describe_end(
    config: Config,
    launcher: LauncherState | None,
    state: str,
    resumable: bool,
    in_queue: bool | None,
) -> str | None:
    """Return the reason for the end of a run, and the command that resumes it.

    The result is None for an active run, and for a run that has completed all steps.
    """
    system = None if config.cluster.kind == "local" else get_job_system(config)
    job = None if launcher is None else launcher.job
    queue_command = "" if system is None else system.get_queue_command(config, job)
    if system is not None and in_queue:
        instructions = (
            f"the run's {system.job_noun} is in the queue and will resume the run: {queue_command}"
        )
    elif system is not None and state == "queued":
        return (
            f"the run's {system.job_noun} is waiting to start: {queue_command}; if the job is no"
            f" longer queued, see {system.get_log_hint(config, job)}"
        )
    elif state in ("failed", "stopped"):
        command = resume_command(config) if system is None else system.get_start_command(config)
        instructions = f"{'resume' if resumable else 'restart'} the run with: {command}"
        if in_queue is None:
            instructions = (
                f"if the run's job is still queued ({queue_command}), the job resumes the run;"
                f" otherwise {instructions}"
            )
    else:
        return read_early_end(get_run_paths(config)) if state == "finished" else None
    reason = "no status.json" if launcher is None else launcher.end_reason
    return f"{reason}; {instructions}" if reason else instructions
