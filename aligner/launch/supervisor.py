"""One run's roles: started, watched, started again where that may be, and ended together, wherever they run."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

from rich.console import Console

from aligner.errors import RESUMABLE, ConfigError
from aligner.launch.endpoints import health_address
from aligner.launch.failure import describe_end, failure_error, rank_error, reported_error
from aligner.launch.interrupts import Interrupts, Stopped
from aligner.launch.ranks import Rank, Ranks
from aligner.launch.servers import GRACE_S, ServerGroup
from aligner.launch.state import StateRecorder
from aligner.launch.view import RunView
from aligner.models.model_source import model_directory
from aligner.paths import RunPaths
from aligner.placement.addresses import Endpoint, save_endpoints
from aligner.schema import Config

_POLL_S = 0.1
_TELL_AGAIN_S = 5.0
"""A trainer rank that is still starting does not hear that it should stop: it is told again."""


class Supervisor:
    """The run of one configuration, from its model's preparation to its trainer's end."""

    def __init__(
        self,
        config: Config,
        paths: RunPaths,
        ranks: Ranks,
        state: StateRecorder,
        interrupts: Interrupts,
        console: Console,
    ) -> None:
        self._config = config
        self._paths = paths
        self._ranks = ranks
        self._state = state
        self._interrupts = interrupts
        self._console = console
        self._groups: list[ServerGroup] = []
        self._trainers: list[Rank] = []

    def run(self, endpoints: Callable[[], Mapping[str, Endpoint]]) -> bool:
        """Prepare, then train, with the servers where `endpoints` says that they listen.

        Returns whether the run is at its end: false when it was stopped before that. One that was told to stop has taken a
        checkpoint then, if it had begun to train.
        """
        try:
            self._prepare()
            self._train(endpoints())
        except Stopped as stopped:
            self._console.print(str(stopped), markup=False, highlight=False, soft_wrap=True)
            self._state.stopped_early(str(stopped))
            return False
        return True

    def _prepare(self) -> None:
        """Make the model's directory where it does not exist yet, and check it and the prompts against each other."""
        directory = model_directory(self._config)
        timeout = self._config.server.start_timeout_s
        (rank,) = self._ranks.start("prepare")
        what = "checking" if directory.exists() else "making"
        self._console.print(f"{what} the model: {directory}", markup=False, highlight=False, soft_wrap=True)
        deadline = time.monotonic() + timeout
        while rank.exit_code is None:
            self._tick()
            self._interrupts.check_before_training()
            if time.monotonic() > deadline:
                raise rank_error(f"prepare did not end within server.start_timeout_s={timeout:g} s", rank)
        if rank.exit_code == ConfigError.exit_code:
            raise ConfigError(reported_error(rank))
        if rank.exit_code != 0:
            self._linger()
            _stop_if_ended_from_outside([rank])
            raise failure_error([rank])
        self._ranks.forget([rank])
        self._interrupts.check_before_training()

    def _train(self, endpoints: Mapping[str, Endpoint]) -> None:
        """Start every role, wait for the trainer's end, and let the servers finish what they have taken."""
        save_endpoints(dict(endpoints), self._paths.endpoints)
        with closing(RunView(self._config, self._paths, self._console)) as view:
            self._groups = [self._server(group, endpoint, view.note) for group, endpoint in endpoints.items()]
            self._trainers = self._ranks.start("trainer")
            stragglers, stop = _Stragglers(self._config), _Stop(self._ranks, self._interrupts, view.note)
            while not all(_has_done(rank) for rank in self._trainers):
                self._tick()
                self._raise_failures()
                stragglers.check(self._trainers)
                if all(group.was_healthy for group in self._groups):
                    stop.pass_on(self._trainers)
                else:
                    self._interrupts.check_before_training()
                for group in self._groups:
                    group.poll()
                    self._state.update(group.name, healthy=group.is_healthy, restarts=group.restarts)
                view.waiting_for([group.name for group in self._groups if not group.was_healthy])
                view.update()
            view.finish()
        if any(rank.exit_code != 0 for rank in self._trainers):
            # Without the servers' draining: who is told to stop has little time.
            raise Stopped("told to stop, with all that it trained in a checkpoint")
        self._drain()

    def _server(self, group: str, endpoint: Endpoint, tell: Callable[[str], None]) -> ServerGroup:
        return ServerGroup(group, health_address(self._config, endpoint), self._config, self._ranks, tell)

    def _tick(self) -> None:
        self._interrupts.check()
        self._state.beat()
        time.sleep(_POLL_S)
        self._ranks.poll()

    def _raise_failures(self) -> None:
        """Raise AlignerError for a trainer rank that failed, or a server that ended and may not be started again; Stopped
        where that was done to the trainer from outside.
        """
        if not self._fatal():
            return
        self._linger()
        _stop_if_ended_from_outside(self._trainers)
        fatal = self._fatal()
        if not fatal:  # what ended first was a consequence of what may be started again
            return
        ended = [rank for group in self._groups for rank in group.ended]
        raise failure_error([*fatal, *(rank for rank in ended if rank not in fatal)], fatal)

    def _linger(self) -> None:
        """Wait for what comes together with a rank's end: other ends, or a signal to this process, for all of them."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            self._tick()

    def _fatal(self) -> list[Rank]:
        lost = [rank for group in self._groups if group.lost for rank in group.ended]
        return [*lost, *(rank for rank in self._trainers if rank.exit_code is not None and not _has_done(rank))]

    def _drain(self) -> None:
        """SIGTERM to the servers, and time to answer what they have taken; whoever needs more is ended with the run."""
        servers = [rank for group in self._groups for rank in group.ranks]
        self._ranks.terminate(servers)
        deadline = time.monotonic() + self._config.server.drain_timeout_s
        while time.monotonic() < deadline and any(rank.exit_code is None for rank in servers):
            self._tick()


def _stop_if_ended_from_outside(ranks: Sequence[Rank]) -> None:
    """Raise Stopped where SIGTERM has ended one of these ranks, to which the supervisor sends none before the run's end.

    So begins a preemption with a grace time, but without the signal to stop: Slurm sends it to a job's steps, not its script.
    """
    ended = [rank for rank in ranks if rank.exit_code == -signal.SIGTERM]
    if ended:
        raise Stopped(f"{describe_end(ended[0])}, which came from outside")


def _has_done(trainer: Rank) -> bool:
    """Whether a trainer rank has ended as it should: at the run's end, or when it was told to."""
    return trainer.exit_code in (0, RESUMABLE)


class _Stragglers:
    """Trainer ranks end together; one that does not follow the others is named."""

    def __init__(self, config: Config) -> None:
        self._timeout_s = config.cluster.collective_timeout_s

    def check(self, trainers: Sequence[Rank]) -> None:
        """Raise AlignerError when a rank still runs long after the first has ended."""
        ends = [rank.ended_at for rank in trainers if rank.ended_at is not None]
        running = [rank for rank in trainers if rank.exit_code is None]
        if ends and running and time.monotonic() - min(ends) > self._timeout_s:
            message = f"trainer rank {running[0].rank} still runs {self._timeout_s:g} s after another rank ended"
            raise rank_error(message, running[0])


class _Stop:
    """Passes on to the trainer that the run should stop."""

    def __init__(self, ranks: Ranks, interrupts: Interrupts, tell: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._interrupts = interrupts
        self._tell = tell
        self._next = 0.0

    def pass_on(self, trainers: Sequence[Rank]) -> None:
        """Do so where the launcher was told, until the trainer has ended."""
        now = time.monotonic()
        if not self._interrupts.told_to_stop or now < self._next:
            return
        if not self._next:
            self._tell("told to stop: the run takes a checkpoint after this step, and ends")
        self._next = now + _TELL_AGAIN_S
        self._ranks.tell_to_stop(trainers)
