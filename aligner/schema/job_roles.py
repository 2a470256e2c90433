"""Keys of the nodes of a role, which are the same for every kind of cluster with several nodes."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option


@dataclass
class NodeRoleConfig:
    """Nodes, devices and environment of one role."""

    nodes: int | None = option(
        None,
        "Number of nodes of this role. Null means the number of nodes that the ranks of all"
        " replicas need, with `devices` or `cluster.devices_per_node` devices per node.",
        minimum=1,
    )
    shares_nodes_with: str | None = option(
        None,
        "Role whose nodes this role shares, on separate devices; null means separate nodes for"
        " this role.",
        choices=("trainer", "generator", "critic", "reward", "teacher"),
    )
    devices: str | None = option(
        None,
        "Devices of each node that the ranks of this role use, such as `0-3`, or `0-1,6` in"
        " quotes; for roles that share nodes. Null means all devices.",
    )
    environment: dict[str, Any] = option(
        {}, "Environment variables of the role, in addition to those of all roles."
    )
