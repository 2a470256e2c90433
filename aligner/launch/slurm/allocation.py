"""The nodes that Slurm has given to the job that this process is in."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from aligner.errors import AlignerError
from aligner.launch.slurm.slurm_commands import host_names, node_addresses
from aligner.placement.slurm_layout import Layout, Place


@dataclass(frozen=True)
class Nodes:
    """The nodes of one role or server group."""

    component: int | None
    """Its number in a heterogeneous job; None where the job is not one."""
    names: tuple[str, ...]
    """As Slurm has them."""
    address: str
    """Where the first of them is reached: rank 0 is there."""
    cpus: int = 1
    """Of a node, as many as the job has on each."""


@dataclass(frozen=True)
class Allocation:
    """The job, and where in it each role and server group is."""

    job: str
    """Number that Slurm's commands take, that of the whole job."""
    nodes: Mapping[str, Nodes]
    requeues: int = 0
    """How often the job was queued again before this start of it."""


def read_allocation(layout: Layout, environment: Mapping[str, str] = os.environ) -> Allocation:
    """From what Slurm has set in a job's environment. Raises AlignerError outside a job, or in one of another shape."""
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        raise AlignerError("SLURM_JOB_ID is not set: `aligner supervise` is called by the script of a Slurm job")
    is_heterogeneous = "SLURM_HET_SIZE" in environment

    def of_components(variable: str) -> list[str]:
        each = [f"{variable}_HET_GROUP_{index}" for index in range(len(layout.components))]
        return [environment.get(name, "") for name in (each if is_heterogeneous else [variable])]

    names = [host_names(text) if text else [] for text in of_components("SLURM_JOB_NODELIST")]
    # The fewest of a list such as 64(x2),32, which is two times 64 and once 32.
    counts = [re.findall(r"(?:^|,)(\d+)", text) for text in of_components("SLURM_JOB_CPUS_PER_NODE")]
    cpus = [min(map(int, part), default=1) for part in counts]
    given, wanted = [len(part) for part in names], [part.nodes for part in layout.components]
    if given != wanted:
        raise AlignerError(f"the job's components have {given} nodes, the configuration needs {wanted}")
    whole = {name: address for part in names for name, address in zip(part, node_addresses(part), strict=True)}

    def nodes(place: Place) -> Nodes:
        part = names[place.component]
        own = tuple(part[index] for index in place.node_range)
        return Nodes(place.component if is_heterogeneous else None, own, whole[own[0]], cpus[place.component])

    requeues = int(environment.get("SLURM_RESTART_COUNT", "0"))
    return Allocation(job, {group: nodes(place) for group, place in layout.places.items()}, requeues)
