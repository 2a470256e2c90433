"""One run's roles: started, watched, started again where that may be, and ended together, wherever
they run."""

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from aligner.checks.server import check_certificate
from aligner.errors import FINISHED, REFUSED, RESUMABLE, STOP_SIGNAL, ConfigError, Stopped
from aligner.launcher.failure import describe_end, failure_error, rank_error, reported_error
from aligner.launcher.processes import Interrupts
from aligner.launcher.rank_environment import FreePorts, free_ports, pick_endpoints
from aligner.launcher.rank_groups import GRACE_S, PrepareGroup, ServerGroup, TrainerGroup
from aligner.launcher.ranks import Rank, Ranks
from aligner.launcher.run_directory import StateRecorder, run_directory
from aligner.models.model_source import model_directory
from aligner.observability.console import make_progress, print_line
from aligner.observability.metrics import FileFollower
from aligner.observability.timeline import StageWatch, forget_stages
from aligner.paths import DAMAGE, run_paths
from aligner.placement.addresses import Endpoint, save_endpoints
from aligner.placement.roles import computes_on_devices
from aligner.placement.tls import renew_certificate
from aligner.schema import Config

_POLL_S = 0.1
# A trainer rank that is still starting does not hear that it should stop: it is told again
_TELL_AGAIN_S = 5.0
_STILL_S = 15.0
"""How often a person is told that the model is still being prepared."""
_SHORTEN_S = 5.0
"""How often it is looked whether a log is too long."""
_FOLLOW_S = 3.0
"""After a collective's timeout, how long the ranks that lose their peers by it take to end; who
goes on was not in it."""


@dataclass
class Supervisor:
    """One start of a run, from its directory's lock to its summary."""

    config: Config
    console: Console
    interrupts: Interrupts
    make_ranks: Callable[[Config, FreePorts], Ranks]
    hosts: Mapping[str, str]
    """Where each server group is reached."""
    job: str | None = None
    requeue: Callable[[], None] | None = None
    """Has the job queued again; called where the run is stopped before its end."""
    patience_s: float = 0.0
    """For another launch to let go of the run's directory."""
    _ranks: Ranks = field(init=False)
    _state: StateRecorder = field(init=False)
    _servers: list[ServerGroup] = field(default_factory=list)
    _trainer: TrainerGroup = field(init=False)
    _tell_at: float = 0.0
    """When the trainer is to be told again to stop; 0: it was not told yet."""
    _shorten_at: float = 0.0

    def run(self) -> None:
        """Prepare the model, start the servers and the trainer, and wait for the trainer's end.

        Raises AlignerError for a role that failed, Interrupted, and Stopped where the run was
        stopped before its end; one that was told to has taken a checkpoint then, if it had begun to
        train.
        """
        with (
            run_directory(self.config, self.console, self.patience_s) as self.config,
            StateRecorder(self.config, self.job) as self._state,
            free_ports(self.config) as ports,
            closing(self.make_ranks(self.config, ports)) as self._ranks,
        ):
            renew_certificate(self.config, self.hosts.values())
            check_certificate(self.config, self.hosts.values())
            try:
                self._prepare()
                self._train(pick_endpoints(self.config, self.hosts, ports))
                self._drain()
            except Stopped as stopped:
                # first of all: a grace period may end before what else is to be done
                if self.requeue is not None:
                    self.requeue()
                    self._state.end(stopped, queued_again=True)  # there may not be time to say more
                raise

    def _prepare(self) -> None:
        """Make the model's directory where it does not exist yet, and check it and the prompts
        against each other."""
        directory, timeout = model_directory(self.config), self.config.server.start_timeout_s
        group = PrepareGroup(self.config, self._ranks, partial(print_line, self.console))
        what = "checking" if directory.exists() else "creating"
        print_line(self.console, f"{what} the model directory: {directory}")
        began = told = time.monotonic()
        while not group.has_done and not group.lost:
            self._tick()
            group.poll()
            self.interrupts.check_before_training()
            if (now := time.monotonic()) - told > _STILL_S:
                told = now
                print_line(
                    self.console,
                    f"still {what} the model directory and reading the data: {now - began:.0f} s",
                )
            if now - group.started > timeout:
                raise rank_error(
                    f"prepare did not finish within server.start_timeout_s={timeout:g} s",
                    group.ranks[0],
                )
        (rank,) = group.ranks
        if rank.exit_code == REFUSED:
            raise ConfigError(reported_error(rank))
        if rank.exit_code != FINISHED:
            self._linger()
            self._stop_if_ended_from_outside([rank])
            raise failure_error([rank])
        self._ranks.kill([rank])  # and what came of it
        print_line(self.console, f"model and data are ready after {time.monotonic() - began:.1f} s")
        self.interrupts.check_before_training()

    def _train(self, endpoints: Mapping[str, Endpoint]) -> None:
        """Start every role, and wait for the trainer's end."""
        save_endpoints(dict(endpoints), run_paths(self.config).endpoints)
        forget_stages(run_paths(self.config))
        with closing(RunView(self.config, self.console)) as view:
            # First those without a model: their ranks need less to start (cli/fork_server.py).
            for name in sorted(endpoints, key=partial(computes_on_devices, self.config)):
                self._servers.append(
                    ServerGroup(name, endpoints[name], self.config, self._ranks, view.note)
                )
            trainer = self._trainer = TrainerGroup(
                self.config, self._ranks, view.note, self._forget_critic
            )
            while not trainer.has_done:
                self._tick()
                self._raise_failures()
                self._check_stragglers()
                if all(server.was_healthy for server in self._servers):
                    self._pass_on_stop(view)
                else:
                    self.interrupts.check_before_training()
                for server in self._servers:
                    server.poll()
                    self._state.update(
                        server.name,
                        server.restarts,
                        healthy=server.is_healthy,
                        silent=server.is_silent,
                    )
                trainer.poll()
                self._state.update(
                    "trainer",
                    trainer.restarts,
                    healthy=not trainer.is_replaced,
                    silent=trainer.is_silent,
                )
                view.waiting_for(
                    [server.name for server in self._servers if not server.was_healthy]
                )
                view.update()
                self._shorten_logs()
        if any(rank.exit_code == RESUMABLE for rank in trainer.ranks):
            # Without the servers' draining: who is told to stop has little time.
            self.interrupts.stop("stopped on request after saving a checkpoint")

    def _forget_critic(self) -> None:
        """Have a critic start anew: it has learned with a trainer that has left no checkpoint."""
        for server in self._servers:
            if server.name == "critic":
                server.begin_anew("was updated by a trainer that now restarts from step 0,")

    def _tick(self) -> None:
        self.interrupts.check()
        self._state.beat()
        self._ranks.wait(_POLL_S)
        self._ranks.poll()

    def _shorten_logs(self) -> None:
        if time.monotonic() < self._shorten_at:
            return
        self._shorten_at = time.monotonic() + _SHORTEN_S
        for rank in [rank for group in (*self._servers, self._trainer) for rank in group.ranks]:
            rank.shorten_log(self.config.logging.file_mib << 20)

    def _raise_failures(self) -> None:
        """Raise AlignerError for a rank that failed for good, Stopped where the trainer was ended
        from outside."""
        if not self._fatal():
            return
        self._linger()
        self._stop_if_ended_from_outside(self._trainer.ranks)
        fatal = self._fatal()
        if not fatal:  # what ended first was a consequence of what may be started again
            return
        if missing := self._trainer.missing:
            self._linger(_FOLLOW_S)
            fatal, missing = self._fatal(), self._trainer.missing
        ended = [rank for server in self._servers for rank in server.ended]
        raise failure_error(
            [*fatal, *(rank for rank in ended if rank not in fatal)], fatal, missing
        )

    def _linger(self, for_s: float = GRACE_S) -> None:
        """Wait for what comes together with a rank's end: other ends, or a signal to this process,
        for all of them."""
        deadline = time.monotonic() + for_s
        while time.monotonic() < deadline:
            self._tick()

    def _fatal(self) -> list[Rank]:
        return [
            rank for group in (*self._servers, self._trainer) if group.lost for rank in group.ended
        ]

    def _stop_if_ended_from_outside(self, ranks: Sequence[Rank]) -> None:
        """Raise Stopped where a SIGTERM that the supervisor did not send ended a rank: a preemption
        begins so."""
        for rank in ranks:
            if rank.exit_code == -signal.SIGTERM:
                self.interrupts.stop(f"{describe_end(rank)}, which the launcher did not send")

    def _check_stragglers(self) -> None:
        """Raise AlignerError where a trainer rank still runs long after the first has ended: they
        end together."""
        timeout, ranks = self.config.cluster.collective_timeout_s, self._trainer.ranks
        ends = [rank.ended_at for rank in ranks if rank.ended_at is not None]
        running = [rank for rank in ranks if rank.exit_code is None]
        if ends and running and time.monotonic() - min(ends) > timeout:
            raise rank_error(
                f"trainer rank {running[0].rank} is still running {timeout:g} s"
                " (cluster.collective_timeout_s) after another trainer rank exited",
                running[0],
            )

    def _pass_on_stop(self, view: "RunView") -> None:
        """Where the launcher was told to stop the run, tell the trainer, until it has ended."""
        now = time.monotonic()
        if not self.interrupts.told_to_stop or now < self._tell_at:
            return
        if not self._tell_at:
            view.note("stop requested: the run saves a checkpoint after this step and then ends")
        self._tell_at = now + _TELL_AGAIN_S
        self._ranks.send(STOP_SIGNAL, self._trainer.ranks)

    def _drain(self) -> None:
        """SIGTERM to the servers, and time to answer what they have taken; whoever needs more is
        ended with the run."""
        servers = [rank for server in self._servers for rank in server.ranks]
        self._ranks.send(signal.SIGTERM, servers)
        deadline = time.monotonic() + self.config.server.drain_timeout_s
        while time.monotonic() < deadline and any(rank.exit_code is None for rank in servers):
            self._tick()


class RunView:
    """Shows steps and samples as the trainer records them."""

    def __init__(self, config: Config, console: Console) -> None:
        paths = run_paths(config)
        # A resumed run's earlier steps have been seen.
        self._metrics = FileFollower(paths.metrics, newest_bytes=0 if config.run.resumes else None)
        self._samples = FileFollower(paths.samples, newest_bytes=0 if config.run.resumes else None)
        self._progress = make_progress(config.run.steps, console)
        self.note = self._progress.note
        """Tells what has happened, on a line that stays."""
        self._checkpoints = paths.checkpoints
        self._set_aside = set(self._damaged())
        self._waiting: list[str] | None = None
        self._began, self._stages = time.monotonic(), StageWatch(paths, self.note)
        self._pending: list[dict[str, Any]] = []

    def waiting_for(self, roles: list[str]) -> None:
        """Show which servers are not healthy yet, by name, when that has changed."""
        roles = sorted(roles)
        if roles == self._waiting:
            return
        is_first, self._waiting = self._waiting is None, roles
        text = f"waiting for servers: {', '.join(roles)}" if roles else "all servers are healthy"
        if is_first:
            self._progress.status(text if roles else "starting the trainer; the run has no servers")
        else:
            self._progress.status(f"{text} (after {time.monotonic() - self._began:.1f} s)")

    def update(self) -> None:
        """Show what is new."""
        for file in sorted(set(self._damaged()) - self._set_aside):
            self._set_aside.add(file)
            self.note(
                f"a checkpoint is damaged and was moved to {file.parent}:"
                f" {file.read_text().strip()}"
            )
        self._stages.poll()
        for record in self._metrics.new_records():
            self._progress.step(record)
        more = self._samples.new_records()
        # A step's samples come one by one: they are shown when no more have come.
        if self._pending and not more:
            self._progress.samples(self._pending)
            self._pending = []
        self._pending += more

    def _damaged(self) -> Iterable[Path]:
        return self._checkpoints.glob(f"*.damaged*/{DAMAGE}")

    def close(self) -> None:
        """Show what is left, and leave the terminal as it was."""
        self.update()
        self.update()
        self._progress.close()
