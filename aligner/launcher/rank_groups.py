"""Groups of ranks that are restarted together: `prepare`, each server, and the trainer.

If one rank of a group exits too early, the supervisor replaces all ranks of the group, because the
remaining ranks cannot use their process group any more.
"""

import dataclasses
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from aligner.config.compose import save_config
from aligner.errors import FINISHED, RESUMABLE
from aligner.launcher.failure import (
    build_rank_error,
    describe_exit,
    describe_stacks,
    find_exhausted_resources,
    find_root_failure,
    has_collective_timeout,
)
from aligner.launcher.heartbeats import HeartbeatMonitor
from aligner.launcher.rank_environment import is_healthy
from aligner.launcher.ranks import Rank, Ranks, get_max_restarts
from aligner.paths import can_resume, get_run_paths
from aligner.placement.addresses import Endpoint
from aligner.schema import Config
from aligner.servers.restart_budget import RestartBudget

# Seconds to wait for further failures after the first one, which may not be the root cause.
GRACE_S = 1.0
# Seconds between two health requests to a server that is not healthy yet.
_HEALTH_POLL_S = 0.5
# Seconds between a failure and the first restart; the delay doubles with each further restart.
_FIRST_BACKOFF_S = 1.0


class RankGroup(ABC):
    """Ranks of one role or server group that are started, monitored and replaced together.

    The supervisor polls each group. `RestartBudget` limits the number of restarts per hour.
    """

    def __init__(
        self, name: str, config: Config, ranks: Ranks, notify: Callable[[str], None]
    ) -> None:
        """Start the ranks.

        Args:
            name: Role or server group.
            config: The run's configuration.
            ranks: Interface that starts and ends the ranks of the run.
            notify: Function that prints a message about the ranks.
        """
        self.name = name
        self._config = config
        self._rank_manager = ranks
        self._notify = notify
        self._budget = RestartBudget(get_max_restarts(config, name))
        self.restarts = 0
        """Number of restarts in this launch."""
        self._ended_at = self._kill_deadline = 0.0
        self._start()

    @property
    def ended_ranks(self) -> list[Rank]:
        """Ranks that ended without completing their task.

        The list is empty while the group is being replaced.
        """
        if self.is_replaced:
            return []
        return [
            rank
            for rank in self.ranks
            if rank.ended_at is not None and not self._is_completed(rank)
        ]

    @property
    def missing_ranks(self) -> list[Rank]:
        """Running ranks for which other ranks of the group waited until a collective timed out.

        The list is empty if no log reports a collective timeout.
        """
        has_timeout = any(has_collective_timeout(rank) for rank in self.ended_ranks)
        return [rank for rank in self.ranks if rank.exit_code is None] if has_timeout else []

    @property
    def has_failed(self) -> bool:
        """Whether a rank ended and the group cannot be restarted.

        The group cannot be restarted if its restart budget is spent or the failure would repeat.
        """
        return bool(self.ended_ranks) and (self._budget.is_spent or not self._can_retry())

    @property
    def is_silent(self) -> bool:
        """Whether a rank has sent no heartbeat for half of its timeout."""
        return not self.is_replaced and self.heartbeats.is_silent

    def poll(self) -> None:
        """Check the ranks, and start or continue their replacement. Return without waiting.

        Raises:
            AlignerError: Restarted ranks did not become healthy in time.
        """
        if self.is_replaced:
            self._continue_replacement()
        elif ended_ranks := self.ended_ranks:
            self._ended_at = min(rank.ended_at or 0.0 for rank in ended_ranks)
            if time.monotonic() >= self._ended_at + GRACE_S:
                self._begin_replacement()
        else:
            self._check_ranks()

    @abstractmethod
    def _is_completed(self, rank: Rank) -> bool:
        """Return whether a rank that has ended completed its task."""

    @abstractmethod
    def _can_retry(self) -> bool:
        """Return whether a restart can succeed after the failure of `ended_ranks`."""

    def _check_ranks(self) -> None:
        """Check ranks that are all running."""
        self.heartbeats.kill_silent(self._rank_manager, self._notify)

    def _start(self) -> None:
        """Start all ranks, and monitor their heartbeats."""
        self.ranks = self._rank_manager.start(self.name, self.restarts)
        self.is_replaced = False
        """Whether a rank has ended and all ranks are about to be started again."""
        self.started_at = time.monotonic()
        """Time of the last start of the ranks, from `time.monotonic()`."""
        self.heartbeats = HeartbeatMonitor(
            self._config, self.name, self.ranks, self._rank_manager.start_delay_s
        )

    def _begin_replacement(self) -> None:
        """Report the failure, count the restart, and send SIGTERM to the remaining ranks."""
        cause_rank = find_root_failure(self.ended_ranks)
        cause = describe_exit(cause_rank, self.missing_ranks)
        self.is_replaced = True
        self.restarts = self.restarts + 1
        self._budget.record()
        self._notify(
            f"{cause}; restarting {self.name} ({self._budget.describe()}). Log:"
            f" {cause_rank.log}{describe_stacks(cause_rank)}"
        )
        for sentence in find_exhausted_resources(cause_rank):
            self._notify(sentence)
        self._rank_manager.send(signal.SIGTERM, self.ranks)
        self._kill_deadline = time.monotonic() + self._config.cluster.stop_timeout_s

    def _continue_replacement(self) -> None:
        """Kill the remaining processes after the timeout, then start the ranks again."""
        now = time.monotonic()
        if any(rank.exit_code is None for rank in self.ranks) and now < self._kill_deadline:
            return
        # Helper processes of a killed rank hold its ports, so a new rank could not listen on these.
        is_gone = self._rank_manager.kill(self.ranks)
        backoff_s = _FIRST_BACKOFF_S * 2 ** max(0, self._budget.used - 1)
        if is_gone and now >= self._ended_at + backoff_s:
            self._start()


class PrepareGroup(RankGroup):
    """The single rank that prepares the model directory and checks the data."""

    def __init__(self, config: Config, ranks: Ranks, notify: Callable[[str], None]) -> None:
        """Start the rank. See `RankGroup` for the arguments."""
        super().__init__("prepare", config, ranks, notify)

    @property
    def has_completed(self) -> bool:
        """Whether the rank exited without an error."""
        return all(self._is_completed(rank) for rank in self.ranks)

    def _is_completed(self, rank: Rank) -> bool:
        return rank.exit_code == FINISHED

    def _can_retry(self) -> bool:
        """Return True only for a rank that was killed because it sent no heartbeat."""
        return any(rank.kill_reason is not None for rank in self.ended_ranks)


class ServerGroup(RankGroup):
    """The ranks of one server. A server is healthy when its Triton endpoint is ready."""

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        config: Config,
        ranks: Ranks,
        notify: Callable[[str], None],
    ) -> None:
        """Start the ranks.

        Args:
            name: Server group, for example `critic` or `reward.1`.
            endpoint: Address and ports of the server.
            config: The run's configuration.
            ranks: Interface that starts and ends the ranks of the run.
            notify: Function that prints a message about the ranks.
        """
        self._endpoint = endpoint
        self.was_healthy = False
        """Whether the server has been healthy at least once in this launch."""
        super().__init__(name, config, ranks, notify)

    @property
    def is_healthy(self) -> bool:
        """Whether the server was healthy at the last request and is not being replaced."""
        return self._healthy and not self.is_replaced

    def restart(self, reason: str) -> None:
        """Kill all ranks, which restarts the group.

        Args:
            reason: Reason that the log and the console report.
        """
        for rank in self.ranks:
            self._rank_manager.kill_rank(reason, rank)

    def _is_completed(self, rank: Rank) -> bool:
        """Return False: a server must not exit while the trainer runs."""
        return False

    def _can_retry(self) -> bool:
        """Return whether a restart can succeed after the failure of `ended_ranks`.

        The result is False if the server has never been healthy, because the failure would repeat.
        Ranks that were suspended or silent may be restarted in any case.
        """
        return self.was_healthy or any(
            rank.exit_code == RESUMABLE or rank.kill_reason is not None for rank in self.ended_ranks
        )

    def _start(self) -> None:
        super()._start()
        self._healthy = False
        self._next_check = self.started_at

    def _check_ranks(self) -> None:
        """Check the heartbeats, and the health of a server that is not healthy yet.

        Raises:
            AlignerError: The server did not become healthy within `server.start_timeout_s`.
        """
        super()._check_ranks()
        if not self._healthy:
            self._check_health()

    def _check_health(self) -> None:
        now = time.monotonic()
        timeout = self._config.server.start_timeout_s
        if now < self._next_check:
            return
        self._next_check = now + _HEALTH_POLL_S
        if is_healthy(self._config, self.name, self._endpoint):
            if self.was_healthy:
                self._notify(f"{self.name} is healthy again")
            self._healthy = self.was_healthy = True
        elif now - self.started_at > timeout:
            restart_text = f" after restart {self.restarts}" if self.restarts else ""
            raise build_rank_error(
                f"{self.name} did not become healthy within server.start_timeout_s={timeout:g}"
                f" s{restart_text}",
                self.ranks[0],
            )


class TrainerGroup(RankGroup):
    """The ranks of the trainer.

    After a restart, they resume from the last checkpoint of the run. The servers keep running.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        notify: Callable[[str], None],
        restart_critic: Callable[[], None],
    ) -> None:
        """Start the ranks.

        Args:
            config: The run's configuration.
            ranks: Interface that starts and ends the ranks of the run.
            notify: Function that prints a message about the ranks.
            restart_critic: Function that restarts the critic. It is called before the trainer
                restarts without a checkpoint.
        """
        self._restart_critic = restart_critic
        super().__init__("trainer", config, ranks, notify)

    @property
    def has_completed(self) -> bool:
        """Whether all ranks completed the run, or saved a checkpoint after a stop request."""
        return all(self._is_completed(rank) for rank in self.ranks)

    def _is_completed(self, rank: Rank) -> bool:
        """Return whether the rank reached the end of the run, or stopped on request."""
        return rank.exit_code in (FINISHED, RESUMABLE)

    def _can_retry(self) -> bool:
        """Return whether ranks were killed or missed a collective, so that a restart can succeed.

        A rank that failed by itself would fail again at the same step.
        """
        code = find_root_failure(self.ended_ranks).exit_code or 0
        return (code < 0 and code != -signal.SIGTERM) or bool(self.missing_ranks)

    def _start(self) -> None:
        """Start the ranks.

        A restarted trainer resumes from the last checkpoint. Without a checkpoint, the critic
        restarts too.
        """
        if self.restarts:
            if not can_resume(self._config):
                self._restart_critic()
            config = dataclasses.replace(
                self._config, run=dataclasses.replace(self._config.run, resume="true")
            )
            save_config(config, get_run_paths(config).config)
        super()._start()
