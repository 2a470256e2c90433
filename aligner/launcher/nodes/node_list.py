"""The nodes of a job, as the environment variables of its nodes describe them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from aligner.errors import AlignerError
from aligner.placement.job_layout import JobLayout
from aligner.schema import Config

NODES = "ALIGNER_NODES"
"""Environment variable with the addresses of all nodes of a job, separated by commas, in the order
of the components of its layout."""
NODE_INDEX = "ALIGNER_NODE_INDEX"
"""Environment variable with the index of this node within its component of the layout."""
FIRST_NODE = "ALIGNER_FIRST_NODE"
"""Environment variable with the number of nodes of all earlier components."""
NODE_STATE = "ALIGNER_NODE_STATE"
"""Environment variable with the directory of the files `live` and `ready`, which the probes of a
node read (`aligner.launcher.nodes.node_agent`)."""


@dataclass(frozen=True)
class NodeList:
    """The nodes of a running job."""

    index: int
    """Index of this node among all nodes; node 0 runs the supervisor."""
    addresses: tuple[str, ...]
    """Address of each node."""


def get_supervisor_port(config: Config) -> int:
    """Return the port on the first node at which the supervisor accepts the agents."""
    cluster = config.cluster
    return cluster.kubernetes.port if cluster.kind == "kubernetes" else cluster.skypilot.port


def read_node_list(layout: JobLayout, environment: Mapping[str, str] = os.environ) -> NodeList:
    """Return the nodes of the current job from the environment variables of this node.

    Args:
        layout: Placement of the roles.
        environment: Environment variables of this node.

    Raises:
        AlignerError: This process is not on a node of a job, or the job has another number of
            nodes.
    """
    missing = [name for name in (NODES, NODE_INDEX) if not environment.get(name)]
    if missing:
        raise AlignerError(
            f"{' and '.join(missing)}: not set; `aligner supervise` must be called on a node of the"
            " job that `aligner launch` has submitted"
        )
    addresses = tuple(environment[NODES].split(","))
    if len(addresses) != layout.node_count:
        raise AlignerError(
            f"{NODES}: the job has {len(addresses)} nodes, but the configuration requires"
            f" {layout.node_count}; launch the run again"
        )
    try:
        index = int(environment.get(FIRST_NODE, "0")) + int(environment[NODE_INDEX])
    except ValueError as error:
        raise AlignerError(f"{NODE_INDEX} and {FIRST_NODE}: must be numbers: {error}") from error
    if not 0 <= index < len(addresses):
        raise AlignerError(f"{NODE_INDEX}: node {index} is not one of {len(addresses)} nodes")
    return NodeList(index, addresses)
