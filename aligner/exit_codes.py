"""The exit codes of every command and rank, by the end of a run or its error, and the signal that
stops one."""

import signal

from aligner.errors import AlignerError, ConfigError, Interrupted, Stopped, TransientError

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
