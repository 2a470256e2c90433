"""Start the roles of one run, watch them, restart failed roles, and stop all of them.

The code is independent of the place where the ranks run: local processes and tasks of a Slurm job
have the same interface, `Ranks`. Restarts are limited by `run.max_restarts` and
`server.max_restarts`.
"""

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aligner.checks.server import check_certificate
from aligner.errors import FINISHED, REFUSED, RESUMABLE, STOP_SIGNAL, ConfigError, Stopped
from aligner.launcher.failure import (
    add_first_cause,
    add_resume_command,
    build_failure_error,
    build_rank_error,
    describe_exit,
    find_root_failure,
    read_notes,
    read_reported_error,
)
from aligner.launcher.metrics_exporter import export_metrics
from aligner.launcher.processes import Interrupts
from aligner.launcher.rank_environment import FreePorts, pick_endpoints, reserve_free_ports
from aligner.launcher.rank_groups import GRACE_S, PrepareGroup, ServerGroup, TrainerGroup
from aligner.launcher.ranks import Rank, Ranks
from aligner.launcher.run_directory import StateRecorder, open_run_directory
from aligner.models.model_source import model_directory
from aligner.observability.console import RunConsole, make_progress, print_line
from aligner.observability.log_files import LogFollower
from aligner.observability.metrics import FileFollower
from aligner.observability.timeline import StageWatch, delete_stages, read_stages
from aligner.observability.user_errors import (
    UserError,
    UserErrorFollower,
    delete_user_errors,
    summarize_skip_reasons,
)
from aligner.paths import DAMAGE, find_complete_steps, get_run_paths
from aligner.placement.addresses import Endpoint, save_endpoints
from aligner.placement.roles import computes_on_devices
from aligner.placement.tls import renew_certificate
from aligner.schema import Config

# Seconds between two checks of all ranks.
_POLL_S = 0.1
# Seconds between two stop signals to the trainer: a rank that is still starting ignores the signal.
_RESEND_S = 5.0
# Seconds between two messages that the model is still being prepared.
_PROGRESS_S = 15.0
# Seconds after which a step is reported as still running for the first time.
_LONG_STEP_S = 60.0
# Seconds in which ranks exit after they lose a peer because of a collective timeout. A rank that
# still runs after this time did not take part in the collective.
_LOST_PEERS_S = 3.0


@dataclass
class Supervisor:
    """One launch of a run, from locking its directory to printing its summary.

    `aligner launch` creates one on a local machine, `aligner supervise` in a Slurm job. The two
    differ in `make_ranks`.
    """

    config: Config
    console: RunConsole
    interrupts: Interrupts
    make_ranks: Callable[[Config, FreePorts], Ranks]
    """Factory of the object that starts the ranks."""
    hosts: Mapping[str, str]
    """Address of each server group."""
    job: str | None = None
    """Slurm job id; None on a local machine."""
    requeue: Callable[[], None] | None = None
    """Requeues the job. The supervisor calls it if the run is stopped before its last step."""
    lock_timeout_s: float = 0.0
    """Seconds to wait until another launch releases the lock of the run directory."""
    _ranks: Ranks = field(init=False)
    _state: StateRecorder = field(init=False)
    _servers: list[ServerGroup] = field(default_factory=list)
    _trainer: TrainerGroup = field(init=False)
    _stop_signal_at: float = 0.0
    """Time of the next stop signal to the trainer; 0 before the first one."""

    def run(self) -> None:
        """Prepare the model, start the servers and the trainer, and wait until the trainer exits.

        If a stop was requested after training began, the trainer saves a checkpoint before
        `Stopped` is raised.

        Raises:
            ConfigError: The configuration, the model or the data are invalid.
            AlignerError: A role failed and cannot be restarted.
            Interrupted: A signal requested the immediate end of the run.
            Stopped: The run was stopped before its last step.
        """
        with (
            open_run_directory(self.config, self.console, self.lock_timeout_s) as self.config,
            StateRecorder(self.config, self.job) as self._state,
            reserve_free_ports(self.config) as ports,
            closing(self.make_ranks(self.config, ports)) as self._ranks,
        ):
            renew_certificate(self.config, self.hosts.values())
            check_certificate(self.config, self.hosts.values())
            with export_metrics(self.config) as metrics_url:
                if metrics_url is not None:
                    print_line(self.console, f"Prometheus metrics: {metrics_url}")
                self._run_roles(ports)

    def _run_roles(self, ports: FreePorts) -> None:
        """Run `prepare`, and then all roles. If the run is stopped early, requeue the job."""
        try:
            self._prepare()
            self._train(pick_endpoints(self.config, self.hosts, ports))
            self._drain_servers()
        except Stopped as stopped:
            # Requeue before all other work: the scheduler's grace period may end first.
            if self.requeue is not None:
                self.requeue()
                # The process may be killed before `StateRecorder.__exit__` records the end.
                self._state.record_end(stopped, queued_again=True)
            raise

    def _prepare(self) -> None:
        """Create the model directory if necessary, and check the model and the prompts together.

        This happens in one rank, `prepare`, before any other rank starts.

        Raises:
            ConfigError: `prepare` found an error in the configuration, the model or the data.
            AlignerError: `prepare` failed, or made no progress for `server.start_timeout_s`.
            Stopped: A stop was requested, or `prepare` received a SIGTERM from outside.
        """
        directory = model_directory(self.config)
        timeout = self.config.server.start_timeout_s
        group = PrepareGroup(self.config, self._ranks, partial(print_line, self.console))
        action = "checking" if directory.exists() else "creating"
        print_line(self.console, f"{action} the model directory: {directory}")

        paths = get_run_paths(self.config)
        delete_stages(paths)  # an earlier launch may have left them
        stage = ""
        prepare_began = reported_at = stage_began = time.monotonic()
        while not group.has_completed and not group.has_failed:
            self._tick()
            group.poll()
            self.interrupts.check_before_training()
            now = time.monotonic()
            new_stage = read_stages(paths).get("prepare", "")
            if new_stage != stage:
                stage, stage_began = new_stage, now
            if now - reported_at > _PROGRESS_S:
                reported_at = now
                text = stage or f"still {action} the model directory and reading the data"
                print_line(self.console, f"{text} ({now - prepare_began:.0f} s)")
            # Large data take long: the time since the last progress counts, not the total time.
            if now - max(group.started_at, stage_began) > timeout:
                progress = f"; its last report was: {stage}" if stage else ""
                raise build_rank_error(
                    f"prepare made no progress for server.start_timeout_s={timeout:g} s{progress}",
                    group.ranks[0],
                )

        (rank,) = group.ranks
        if rank.exit_code == REFUSED:
            raise ConfigError(read_reported_error(rank))
        if rank.exit_code != FINISHED:
            self._wait_for_related_exits()
            self._raise_if_terminated_externally([rank])
            raise build_failure_error([rank])
        self._ranks.kill([rank])  # also ends helper processes that the rank left behind
        for note in read_notes(rank):
            print_line(self.console, f"note: {note}")
        print_line(
            self.console, f"model and data are ready after {time.monotonic() - prepare_began:.1f} s"
        )
        self.interrupts.check_before_training()

    def _train(self, endpoints: Mapping[str, Endpoint]) -> None:
        """Start every role, and poll all of them until the trainer exits.

        Args:
            endpoints: Address and ports of each server group.

        Raises:
            AlignerError: A rank failed and cannot be restarted.
            Interrupted: A signal requested the immediate end of the run.
            Stopped: The trainer saved a checkpoint after a stop request, or was terminated from
                outside.
        """
        save_endpoints(dict(endpoints), get_run_paths(self.config).endpoints)
        delete_stages(get_run_paths(self.config))
        delete_user_errors(get_run_paths(self.config))
        with closing(RunView(self.config, self.console)) as view:
            # Groups without a model start first: the fork server has their imports ready earlier
            # (cli/fork_server.py).
            for name in sorted(endpoints, key=partial(computes_on_devices, self.config)):
                self._servers.append(
                    ServerGroup(name, endpoints[name], self.config, self._ranks, view.show_note)
                )
            trainer = self._trainer = TrainerGroup(
                self.config, self._ranks, view.show_note, self._restart_critic
            )

            while not trainer.has_completed:
                self._tick()
                self._raise_failures(view)
                self._check_stragglers()
                if all(server.was_healthy for server in self._servers):
                    self._forward_stop_request(view)
                else:
                    self.interrupts.check_before_training()

                for server in self._servers:
                    server.poll()
                    self._state.update_role(
                        server.name,
                        server.restarts,
                        healthy=server.is_healthy,
                        silent=server.is_silent,
                    )

                trainer.poll()
                self._state.update_role(
                    "trainer",
                    trainer.restarts,
                    healthy=not trainer.is_replaced,
                    silent=trainer.is_silent,
                )

                view.show_waiting_servers(
                    [server.name for server in self._servers if not server.was_healthy]
                )
                view.update()

        if any(rank.exit_code == RESUMABLE for rank in trainer.ranks):
            # Skip draining the servers: the scheduler leaves little time after a stop request.
            self.interrupts.stop("stopped on request after saving a checkpoint")

    def _restart_critic(self) -> None:
        """Restart the critic with its initial weights, after a trainer that left no checkpoint.

        The critic was updated together with the lost trainer, so its weights do not belong to step
        0.
        """
        for server in self._servers:
            if server.name == "critic":
                server.restart("was updated by a trainer that now restarts from step 0,")

    def _tick(self) -> None:
        """Check for signals, wait up to `_POLL_S` seconds, and update the state of all ranks."""
        self.interrupts.check()
        self._state.record_heartbeat()
        self._ranks.wait(_POLL_S)
        self._ranks.poll()

    def _raise_failures(self, view: "RunView") -> None:
        """Raise an error if a rank failed and its group cannot be restarted.

        Args:
            view: Reads the exceptions of the user's code, one of which may be the cause.

        Raises:
            AlignerError: A rank failed for good; the error describes the rank that is the likely
                cause.
            Stopped: A SIGTERM from outside ended a trainer rank.
        """
        if not self._fatal_ranks():
            return
        self._wait_for_related_exits()
        self._raise_if_terminated_externally(self._trainer.ranks)
        fatal = self._fatal_ranks()
        # The first failure may be a consequence of another failure that a restart can fix.
        if not fatal:
            return
        if missing_ranks := self._trainer.missing_ranks:
            self._wait_for_related_exits(_LOST_PEERS_S)
            fatal = self._fatal_ranks()
            missing_ranks = self._trainer.missing_ranks
        ended_servers = [rank for server in self._servers for rank in server.ended_ranks]
        error = build_failure_error(
            [*fatal, *(rank for rank in ended_servers if rank not in fatal)], fatal, missing_ranks
        )
        view.update()
        log = find_root_failure(fatal).log
        error = add_first_cause(error, log, view.user_errors, view.skip_reasons)
        raise add_resume_command(error, self.config)

    def _wait_for_related_exits(self, for_s: float = GRACE_S) -> None:
        """Wait for events that have the same cause as an exit.

        Such events are exits of other ranks, or a signal to this process.

        Args:
            for_s: Waiting time in seconds.
        """
        deadline = time.monotonic() + for_s
        while time.monotonic() < deadline:
            self._tick()

    def _fatal_ranks(self) -> list[Rank]:
        """Return the ended ranks of all groups that cannot be restarted."""
        return [
            rank
            for group in (*self._servers, self._trainer)
            if group.has_failed
            for rank in group.ended_ranks
        ]

    def _raise_if_terminated_externally(self, ranks: Sequence[Rank]) -> None:
        """Raise Stopped if a SIGTERM that the supervisor did not send ended a rank.

        A preemption by the scheduler begins with such a signal.
        """
        for rank in ranks:
            if rank.exit_code == -signal.SIGTERM:
                self.interrupts.stop(f"{describe_exit(rank)}, which the launcher did not send")

    def _check_stragglers(self) -> None:
        """Raise AlignerError if a trainer rank still runs long after another one has exited.

        The ranks of the trainer exit together, so a rank that exceeds
        `cluster.collective_timeout_s` hangs.
        """
        timeout = self.config.cluster.collective_timeout_s
        ranks = self._trainer.ranks
        ends = [rank.ended_at for rank in ranks if rank.ended_at is not None]
        running = [rank for rank in ranks if rank.exit_code is None]
        if ends and running and time.monotonic() - min(ends) > timeout:
            raise build_rank_error(
                f"trainer rank {running[0].rank} is still running {timeout:g} s"
                " (cluster.collective_timeout_s) after another trainer rank exited",
                running[0],
            )

    def _forward_stop_request(self, view: "RunView") -> None:
        """Send a requested stop to the trainer, repeatedly until it exits.

        Args:
            view: Shows the request once.
        """
        now = time.monotonic()
        if not self.interrupts.is_stop_requested or now < self._stop_signal_at:
            return
        if not self._stop_signal_at:
            view.update()
            view.show_note(self.interrupts.describe_stop(view.current_step))
        self._stop_signal_at = now + _RESEND_S
        self._ranks.send(STOP_SIGNAL, self._trainer.ranks)

    def _drain_servers(self) -> None:
        """Send SIGTERM to the servers, and wait until they have answered their accepted requests.

        Servers that exceed `server.drain_timeout_s` are ended together with the run.
        """
        servers = [rank for server in self._servers for rank in server.ranks]
        self._ranks.send(signal.SIGTERM, servers)
        deadline = time.monotonic() + self.config.server.drain_timeout_s
        while time.monotonic() < deadline and any(rank.exit_code is None for rank in servers):
            self._tick()


class RunView:
    """Console output of one launch: waiting servers, stages, steps and samples.

    The view reads the files that the trainer writes to the run directory, so it needs no connection
    to the ranks.
    """

    def __init__(self, config: Config, console: RunConsole) -> None:
        """Follow the files of a run.

        Args:
            config: The run's configuration.
            console: Console for the output.
        """
        paths = get_run_paths(config)
        # The steps before a resume were shown by the earlier launch.
        self._metrics = FileFollower(
            paths.metrics, newest_bytes=0 if config.run.should_resume else None
        )
        self._samples = FileFollower(
            paths.samples, newest_bytes=0 if config.run.should_resume else None
        )
        self._progress = make_progress(config.run.steps, console, str(paths.root))
        self._logs = LogFollower(paths.logs) if console.mode == "verbose" else None
        completed_steps = find_complete_steps(paths.checkpoints) if config.run.should_resume else []
        self.current_step = max(completed_steps, default=0) + 1
        """The step that is running."""
        self._has_step = False
        self._last_report_at = time.monotonic()
        self._report_interval_s = _LONG_STEP_S
        self.show_note = self._progress.show_note
        """Function that prints a message on a line that stays visible above the progress bar."""
        self._checkpoints = paths.checkpoints
        self._reported_damage = set(self._damage_reports())
        self._waiting_servers: list[str] | None = None
        self._started_at = time.monotonic()
        self._stages = StageWatch(paths, self.show_note)
        self._pending: list[dict[str, Any]] = []
        self._paths = paths
        self._prompts_per_step = config.rollout.prompts_per_step
        self._user_error_follower = UserErrorFollower(paths)
        self.user_errors: list[UserError] = []
        """Exceptions of the user's code in this launch: the first and the newest of each place."""
        self.skip_reasons: list[str] = []
        """Reasons of the prompts that were skipped since the last step with skipped prompts."""
        self._shown_skip_reasons: list[str] = []

    def show_waiting_servers(self, roles: list[str]) -> None:
        """Show which servers are not healthy yet, if this has changed since the last call.

        Args:
            roles: Names of the server groups that are not healthy.
        """
        roles = sorted(roles)
        if roles == self._waiting_servers:
            return
        is_first = self._waiting_servers is None
        self._waiting_servers = roles
        text = f"waiting for servers: {', '.join(roles)}" if roles else "all servers are healthy"
        if is_first:
            self._progress.show_status(
                text if roles else "starting the trainer; the run has no servers"
            )
        else:
            self._progress.show_status(
                f"{text} (after {time.monotonic() - self._started_at:.1f} s)"
            )

    def update(self) -> None:
        """Show everything that was recorded since the last call."""
        for file in sorted(set(self._damage_reports()) - self._reported_damage):
            self._reported_damage.add(file)
            self.show_note(
                f"a checkpoint is damaged and was moved to {file.parent}:"
                f" {file.read_text().strip()}"
            )
        self._stages.poll()
        if self._logs is not None:
            for name, line in self._logs.read_new_lines():
                self.show_note(f"{name}: {line}")
        self._read_user_errors()
        for record in self._metrics.read_new_records():
            self._progress.show_step(record, self._describe_skipped_prompts(record))
            self.current_step = int(record["step"]) + 1
            self._has_step = self.current_step > 1
            self._last_report_at = time.monotonic()
            self._report_interval_s = _LONG_STEP_S
        self._report_long_step()
        new_samples = self._samples.read_new_records()
        # The samples of a step are written one by one. They are complete when a call finds no more.
        if self._pending and not new_samples:
            self._progress.show_samples(self._pending)
            self._pending = []
        self._pending += new_samples

    def _report_long_step(self) -> None:
        """Report that a step is still running, at intervals that double."""
        running_s = time.monotonic() - self._last_report_at
        # `StageWatch` reports the first step, and `show_waiting_servers` the servers.
        if not self._has_step or running_s < self._report_interval_s:
            return
        self._report_interval_s *= 2
        self._progress.show_status(
            f"step {self.current_step} has been running for {running_s:.0f} s"
        )

    def _read_user_errors(self) -> None:
        """Read new exceptions of the user's code, and show the first of each place in full. Read
        the reasons of skipped prompts."""
        reports = self._user_error_follower.read_new_reports()
        self.skip_reasons += reports.skip_reasons
        for error in reports.errors:
            known_errors = [known for known in self.user_errors if known.place == error.place]
            if not known_errors:
                self._progress.show_error(
                    f"{error.summary}\n{error.traceback or ''}\nlog: {error.log}"
                )
            for known in known_errors[1:]:
                self.user_errors.remove(known)
            self.user_errors.append(error)

    def _describe_skipped_prompts(self, metrics: Mapping[str, float]) -> str | None:
        """Return how many prompts a step has skipped, and the reasons.

        The result is None for a step that skipped no prompt. In an asynchronous run, the reasons
        may belong to samples that were generated for the next steps.
        """
        count = int(metrics.get("rollout/skipped", 0))
        if not count:
            return None
        reasons, self.skip_reasons = self.skip_reasons or self._shown_skip_reasons, []
        self._shown_skip_reasons = reasons
        text = (
            summarize_skip_reasons(reasons, self.user_errors)
            if reasons
            else f"for the reasons see {self._paths.log('trainer', 0)}"
        )
        return f"{count} of {self._prompts_per_step} prompts skipped: {text}"

    def _damage_reports(self) -> Iterable[Path]:
        """Return the files that describe damaged checkpoints."""
        return self._checkpoints.glob(f"*.damaged*/{DAMAGE}")

    def close(self) -> None:
        """Show the remaining records, and restore the terminal."""
        # The first call reads the last samples, the second one shows them.
        self.update()
        self.update()
        self._progress.close()
