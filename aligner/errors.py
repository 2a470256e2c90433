"""The errors that a user sees, and the exit code each one becomes."""

from __future__ import annotations

RESUMABLE = 75
"""Exit code of a run that was told to stop, and has taken a checkpoint to go on from: EX_TEMPFAIL of sysexits.h, try again."""


class AlignerError(Exception):
    """Something that went wrong in a run, told in one message. Exit code 1."""

    exit_code = 1

    def __init__(self, message: str, *, summary: str | None = None) -> None:
        """`summary` is the message in a line, where it has several and the first does not say it all."""
        super().__init__(message)
        self.summary = summary or (message.splitlines() or [""])[0]


class UnavailableError(AlignerError):
    """Something outside that a request needs does not answer: any other request would fare alike."""


class TransientError(AlignerError):
    """A failure that a new start may well not meet again. Exit code 75."""

    exit_code = RESUMABLE


class ConfigError(AlignerError):
    """A mistake in the configuration, known before anything starts. Exit code 2."""

    exit_code = 2
