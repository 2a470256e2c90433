"""Nodes of a replica of vLLM, whose ranks may run on several machines."""

import os
import socket
from dataclasses import dataclass

from aligner.engines.external.replica import Replica
from aligner.errors import AlignerError

_LOOPBACK = "127.0.0.1"
# Any port: connecting a UDP socket sends nothing.
_ANY_PORT = 9


@dataclass(frozen=True)
class ReplicaNode:
    """A node of a replica, and the address at which its first node coordinates the workers."""

    index: int
    """Index of this node among the nodes of the replica."""
    count: int
    """Number of nodes of the replica."""
    ranks: range
    """Ranks of the replica on this node."""
    address: str
    """Address at which the other nodes reach this node."""
    master_address: str
    """Address of the first node."""
    master_port: int
    """Free port of the first node, for the process group of the workers."""


def find_node(replica: Replica) -> ReplicaNode:
    """Return the node of this rank. Collective over the replica.

    Raises:
        AlignerError: The nodes have different numbers of ranks, or the ranks of a node are not
            adjacent; raised on every rank.
    """
    answers = replica.run_on_all_ranks("finding the nodes of the replica", _describe_node)
    hosts: list[str] = [answer["host"] for answer in answers]
    nodes = list(dict.fromkeys(hosts))
    ranks_per_node = replica.size // len(nodes)
    if hosts != [host for host in nodes for _ in range(ranks_per_node)]:
        counts = ", ".join(f"{host} ({hosts.count(host)})" for host in nodes)
        raise AlignerError(
            f"engine.parallel: the {replica.size} ranks of a replica must be adjacent, and the same"
            f" number on each node, got {counts}"
        )

    index = nodes.index(hosts[replica.rank])
    address: str = answers[replica.rank]["address"]
    master = {"address": answers[0]["address"], "port": 0}
    if len(nodes) > 1:
        # A machine may know its own name as a loopback address, so ask for the address towards
        # another node.
        peer = answers[0 if index else -1]["address"]
        address = find_own_address(peer)
        (master, *_) = replica.run_on_all_ranks(
            "finding the address of the replica's first node",
            lambda: {"address": address, "port": _find_free_port(address)},
        )
    return ReplicaNode(
        index=index,
        count=len(nodes),
        ranks=range(index * ranks_per_node, (index + 1) * ranks_per_node),
        address=address,
        master_address=master["address"],
        master_port=master["port"],
    )


def get_node_name() -> str:
    """Return the name of this node, which is different on each node."""
    return socket.gethostname()


def find_own_address(peer: str) -> str:
    """Return the IPv4 address from which this machine reaches another one.

    Args:
        peer: Name or address of the other machine.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, _ANY_PORT))
        address: str = probe.getsockname()[0]
    return address


def _describe_node() -> dict[str, str]:
    address = find_own_address(os.environ.get("MASTER_ADDR", _LOOPBACK))
    return {"host": get_node_name(), "address": address}


def _find_free_port(address: str) -> int:
    """Return a port at which a server can listen now."""
    with socket.socket() as listener:
        listener.bind((address, 0))
        port: int = listener.getsockname()[1]
    return port
