"""Limit on the number of restarts per hour, for server processes and for Triton."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_WINDOW_S = 3600.0


@dataclass
class RestartBudget:
    """Counts restarts within the last hour, and compares the number with a limit.

    The default clock is monotonic, so that setting the machine's clock has no effect.
    """

    limit: int
    """Maximum number of restarts per hour."""
    clock: Callable[[], float] = time.monotonic
    """Current time in seconds."""
    _restart_times: deque[float] = field(default_factory=deque)

    @property
    def used(self) -> int:
        """Number of restarts in the last hour."""
        while self._restart_times and self.clock() - self._restart_times[0] > _WINDOW_S:
            self._restart_times.popleft()
        return len(self._restart_times)

    @property
    def is_spent(self) -> bool:
        """Whether another restart would exceed the limit."""
        return self.used >= self.limit

    def record(self) -> None:
        """Count a restart at the current time."""
        self._restart_times.append(self.clock())

    def describe(self) -> str:
        """Return the number of restarts and the limit, such as `1 of 3 in the last hour`."""
        return f"{self.used} of {self.limit} in the last hour"
