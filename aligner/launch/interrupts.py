"""SIGINT and SIGTERM to the launcher."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Interrupted(Exception):
    """The launcher was asked to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interrupts:
    """Notes SIGINT and SIGTERM inside a `with` block, so that stopping is never itself interrupted."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self._previous = {number: signal.signal(number, self._note) for number in self._SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number

    def check(self) -> None:
        """Raise Interrupted once a signal has come."""
        if self._received is not None:
            raise Interrupted(self._received)
