"""Slurm's own commands."""

import itertools
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from aligner.errors import AlignerError, ConfigError

TIMEOUT_S = 60
_FIRST_PAUSE_S = 1.0
_FORGOTTEN = "Invalid job id"  # what squeue says of a job that has ended minutes ago
PATIENT = 5
"""Attempts of what a job that runs cannot do without."""


class NoAnswerError(AlignerError):
    """The controller has not answered a command: whether it did what it was asked is not known."""


def output_pattern(directory: Path, name: str) -> str:
    """Return a path for `--output` of sbatch and srun, in which Slurm replaces symbols such as `%j`
    only in `name`."""
    return f"{str(directory).replace('%', '%%')}/{name}"


def slurm_command(
    name: str,
    *arguments: str,
    attempts: int = 1,
    done: str | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> str:
    """What the command prints. Raises ConfigError where it is not installed, AlignerError with its
    message when it fails.

    A busy controller fails commands: of several `attempts` each waits twice as long as the one
    before. An error with `done` in it is none: what is asked for is so already, as after an attempt
    whose answer was lost.
    """
    if shutil.which(name) is None:
        raise ConfigError(
            f"cluster.kind=slurm: requires {name}; launch on a machine of the Slurm cluster"
        )
    for attempt in itertools.count():
        try:
            return _printed((name, *arguments), environment, timeout_s)
        except AlignerError as error:
            if done is not None and done in str(error):
                break
            if attempt + 1 >= attempts:
                raise
        time.sleep(_FIRST_PAUSE_S * 2**attempt)
    return ""


def _printed(
    command: Sequence[str], environment: Mapping[str, str] | None, timeout_s: float
) -> str:
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s, env=environment
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{' '.join(command)}: no answer within {timeout_s:g} s") from None
    if ended.returncode:
        lines = (
            line.partition("error: ")[2] or line
            for line in (ended.stderr or ended.stdout).strip().splitlines()
        )
        said = "; ".join(lines) or f"exited with code {ended.returncode} without a message"
        # the command itself has waited for the controller
        kind = NoAnswerError if "timed out" in said else AlignerError
        raise kind(f"{command[0]}: {said}")
    return ended.stdout.strip()


def is_in_queue(job: str, timeout_s: float) -> bool | None:
    """Whether a job waits, or runs; None where that is not known: its last processes still end, or
    Slurm does not answer."""
    try:
        states = slurm_command(
            "squeue", "--noheader", f"--jobs={job}", "--format=%T", timeout_s=timeout_s
        ).split()
    except AlignerError as error:
        return False if _FORGOTTEN in str(error) else None
    return None if "COMPLETING" in states else bool(states)


def job_of(script: Path) -> str | None:
    """The number of this user's job with that batch script, one that waits or runs; None where
    there is none."""
    for line in slurm_command("squeue", "--me", "--noheader", "--format=%i %o").splitlines():
        number, _, queued = line.strip().partition(" ")
        if Path(queued).resolve() == script.resolve():
            return number.partition("+")[0]  # of a heterogeneous job's component
    return None


def host_names(hosts: str) -> list[str]:
    """The names that a list such as n[1-3] stands for."""
    return slurm_command("scontrol", "show", "hostnames", hosts, attempts=PATIENT).split()


def node_addresses(hosts: Sequence[str]) -> list[str]:
    """Where the nodes are reached by the others."""
    described = slurm_command(
        "scontrol", "show", "node", "--oneliner", ",".join(hosts), attempts=PATIENT
    )
    found = {}
    for line in described.splitlines():
        fields = dict(field.partition("=")[::2] for field in line.split())
        found[fields["NodeName"]] = fields["NodeAddr"]
    return [found[host] for host in hosts]
