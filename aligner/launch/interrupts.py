"""SIGINT, SIGTERM and SIGHUP to the launcher, which end the run, and SIGUSR1, which has it take a checkpoint first."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

from aligner.signals import STOP_SIGNAL


class Interrupted(Exception):
    """The launcher was asked to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Stopped(Exception):
    """The run ends before its end, and can go on: why, in words."""


class Interrupts:
    """Notes signals inside a `with` block, so that stopping is never itself interrupted."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, STOP_SIGNAL)

    def __init__(self) -> None:
        self._received: int | None = None
        self.told_to_stop = False
        """Whether the run should end with a checkpoint."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        # A launcher that was started with nohup outlives its terminal.
        outlives = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = self._SIGNALS if outlives else (*self._SIGNALS, signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == STOP_SIGNAL:
            self.told_to_stop = True
        else:
            self._received = self._received or number

    def check(self) -> None:
        """Raise Interrupted once a signal has come that ends the run at once."""
        if self._received is not None:
            raise Interrupted(self._received)

    def check_before_training(self) -> None:
        """As `check`, and raise Stopped where the run was told to stop: there is nothing yet that would be lost."""
        self.check()
        if self.told_to_stop:
            raise Stopped("told to stop before it trained")
