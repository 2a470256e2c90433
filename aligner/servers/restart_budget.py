"""How often something may be restarted: a number of times per hour, not per run."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_WINDOW_S = 3600.0


@dataclass
class RestartBudget:
    """Restarts in the last hour, and the limit on them. The clock of the machine may be set
    meanwhile."""

    limit: int
    clock: Callable[[], float] = time.monotonic
    _moments: deque[float] = field(default_factory=deque)

    @property
    def used(self) -> int:
        """Restarts in the last hour."""
        while self._moments and self.clock() - self._moments[0] > _WINDOW_S:
            self._moments.popleft()
        return len(self._moments)

    @property
    def is_spent(self) -> bool:
        """Whether another restart would exceed the limit."""
        return self.used >= self.limit

    def record(self) -> None:
        """Count a restart at this moment."""
        self._moments.append(self.clock())

    def describe(self) -> str:
        """Return the restarts and their limit in words, such as `1 of 3 in the last hour`."""
        return f"{self.used} of {self.limit} in the last hour"
