"""The errors that a user sees; `aligner.errors` says which code each one becomes."""

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


FINISHED = 0
FAILED = 1
REFUSED = 2
"""A mistake in the configuration; argparse has the same for one in the options."""
RESUMABLE = 75
"""EX_TEMPFAIL of sysexits.h, try again: told to stop, with a checkpoint to go on from, or failed as
a new start may not."""
STOP_SIGNAL = signal.SIGUSR1
"""A trainer rank, and the launcher, that get it end the run with a checkpoint. Slurm sends it
before a time limit or a preemption (`sbatch --signal`). Ranks are started with it blocked; a
trainer takes it when it can heed it."""
_SIGNALED = 128
"""Added to the number of the signal that ended a process, as shells do."""


def exit_code(error: BaseException | None) -> int:
    """The code of a process that an error has ended, or that has done what it was asked to
    (None)."""
    match error:
        case None:
            return FINISHED
        case Interrupted():
            return _SIGNALED + error.number
        case KeyboardInterrupt() | AlignerError(__cause__=KeyboardInterrupt()):
            return _SIGNALED + signal.SIGINT
        case Stopped() | TransientError():
            return RESUMABLE
        case ConfigError():
            return REFUSED
    return FAILED


def is_stopped(code: int) -> bool:
    """Whether it is the code of what was stopped from outside, by word or by signal, and has not
    failed."""
    return code == RESUMABLE or code > _SIGNALED


def error_of(code: int, message: str) -> Exception:
    """The error that ends a process with this code, other than 0: what `exit_code` gives of it is
    the code again."""
    if code == REFUSED:
        return ConfigError(message)
    if code == RESUMABLE:
        return Stopped(message)
    # Python has the signals that ended a child below 0
    number = -code if code < 0 else code - _SIGNALED
    if number > 0 and number in {each.value for each in signal.Signals}:
        return Interrupted(number)
    return AlignerError(message)
