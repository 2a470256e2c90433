"""One run's roles: started, watched, started again where that may be, and ended together, wherever they run."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from aligner.errors import ConfigError, Stopped
from aligner.exit_codes import FINISHED, REFUSED, RESUMABLE, STOP_SIGNAL
from aligner.launch.failure import describe_end, failure_error, rank_error, reported_error, root_failure
from aligner.launch.interrupts import Interrupts
from aligner.launch.launcher_state import StateRecorder
from aligner.launch.ranks import Rank, Ranks
from aligner.launch.run_directory import run_directory
from aligner.launch.server_ports import FreePorts, free_ports, is_healthy, pick_endpoints
from aligner.models.model_source import model_directory
from aligner.observability.console import make_progress, print_line
from aligner.observability.metrics import FileFollower
from aligner.paths import run_paths
from aligner.placement.addresses import Endpoint, save_endpoints
from aligner.schema import Config

_POLL_S = 0.1
_TELL_AGAIN_S = 5.0  # A trainer rank that is still starting does not hear that it should stop: it is told again
_GRACE_S = 1.0
"""After a first failure, how long the ranks that fail with it are waited for: one of them may be the cause."""
_HEALTH_POLL_S = 0.5
_FIRST_BACKOFF_S = 1.0


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
    _groups: "list[ServerGroup]" = field(default_factory=list)
    _trainers: Sequence[Rank] = ()
    _tell_at: float = 0.0
    """When the trainer is to be told again to stop; 0: it was not told yet."""

    def run(self) -> None:
        """Prepare the model, start the servers and the trainer, and wait for the trainer's end.

        Raises AlignerError for a role that failed, Interrupted, and Stopped where the run was stopped before its end; one
        that was told to has taken a checkpoint then, if it had begun to train.
        """
        with (
            run_directory(self.config, self.console, self.patience_s) as self.config,
            StateRecorder(self.config, self.job) as self._state,
            free_ports(self.config) as ports,
            closing(self.make_ranks(self.config, ports)) as self._ranks,
        ):
            try:
                self._prepare()
                self._train(pick_endpoints(self.config, self.hosts, ports))
                self._drain()
            except Stopped as stopped:
                if self.requeue is not None:  # first of all: a grace period may end before what else is to be done
                    self.requeue()
                    self._state.end(stopped, queued_again=True)  # there may not be time to say more
                raise

    def _prepare(self) -> None:
        """Make the model's directory where it does not exist yet, and check it and the prompts against each other."""
        directory, timeout = model_directory(self.config), self.config.server.start_timeout_s
        (rank,) = self._ranks.start("prepare")
        what = "checking" if directory.exists() else "making"
        print_line(self.console, f"{what} the model: {directory}")
        deadline = time.monotonic() + timeout
        while rank.exit_code is None:
            self._tick()
            self.interrupts.check_before_training()
            if time.monotonic() > deadline:
                raise rank_error(f"prepare did not end within server.start_timeout_s={timeout:g} s", rank)
        if rank.exit_code == REFUSED:
            raise ConfigError(reported_error(rank))
        if rank.exit_code != FINISHED:
            self._linger()
            self._stop_if_ended_from_outside([rank])
            raise failure_error([rank])
        self._ranks.kill([rank])  # and what came of it
        self.interrupts.check_before_training()

    def _train(self, endpoints: Mapping[str, Endpoint]) -> None:
        """Start every role, and wait for the trainer's end."""
        save_endpoints(dict(endpoints), run_paths(self.config).endpoints)
        with closing(RunView(self.config, self.console)) as view:
            for name, endpoint in endpoints.items():
                self._groups.append(ServerGroup(name, endpoint, self.config, self._ranks, view.note))
            self._trainers = self._ranks.start("trainer")
            while not all(_has_done(rank) for rank in self._trainers):
                self._tick()
                self._raise_failures()
                self._check_stragglers()
                if all(group.was_healthy for group in self._groups):
                    self._pass_on_stop(view)
                else:
                    self.interrupts.check_before_training()
                for group in self._groups:
                    group.poll()
                    self._state.update(group.name, healthy=group.is_healthy, restarts=group.restarts)
                view.waiting_for([group.name for group in self._groups if not group.was_healthy])
                view.update()
        if any(rank.exit_code == RESUMABLE for rank in self._trainers):
            # Without the servers' draining: who is told to stop has little time.
            self.interrupts.stop("told to stop, with all that it trained in a checkpoint")

    def _tick(self) -> None:
        self.interrupts.check()
        self._state.beat()
        time.sleep(_POLL_S)
        self._ranks.poll()

    def _raise_failures(self) -> None:
        """Raise AlignerError for a rank that failed for good, Stopped where the trainer was ended from outside."""
        if not self._fatal():
            return
        self._linger()
        self._stop_if_ended_from_outside(self._trainers)
        fatal = self._fatal()
        if not fatal:  # what ended first was a consequence of what may be started again
            return
        ended = [rank for group in self._groups for rank in group.ended]
        raise failure_error([*fatal, *(rank for rank in ended if rank not in fatal)], fatal)

    def _linger(self) -> None:
        """Wait for what comes together with a rank's end: other ends, or a signal to this process, for all of them."""
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            self._tick()

    def _fatal(self) -> list[Rank]:
        lost = [rank for group in self._groups if group.lost for rank in group.ended]
        return [*lost, *(rank for rank in self._trainers if rank.exit_code is not None and not _has_done(rank))]

    def _stop_if_ended_from_outside(self, ranks: Sequence[Rank]) -> None:
        """Raise Stopped where a SIGTERM that the supervisor did not send ended a rank: a preemption begins so."""
        for rank in ranks:
            if rank.exit_code == -signal.SIGTERM:
                self.interrupts.stop(f"{describe_end(rank)}, which came from outside")

    def _check_stragglers(self) -> None:
        """Raise AlignerError where a trainer rank still runs long after the first has ended: they end together."""
        timeout = self.config.cluster.collective_timeout_s
        ends = [rank.ended_at for rank in self._trainers if rank.ended_at is not None]
        running = [rank for rank in self._trainers if rank.exit_code is None]
        if ends and running and time.monotonic() - min(ends) > timeout:
            raise rank_error(f"trainer rank {running[0].rank} still runs {timeout:g} s after another rank ended", running[0])

    def _pass_on_stop(self, view: "RunView") -> None:
        """Where the launcher was told to stop the run, tell the trainer, until it has ended."""
        now = time.monotonic()
        if not self.interrupts.told_to_stop or now < self._tell_at:
            return
        if not self._tell_at:
            view.note("told to stop: the run takes a checkpoint after this step, and ends")
        self._tell_at = now + _TELL_AGAIN_S
        self._ranks.send(STOP_SIGNAL, self._trainers)

    def _drain(self) -> None:
        """SIGTERM to the servers, and time to answer what they have taken; whoever needs more is ended with the run."""
        servers = [rank for group in self._groups for rank in group.ranks]
        self._ranks.send(signal.SIGTERM, servers)
        deadline = time.monotonic() + self.config.server.drain_timeout_s
        while time.monotonic() < deadline and any(rank.exit_code is None for rank in servers):
            self._tick()


def _has_done(trainer: Rank) -> bool:
    """Whether a trainer rank has ended as it should: at the run's end, or when it was told to."""
    return trainer.exit_code in (FINISHED, RESUMABLE)


class ServerGroup:
    """The ranks of one server. When one of them ends all are replaced: the others have lost their world."""

    def __init__(self, name: str, endpoint: Endpoint, config: Config, ranks: Ranks, tell: Callable[[str], None]) -> None:
        """Starts the ranks."""
        self.name, self._endpoint, self._config, self._all, self._tell = name, endpoint, config, ranks, tell
        self.restarts = 0
        self.was_healthy = False
        """Whether it has been healthy since the run began."""
        self._kill_at = 0.0
        self._start()

    @property
    def is_healthy(self) -> bool:
        """Whether it is, or was when it was last asked."""
        return self._healthy and not self._told

    @property
    def ended(self) -> list[Rank]:
        """Ranks that have ended; however politely, a server has no business to while the trainer runs."""
        return [rank for rank in self.ranks if rank.ended_at is not None and not self._told]

    @property
    def lost(self) -> bool:
        """Whether a rank has ended and may not be started again: too often, or at a first start that would fail again."""
        may_pass = self.was_healthy or any(rank.exit_code == RESUMABLE for rank in self.ended)
        return bool(self.ended) and not (may_pass and self.restarts < self._config.server.max_restarts)

    def poll(self) -> None:
        """Do what is due, without waiting. Raises AlignerError when it is not healthy in time."""
        ended = [rank.ended_at for rank in self.ranks if rank.ended_at is not None]
        if ended:
            self._replace(min(ended))
        elif not self._healthy:
            self._check_health()

    def _start(self) -> None:
        self.ranks = self._all.start(self.name, self.restarts)
        self._healthy = False
        self._told = False  # that a rank has ended, and that all will be started again
        self._started = self._next_check = time.monotonic()

    def _check_health(self) -> None:
        now, timeout = time.monotonic(), self._config.server.start_timeout_s
        if now < self._next_check:
            return
        self._next_check = now + _HEALTH_POLL_S
        if is_healthy(self._config, self.name, self._endpoint):
            if self.was_healthy:
                self._tell(f"{self.name} is healthy again")
            self._healthy = self.was_healthy = True
        elif now - self._started > timeout:
            which = f" after restart {self.restarts}" if self.restarts else ""
            raise rank_error(f"{self.name} was not healthy within server.start_timeout_s={timeout:g} s{which}", self.ranks[0])

    def _replace(self, ended_at: float) -> None:
        """End what is left of the ranks, then start them again."""
        now = time.monotonic()
        if now < ended_at + _GRACE_S:
            return
        if not self._told:
            cause = describe_end(root_failure(self.ended))
            self._told, self.restarts = True, self.restarts + 1
            self._tell(f"{cause}; starting {self.name} again ({self.restarts} of {self._config.server.max_restarts})")
            self._all.send(signal.SIGTERM, self.ranks)
            self._kill_at = now + self._config.cluster.stop_timeout_s
        running = any(rank.exit_code is None for rank in self.ranks)
        if running and now < self._kill_at:
            return
        # What a killed rank leaves behind holds its ports: a new one could not listen there.
        gone = self._all.kill(self.ranks)
        if gone and now >= ended_at + _FIRST_BACKOFF_S * 2 ** (self.restarts - 1):
            self._start()


class RunView:
    """Shows steps and samples as the trainer records them."""

    def __init__(self, config: Config, console: Console) -> None:
        paths = run_paths(config)
        # A resumed run's earlier steps have been seen.
        self._metrics = FileFollower(paths.metrics, from_end=config.run.resumes)
        self._samples = FileFollower(paths.samples, from_end=config.run.resumes)
        self._progress = make_progress(config.run.steps, console)
        self.note = self._progress.note
        """Tells what has happened, on a line that stays."""
        self._waiting: list[str] | None = None
        self._pending: list[dict[str, Any]] = []

    def waiting_for(self, roles: list[str]) -> None:
        """Tell which servers are not healthy yet, when that has changed."""
        if roles != self._waiting:
            self._waiting = roles
            self._progress.status(f"waiting for {', '.join(roles)}" if roles else "all servers are healthy")

    def update(self) -> None:
        """Show what is new."""
        for record in self._metrics.new_records():
            self._progress.step(record)
        more = self._samples.new_records()
        # A step's samples come one by one: they are shown when no more have come.
        if self._pending and not more:
            self._progress.samples(self._pending)
            self._pending = []
        self._pending += more

    def close(self) -> None:
        """Show what is left, and leave the terminal as it was."""
        self.update()
        self.update()
        self._progress.close()
