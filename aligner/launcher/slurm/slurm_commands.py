"""Functions that call Slurm's commands, with retries and error messages."""

import itertools
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from aligner.errors import AlignerError, ConfigError

# Timeout of a command in seconds.
TIMEOUT_S = 60
# Pause before the first retry in seconds; it doubles with each retry.
_FIRST_PAUSE_S = 1.0
# Error of squeue for a job that ended some minutes ago.
_UNKNOWN_JOB = "Invalid job id"
RETRY_ATTEMPTS = 5
"""Number of attempts of a command on which a running job depends."""


class NoAnswerError(AlignerError):
    """Slurm did not answer a command, so it is unknown whether the command took effect."""


def output_pattern(directory: Path, name: str) -> str:
    """Return a path for the option `--output` of sbatch and srun.

    Slurm replaces symbols such as `%j` only in `name`; percent signs in `directory` are escaped.
    """
    return f"{str(directory).replace('%', '%%')}/{name}"


def slurm_command(
    name: str,
    *arguments: str,
    attempts: int = 1,
    success_text: str | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> str:
    """Run a Slurm command and return its standard output.

    Args:
        name: Name of the command, for example `squeue`.
        arguments: Arguments of the command.
        attempts: Number of attempts. A busy controller lets commands fail, so the pauses between
            the attempts double.
        success_text: An error that contains this text counts as success and returns ''. An earlier
            attempt whose answer was lost may already have had the desired effect.
        environment: Environment variables of the command; None uses those of this process.
        timeout_s: Timeout of each attempt in seconds.

    Raises:
        ConfigError: The command is not installed.
        NoAnswerError: Slurm's controller did not answer in time.
        AlignerError: The command failed; the error contains its message.
    """
    if shutil.which(name) is None:
        raise ConfigError(
            f"cluster.kind=slurm: requires {name}; launch on a machine of the Slurm cluster"
        )
    for attempt in itertools.count():
        try:
            return _run_command((name, *arguments), environment, timeout_s)
        except AlignerError as error:
            if success_text is not None and success_text in str(error):
                break
            if attempt + 1 >= attempts:
                raise
        time.sleep(_FIRST_PAUSE_S * 2**attempt)
    return ""


def _run_command(
    command: Sequence[str], environment: Mapping[str, str] | None, timeout_s: float
) -> str:
    """Run a command once, and return its standard output. See `slurm_command` for the errors."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s, env=environment
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{' '.join(command)}: no answer within {timeout_s:g} s") from None
    if result.returncode:
        lines = (
            line.partition("error: ")[2] or line
            for line in (result.stderr or result.stdout).strip().splitlines()
        )
        message = "; ".join(lines) or f"exited with code {result.returncode} without a message"
        # The command itself reports a timeout if Slurm's controller does not respond.
        error_type = NoAnswerError if "timed out" in message else AlignerError
        raise error_type(f"{command[0]}: {message}")
    return result.stdout.strip()


def is_in_queue(job: str, timeout_s: float) -> bool | None:
    """Return whether a job is queued or running.

    The result is None if the state is unknown, because Slurm does not respond or the job's last
    processes are still ending.
    """
    try:
        states = slurm_command(
            "squeue", "--noheader", f"--jobs={job}", "--format=%T", timeout_s=timeout_s
        ).split()
    except AlignerError as error:
        return False if _UNKNOWN_JOB in str(error) else None
    return None if "COMPLETING" in states else bool(states)


def find_job(script: Path) -> str | None:
    """Return the job id of this user's queued or running job with the given batch script.

    The result is None if there is no such job.
    """
    for line in slurm_command("squeue", "--me", "--noheader", "--format=%i %o").splitlines():
        number, _, queued_script = line.strip().partition(" ")
        if Path(queued_script).resolve() == script.resolve():
            # A component of a heterogeneous job has a job id such as 17+1.
            return number.partition("+")[0]
    return None


def expand_host_names(hosts: str) -> list[str]:
    """Return the host names that a list such as `n[1-3]` denotes."""
    return slurm_command("scontrol", "show", "hostnames", hosts, attempts=RETRY_ATTEMPTS).split()


def read_node_addresses(hosts: Sequence[str]) -> list[str]:
    """Return the address of each node in the cluster's network, in the given order."""
    nodes_text = slurm_command(
        "scontrol", "show", "node", "--oneliner", ",".join(hosts), attempts=RETRY_ATTEMPTS
    )
    addresses = {}
    for line in nodes_text.splitlines():
        fields = dict(field.partition("=")[::2] for field in line.split())
        addresses[fields["NodeName"]] = fields["NodeAddr"]
    return [addresses[host] for host in hosts]
