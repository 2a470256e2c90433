"""The ranks of a role or server group: when one ends too early all are replaced, for the others
have lost their world."""

import dataclasses
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from aligner.config.compose import save_config
from aligner.errors import FINISHED, RESUMABLE
from aligner.launcher.failure import (
    describe_end,
    exhausted_by,
    missed_others,
    rank_error,
    root_failure,
    stacks_note,
)
from aligner.launcher.heartbeats import LifeWatch
from aligner.launcher.rank_environment import is_healthy
from aligner.launcher.ranks import Rank, Ranks, max_restarts
from aligner.paths import can_resume, run_paths
from aligner.placement.addresses import Endpoint
from aligner.schema import Config
from aligner.servers.restart_budget import RestartBudget

GRACE_S = 1.0
"""After a first failure, how long the ranks that fail with it are waited for: one of them may be
the cause."""
_HEALTH_POLL_S = 0.5
_FIRST_BACKOFF_S = 1.0


class RankGroup(ABC):
    """Starts ranks, watches whether they live, and replaces them together, so many times at
    most."""

    def __init__(
        self, name: str, config: Config, ranks: Ranks, tell: Callable[[str], None]
    ) -> None:
        """Starts the ranks. `tell` is told what happens to them."""
        self.name, self._config, self._all, self._tell = name, config, ranks, tell
        self._budget = RestartBudget(max_restarts(config, name))
        self.restarts = 0
        """Of the whole run."""
        self._ended_at = self._kill_at = 0.0
        self._start()

    @property
    def ended(self) -> list[Rank]:
        """Ranks that have ended, and should not have; none once it is told that all are
        replaced."""
        return (
            []
            if self.is_replaced
            else [
                rank
                for rank in self.ranks
                if rank.ended_at is not None and not self._has_done(rank)
            ]
        )

    @property
    def missing(self) -> list[Rank]:
        """Ranks that still run, where others have ended because they did not come to a collective
        in time."""
        late = any(missed_others(rank) for rank in self.ended)
        return [rank for rank in self.ranks if rank.exit_code is None] if late else []

    @property
    def lost(self) -> bool:
        """Whether a rank has ended and all may not be started again: too often, or because it would
        not help."""
        return bool(self.ended) and (self._budget.is_spent or not self._may_pass())

    @property
    def is_silent(self) -> bool:
        """Whether a rank has sent no heartbeat for half of its timeout."""
        return not self.is_replaced and self.life.is_in_doubt

    def poll(self) -> None:
        """Do what is due, without waiting. Raises AlignerError where ranks that were started again
        do not come up."""
        if self.is_replaced:
            self._replace()
        elif ended := self.ended:
            self._ended_at = min(rank.ended_at or 0.0 for rank in ended)
            if time.monotonic() >= self._ended_at + GRACE_S:
                self._begin_to_replace()
        else:
            self._watch()

    @abstractmethod
    def _has_done(self, rank: Rank) -> bool:
        """Whether a rank that has ended has done so as it should."""

    @abstractmethod
    def _may_pass(self) -> bool:
        """Whether what has ended ranks may not end them again."""

    def _watch(self) -> None:
        """Look after ranks that all run."""
        self.life.kill_silent(self._all, self._tell)

    def _start(self) -> None:
        self.ranks = self._all.start(self.name, self.restarts)
        self.is_replaced = False
        """Whether a rank has ended and all will be started again, which is told."""
        self.started = time.monotonic()
        """When the ranks were last started."""
        self.life = LifeWatch(self._config, self.name, self.ranks, self._all.start_delay_s)

    def _begin_to_replace(self) -> None:
        first = root_failure(self.ended)
        cause = describe_end(first, self.missing)
        self.is_replaced, self.restarts = True, self.restarts + 1
        self._budget.record()
        self._tell(
            f"{cause}; restarting {self.name} ({self._budget.describe()}). Log:"
            f" {first.log}{stacks_note(first)}"
        )
        for sentence in exhausted_by(first):
            self._tell(sentence)
        self._all.send(signal.SIGTERM, self.ranks)
        self._kill_at = time.monotonic() + self._config.cluster.stop_timeout_s

    def _replace(self) -> None:
        """End what is left of the ranks, then start them again."""
        now = time.monotonic()
        if any(rank.exit_code is None for rank in self.ranks) and now < self._kill_at:
            return
        # What a killed rank leaves behind holds its ports: a new one could not listen there.
        gone = self._all.kill(self.ranks)
        if gone and now >= self._ended_at + _FIRST_BACKOFF_S * 2 ** max(0, self._budget.used - 1):
            self._start()


class PrepareGroup(RankGroup):
    """The rank that prepares the model's directory and checks the data."""

    def __init__(self, config: Config, ranks: Ranks, tell: Callable[[str], None]) -> None:
        """Starts the rank."""
        super().__init__("prepare", config, ranks, tell)

    @property
    def has_done(self) -> bool:
        """Whether it has ended without an error."""
        return all(self._has_done(rank) for rank in self.ranks)

    def _has_done(self, rank: Rank) -> bool:
        return rank.exit_code == FINISHED

    def _may_pass(self) -> bool:
        """Only a rank that was killed because it sent no heartbeats is started again."""
        return any(rank.killed_for is not None for rank in self.ended)


class ServerGroup(RankGroup):
    """The ranks of one server."""

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        config: Config,
        ranks: Ranks,
        tell: Callable[[str], None],
    ) -> None:
        """Starts the ranks."""
        self._endpoint = endpoint
        self.was_healthy = False
        """Whether it has been healthy since the run began."""
        super().__init__(name, config, ranks, tell)

    @property
    def is_healthy(self) -> bool:
        """Whether it is, or was when it was last asked."""
        return self._healthy and not self.is_replaced

    def begin_anew(self, why: str) -> None:
        """Have all ranks replaced."""
        for rank in self.ranks:
            self._all.kill_for(why, rank)

    def _has_done(self, rank: Rank) -> bool:
        """However politely, a server has no business to end while the trainer runs."""
        return False

    def _may_pass(self) -> bool:
        """A first start that fails would fail again, but not one that was suspended."""
        return self.was_healthy or any(
            rank.exit_code == RESUMABLE or rank.killed_for is not None for rank in self.ended
        )

    def _start(self) -> None:
        super()._start()
        self._healthy = False
        self._next_check = self.started

    def _watch(self) -> None:
        """Raises AlignerError when it is not healthy in time."""
        super()._watch()
        if not self._healthy:
            self._check_health()

    def _check_health(self) -> None:
        now, timeout = time.monotonic(), self._config.server.start_timeout_s
        if now < self._next_check:
            return
        self._next_check = now + _HEALTH_POLL_S
        if is_healthy(self._config, self.name, self._endpoint):
            if self.was_healthy:
                self._tell(f"{self.name} is healthy again")
            self._healthy = self.was_healthy = True
        elif now - self.started > timeout:
            which = f" after restart {self.restarts}" if self.restarts else ""
            raise rank_error(
                f"{self.name} did not become healthy within server.start_timeout_s={timeout:g}"
                f" s{which}",
                self.ranks[0],
            )


class TrainerGroup(RankGroup):
    """The ranks of the trainer: started again they go on from the run's last checkpoint, and find
    the servers as they are."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        tell: Callable[[str], None],
        begin_anew: Callable[[], None],
    ) -> None:
        """Starts the ranks. `begin_anew` is called before they are started again where there is no
        checkpoint."""
        self._begin_anew = begin_anew
        super().__init__("trainer", config, ranks, tell)

    @property
    def has_done(self) -> bool:
        """Whether all have ended as they should."""
        return all(self._has_done(rank) for rank in self.ranks)

    def _has_done(self, rank: Rank) -> bool:
        """At the run's end, or when it was told to."""
        return rank.exit_code in (FINISHED, RESUMABLE)

    def _may_pass(self) -> bool:
        """What was killed, or waited for, may do better; what has failed by itself would do so
        again, at the same step."""
        code = root_failure(self.ended).exit_code or 0
        return (code < 0 and code != -signal.SIGTERM) or bool(self.missing)

    def _start(self) -> None:
        if self.restarts:
            if not can_resume(self._config):
                self._begin_anew()
            config = dataclasses.replace(
                self._config, run=dataclasses.replace(self._config.run, resume="true")
            )
            save_config(config, run_paths(config).config)
        super()._start()
