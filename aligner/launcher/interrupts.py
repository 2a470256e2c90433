"""SIGINT, SIGTERM and SIGHUP to the launcher, which end the run, and SIGUSR1, which has it take a
checkpoint first."""

import signal
from types import FrameType, TracebackType
from typing import NoReturn

from rich.console import Console

from aligner.errors import Interrupted, Stopped
from aligner.exit_codes import STOP_SIGNAL
from aligner.observability.console import print_line


class Interrupts:
    """Notes signals inside a `with` block, so that stopping is never itself interrupted, and tells
    of an early end."""

    def __init__(
        self, console: Console, goes_on: str = "resume the run with run.resume=auto"
    ) -> None:
        """`goes_on` is printed after a stop: how the run resumes."""
        self._console, self._goes_on = console, goes_on
        self._received: int | None = None
        self.told_to_stop = False
        """Whether the run should end with a checkpoint."""

    def __enter__(self) -> "Interrupts":
        numbers = [signal.SIGINT, signal.SIGTERM, STOP_SIGNAL]
        # a launcher that was started with nohup outlives its terminal
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if isinstance(error, Interrupted):
            print_line(self._console, f"{error}; all processes of the run have exited")
            if self._received == signal.SIGINT:
                hint = (
                    "to save a checkpoint before the run ends, send SIGUSR1 to the launcher instead"
                    " of Ctrl-C: kill -USR1 PID"
                )
                print_line(self._console, hint)
        elif isinstance(error, Stopped):
            print_line(self._console, f"stopped; {self._goes_on}")

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
        """As `check`, and raise Stopped where the run was told to stop: there is nothing yet that
        would be lost."""
        self.check()
        if self.told_to_stop:
            self.stop("stopped on request before training started")

    def stop(self, why: str) -> NoReturn:
        """Tell why the run ends early, at once, for its processes may take long to end, and raise
        Stopped."""
        print_line(self._console, why)
        raise Stopped(why)
