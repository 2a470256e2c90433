"""The errors that a user sees, and the exit code each one becomes."""

from __future__ import annotations


class AlignerError(Exception):
    """Something that went wrong in a run, told in one message. Exit code 1."""

    exit_code = 1


class UnavailableError(AlignerError):
    """Something outside that a request needs does not answer: any other request would fare alike."""


class ConfigError(AlignerError):
    """A mistake in the configuration, known before anything starts. Exit code 2."""

    exit_code = 2
