"""Slurm's own commands."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from aligner.errors import AlignerError, ConfigError

_TIMEOUT_S = 60


def slurm_command(name: str, *arguments: str) -> str:
    """What the command prints. Raises ConfigError where it is not installed, AlignerError with its message when it fails."""
    if shutil.which(name) is None:
        raise ConfigError(f"cluster.kind=slurm: there is no {name} here; launch on a machine of the cluster")
    try:
        ended = subprocess.run([name, *arguments], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise AlignerError(f"{name} {' '.join(arguments)}: no answer within {_TIMEOUT_S} s") from None
    if ended.returncode:
        raise AlignerError(f"{name}: {message(ended.stderr or ended.stdout)}")
    return ended.stdout.strip()


def message(printed: str) -> str:
    """What Slurm has said, without its prefixes."""
    lines = [line.partition("error: ")[2] or line for line in printed.strip().splitlines()]
    return "; ".join(lines) or "it failed and said nothing"


def expand(hosts: str) -> list[str]:
    """The names that a list such as n[1-3] stands for."""
    return slurm_command("scontrol", "show", "hostnames", hosts).split()


def addresses(hosts: Sequence[str]) -> list[str]:
    """Where the nodes are reached by the others."""
    described = slurm_command("scontrol", "show", "node", "--oneliner", ",".join(hosts))
    found = {}
    for line in described.splitlines():
        fields = dict(field.partition("=")[::2] for field in line.split())
        found[fields["NodeName"]] = fields["NodeAddr"]
    return [found[host] for host in hosts]
