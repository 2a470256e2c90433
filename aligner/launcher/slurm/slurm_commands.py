"""Functions that call Slurm's commands, with retries and error messages."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from aligner.errors import AlignerError
from aligner.launcher.cluster_commands import TIMEOUT_S, run_cluster_command

# Error of squeue for a job that ended some minutes ago.
_UNKNOWN_JOB = "Invalid job id"
RETRY_ATTEMPTS = 5
"""Number of attempts of a command on which a running job depends."""


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
        attempts: See `run_cluster_command`, like all further arguments.
        success_text: See `run_cluster_command`.
        environment: See `run_cluster_command`.
        timeout_s: See `run_cluster_command`.

    Raises:
        ConfigError: The command is not installed.
        NoAnswerError: Slurm's controller did not answer in time.
        AlignerError: The command failed; the error contains its message.
    """
    return run_cluster_command(
        (name, *arguments),
        missing_text=(
            f"cluster.kind=slurm: requires {name}; launch on a machine of the Slurm cluster"
        ),
        read_message=_read_message,
        attempts=attempts,
        success_text=success_text,
        environment=environment,
        timeout_s=timeout_s,
    )


def _read_message(text: str) -> str:
    """Return the message in the standard error of a Slurm command, in one line."""
    lines = (line.partition("error: ")[2] or line for line in text.splitlines())
    return "; ".join(lines)


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


def has_container_tasks() -> bool:
    """Return whether `srun --container` can start several tasks on a node.

    Slurm has this feature since release 23.02. Earlier releases start one task per node, do not
    pass its number to the container, and require a bundle whose files are in `rootfs`.

    Raises:
        AlignerError: Slurm did not answer, or with an unknown version.
    """
    printed = slurm_command("srun", "--version", attempts=RETRY_ATTEMPTS)
    version = re.search(r"(\d+)\.(\d+)", printed)
    if version is None:
        raise AlignerError(f"srun --version: got {printed!r}, expected a version such as 23.02.1")
    return (int(version[1]), int(version[2])) >= (23, 2)
