"""Call a command of a cluster, such as `sbatch` or `kubectl`, with retries and error messages."""

import itertools
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from aligner.errors import AlignerError, ConfigError

TIMEOUT_S = 60.0
"""Timeout of a command in seconds."""
# Pause before the first retry in seconds; it doubles with each retry.
_FIRST_PAUSE_S = 1.0
# Texts in the messages of commands that got no answer from the cluster in time.
_TIMEOUT_TEXTS = ("timed out", "timeout", "deadline exceeded")


class NoAnswerError(AlignerError):
    """A cluster did not answer a command, so it is unknown whether the command took effect."""


def run_cluster_command(
    command: Sequence[str],
    *,
    missing_text: str,
    read_message: Callable[[str], str],
    attempts: int = 1,
    success_text: str | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> str:
    """Run a command of a cluster and return its standard output.

    Args:
        command: Name and arguments of the command.
        missing_text: Error if the command is not installed.
        read_message: Function that returns the message in the standard error of a failed command.
        attempts: Number of attempts. A busy cluster lets commands fail, so the pauses between the
            attempts double.
        success_text: An error that contains this text counts as success and returns ''. An earlier
            attempt whose answer was lost may already have had the desired effect.
        environment: Environment variables of the command; None uses those of this process.
        timeout_s: Timeout of each attempt in seconds.

    Raises:
        ConfigError: The command is not installed.
        NoAnswerError: The cluster did not answer in time.
        AlignerError: The command failed; the error contains its message.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(missing_text)
    for attempt in itertools.count():
        try:
            return _run_once(command, read_message, environment, timeout_s)
        except AlignerError as error:
            if success_text is not None and success_text in str(error):
                break
            if attempt + 1 >= attempts:
                raise
        time.sleep(_FIRST_PAUSE_S * 2**attempt)
    return ""


def _run_once(
    command: Sequence[str],
    read_message: Callable[[str], str],
    environment: Mapping[str, str] | None,
    timeout_s: float,
) -> str:
    """Run a command once, and return its standard output. See `run_cluster_command` for the
    errors."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s, env=environment
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{' '.join(command)}: no answer within {timeout_s:g} s") from None
    if result.returncode:
        message = read_message((result.stderr or result.stdout).strip())
        message = message or f"exited with code {result.returncode} without a message"
        # The command itself reports a timeout if the cluster does not respond.
        has_timeout = any(text in message for text in _TIMEOUT_TEXTS)
        error_type = NoAnswerError if has_timeout else AlignerError
        raise error_type(f"{command[0]}: {message}")
    return result.stdout.strip()
