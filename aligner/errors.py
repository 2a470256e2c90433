"""Errors that a user sees, the exit codes of every command and rank, and the signal that stops a
run."""

import contextlib
import signal
from collections.abc import Iterator

from aligner.masking import mask_secrets


class AlignerError(Exception):
    """A failure of a run, described by its message, in which secrets are masked."""

    def __init__(self, message: str, *, summary: str | None = None) -> None:
        """Create the error.

        Args:
            message: The complete message, of one or several lines.
            summary: The message in one line; default is its first line.
        """
        message = mask_secrets(message)
        super().__init__(message)
        self.summary = mask_secrets(summary) if summary else (message.splitlines() or [""])[0]


class UnsupportedError(AlignerError):
    """A request needs a feature that the engine does not support; another engine may serve it."""


class UnavailableError(AlignerError):
    """An external service that a request needs does not answer, so that all other requests would
    fail too."""


class TransientError(AlignerError):
    """A failure that may not occur again after a restart."""


class UnansweredError(AlignerError):
    """A request got no answer. The server may or may not have executed the request."""


class ConfigError(AlignerError):
    """An error in the configuration, which is detected before any process starts."""


@contextlib.contextmanager
def collect_problems(problems: list[str]) -> Iterator[None]:
    """Append the message of a `ConfigError` of the block to `problems`, and continue after it."""
    try:
        yield
    except ConfigError as error:
        problems.append(str(error))


class EngineExited(Exception):
    """The engine's process has exited. The error ends the rank; a server's rank is restarted."""


class Stopped(Exception):
    """A run was stopped before its last step, and can be resumed; the message is the reason."""


class Interrupted(Exception):
    """A run was ended by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


FINISHED = 0
"""Exit code of success."""
FAILED = 1
"""Exit code of a failure."""
REFUSED = 2
"""Exit code of an error in the configuration; argparse uses the same code for its options."""
RESUMABLE = 75
"""Exit code of a run that can be resumed (EX_TEMPFAIL of sysexits.h): it was stopped with a
checkpoint, or its failure may not occur again after a restart."""
STOP_SIGNAL = signal.SIGUSR1
"""Signal at which a trainer rank or the launcher ends the run with a checkpoint.

Slurm sends it before a time limit or a preemption (`sbatch --signal`). Ranks are started with this
signal blocked; a trainer unblocks it once it can handle it.
"""
# Exit code of a process that a signal ended, minus the signal's number, as in shells.
_SIGNAL_OFFSET = 128


def get_exit_code(error: BaseException | None) -> int:
    """Return the exit code of a process that ends with `error`; None means success."""
    match error:
        case None:
            return FINISHED
        case Interrupted():
            return _SIGNAL_OFFSET + error.number
        # An error that Ctrl-C has caused counts as Ctrl-C.
        case KeyboardInterrupt() | AlignerError(__cause__=KeyboardInterrupt()):
            return _SIGNAL_OFFSET + signal.SIGINT
        case Stopped() | TransientError():
            return RESUMABLE
        case ConfigError():
            return REFUSED
    return FAILED


def is_stop_code(code: int) -> bool:
    """Return whether a code means that a process was stopped, by a request or a signal, and did not
    fail."""
    return code == RESUMABLE or code > _SIGNAL_OFFSET


def build_exit_error(code: int, message: str) -> Exception:
    """Return the error of a process that has ended with a code other than 0.

    The function is the inverse of `get_exit_code`.
    """
    if code == REFUSED:
        return ConfigError(message)
    if code == RESUMABLE:
        return Stopped(message)
    # The subprocess module reports a signal that ended a child as a negative number.
    number = -code if code < 0 else code - _SIGNAL_OFFSET
    if number > 0 and number in {known_signal.value for known_signal in signal.Signals}:
        return Interrupted(number)
    return AlignerError(message)
