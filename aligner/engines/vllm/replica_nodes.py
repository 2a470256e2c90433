"""Nodes of a replica of vLLM, whose ranks may run on several machines."""

import os
import socket
from dataclasses import dataclass
from typing import Any

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
    hosts: list[str] = replica.run_on_all_ranks(
        "finding the nodes of the replica", lambda: get_node_name()
    )
    nodes = list(dict.fromkeys(hosts))
    ranks_per_node = replica.size // len(nodes)
    if hosts != [host for host in nodes for _ in range(ranks_per_node)]:
        counts = ", ".join(f"{host} ({hosts.count(host)})" for host in nodes)
        raise AlignerError(
            f"engine.parallel: the {replica.size} ranks of a replica must be adjacent, and the same"
            f" number on each node, got {counts}"
        )

    index = nodes.index(hosts[replica.rank])
    ranks = range(index * ranks_per_node, (index + 1) * ranks_per_node)
    if len(nodes) == 1:
        return ReplicaNode(0, 1, ranks, _LOOPBACK, _LOOPBACK, 0)

    addresses: list[str] = replica.run_on_all_ranks(
        "finding the addresses of the replica's nodes",
        lambda: find_own_address(os.environ.get("MASTER_ADDR", _LOOPBACK)),
    )
    # A machine may know its own name as a loopback address, and rank 0 may run on it. Therefore ask
    # for the address towards another node.
    peer = addresses[-1 if index == 0 else 0]

    def find_address_and_port() -> dict[str, Any]:
        address = find_own_address(peer)
        return {"address": address, "port": _find_free_port(address)}

    endpoints = replica.run_on_all_ranks(
        "finding a port on the replica's nodes", find_address_and_port
    )
    return ReplicaNode(
        index,
        len(nodes),
        ranks,
        address=endpoints[replica.rank]["address"],
        master_address=endpoints[0]["address"],
        master_port=endpoints[0]["port"],
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


def _find_free_port(address: str) -> int:
    """Return a port at which a server can listen now."""
    with socket.socket() as listener:
        listener.bind((address, 0))
        port: int = listener.getsockname()[1]
    return port
