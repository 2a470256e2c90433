"""The errors that a user sees; `aligner.exit_codes` says which code each one becomes."""

import signal


class AlignerError(Exception):
    """Something that went wrong in a run, told in one message."""

    def __init__(self, message: str, *, summary: str | None = None) -> None:
        """`summary` is the message in a line, where it has several and the first does not say it
        all."""
        super().__init__(message)
        self.summary = summary or (message.splitlines() or [""])[0]


class UnavailableError(AlignerError):
    """Something outside that a request needs does not answer: any other request would fare
    alike."""


class TransientError(AlignerError):
    """A failure that a new start may well not meet again."""


class UnansweredError(AlignerError):
    """A request that got no answer. Whether it was carried out is unknown."""


class ConfigError(AlignerError):
    """A mistake in the configuration, known before anything starts."""


class EngineGone(Exception):
    """The program that generates is gone. A rank ends by it, and is started again where its role is
    a server's."""


class Stopped(Exception):
    """A run ends before its last step, and can go on: why, in words."""


class Interrupted(Exception):
    """A signal has ended a run."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
