"""The servers of a run: waiting until they are healthy, and starting again those that end after they were."""

from __future__ import annotations

import time
from collections.abc import Callable

from aligner.errors import TransientError
from aligner.launch.endpoints import is_ready
from aligner.launch.failure import describe_end, rank_error, root_failure
from aligner.launch.ranks import Rank, Ranks
from aligner.launch.roles import served_model
from aligner.schema import Config

GRACE_S = 1.0
"""After a first failure, how long the ranks that fail with it are waited for: one of them may be the cause."""
_HEALTH_POLL_S = 0.5
_FIRST_BACKOFF_S = 1.0


class ServerGroup:
    """The ranks of one server. When one of them ends all are replaced: the others have lost their world."""

    def __init__(
        self,
        name: str,
        address: str,
        config: Config,
        ranks: Ranks,
        tell: Callable[[str], None],
    ) -> None:
        """Starts the ranks. `address` is where health is asked for."""
        self.name = name
        self._address = address
        self._settings = config.server
        self._stop_timeout_s = config.cluster.stop_timeout_s
        self._all = ranks
        self._tell = tell
        self._restarts = 0
        self._was_healthy = False
        self._kill_at = 0.0
        self._start()

    @property
    def was_healthy(self) -> bool:
        """Whether it has been healthy since the run began."""
        return self._was_healthy

    @property
    def is_healthy(self) -> bool:
        """Whether it is, or was when it was last asked."""
        return self._healthy and not self._told

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return self._restarts

    @property
    def ended(self) -> list[Rank]:
        """Ranks that have ended; however politely, a server has no business to while the trainer runs."""
        return [rank for rank in self.ranks if rank.ended_at is not None and not self._told]

    @property
    def lost(self) -> bool:
        """Whether a rank has ended and may not be started again: too often, or at a first start that would fail again."""
        may_pass = self._was_healthy or any(rank.exit_code == TransientError.exit_code for rank in self.ended)
        return bool(self.ended) and not (may_pass and self._restarts < self._settings.max_restarts)

    def poll(self) -> None:
        """Do what is due, without waiting. Raises AlignerError when it is not healthy in time."""
        ended = [rank.ended_at for rank in self.ranks if rank.ended_at is not None]
        if ended:
            self._replace(min(ended))
        elif not self._healthy:
            self._check_health()

    def _start(self) -> None:
        self.ranks = self._all.start(self.name, self._restarts)
        self._healthy = False
        self._told = False  # that a rank has ended, and that all will be started again
        self._started = self._next_check = time.monotonic()

    def _check_health(self) -> None:
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _HEALTH_POLL_S
        if is_ready(self._address, served_model(self.name)):
            if self._was_healthy:
                self._tell(f"{self.name} is healthy again")
            self._healthy = self._was_healthy = True
        elif now - self._started > self._settings.start_timeout_s:
            which = f" after restart {self._restarts}" if self._restarts else ""
            message = f"{self.name} was not healthy within server.start_timeout_s={self._settings.start_timeout_s:g} s{which}"
            raise rank_error(message, self.ranks[0])

    def _replace(self, ended_at: float) -> None:
        """End what is left of the ranks, then start them again."""
        now = time.monotonic()
        if now < ended_at + GRACE_S:
            return
        if not self._told:
            cause = describe_end(root_failure(self.ended))
            self._told, self._restarts = True, self._restarts + 1
            self._tell(f"{cause}; starting {self.name} again ({self._restarts} of {self._settings.max_restarts})")
            self._all.terminate(self.ranks)
            self._kill_at = now + self._stop_timeout_s
        running = any(rank.exit_code is None for rank in self.ranks)
        if running and now < self._kill_at:
            return
        # What a killed rank leaves behind holds its ports: a new one could not listen there.
        gone = self._all.kill(self.ranks)
        if gone and now >= ended_at + _FIRST_BACKOFF_S * 2 ** (self._restarts - 1):
            self._all.forget(self.ranks)
            self._start()
