"""Where a step's time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PhaseListener = Callable[[str, float, float], None]
"""Told the name of each phase's block with its start and end, in the timer's seconds, when it ends."""


class PhaseTimer:
    """Adds up seconds by phase over a step.

    Phases of different names may overlap; each counts its own time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, listener: PhaseListener | None = None) -> None:
        self._clock = clock
        self._listener = listener
        self._open: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._since = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block as phase `name`; several blocks of a step add up."""
        if name == "step":
            raise ValueError("the phase name 'step' is taken: it is the whole step's time")
        if name in self._open:
            raise ValueError(f"phase {name!r} is already being timed")
        self._open.add(name)
        start = self._clock()
        try:
            yield
        finally:
            end = self._clock()
            self._open.remove(name)
            self._seconds[name] = self._seconds.get(name, 0.0) + end - start
            if self._listener is not None:
                self._listener(name, start, end)

    def take(self) -> dict[str, float]:
        """Seconds by metric name, `time/<phase>` and `time/step` since the last take; counting starts anew."""
        if self._open:
            raise ValueError(f"phases still being timed: {', '.join(sorted(self._open))}")
        now = self._clock()
        taken = {"time/step": now - self._since, **{f"time/{name}": spent for name, spent in self._seconds.items()}}
        self._seconds, self._since = {}, now
        return taken
