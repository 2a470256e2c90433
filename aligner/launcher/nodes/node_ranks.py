"""The ranks of a run on the nodes of a job, which the supervisor starts through their agents."""

import contextlib
import itertools
import queue
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aligner.errors import AlignerError, Stopped
from aligner.launcher.job_ranks import (
    compute_job_threads,
    job_environment,
    place_ranks,
    prepare_logs,
)
from aligner.launcher.nodes.channel import Channel, ChannelError, load_node_key
from aligner.launcher.nodes.node_list import NodeList, get_supervisor_port
from aligner.launcher.processes import Interrupts
from aligner.launcher.rank_environment import FreePorts
from aligner.launcher.ranks import Rank, Ranks
from aligner.observability.log_files import count_output_bytes
from aligner.placement.job_layout import JobLayout
from aligner.schema import Config

# Seconds between two checks while the nodes join or close.
_POLL_S = 0.05
# Seconds to wait for the end of killed ranks, after `cluster.stop_timeout_s`.
_KILL_TIMEOUT_S = 15.0
# Seconds to wait until all agents have left after the end of the run.
_LEAVE_TIMEOUT_S = 5.0
# Maximum number of connections that have not proved yet that they belong to the run.
_MAX_UNKNOWN = 64


@dataclass(eq=False)
class _Node:
    """The agent of a node that has joined the run."""

    channel: Channel
    cpus: int
    is_closed: bool = False
    """Whether all ranks of the node have ended, after `close`."""
    has_left: bool = False
    """Whether the connection has ended."""


class NodeCluster:
    """The connections to the agents of all nodes. Use it as a context manager."""

    def __init__(self, config: Config, nodes: NodeList, interrupts: Interrupts) -> None:
        """Listen for the agents.

        Args:
            config: The run's configuration.
            nodes: The nodes of the job.
            interrupts: Signals to this process.

        Raises:
            AlignerError: The port is in use.
        """
        self._config = config
        self._nodes = nodes
        self._interrupts = interrupts
        self._key = load_node_key(config)
        self.joined: dict[int, _Node] = {}
        """Agents that have joined, by the index of their node."""
        self.events: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        """Messages of the agents with the index of their node; None if a connection was lost."""
        self._unknown = threading.BoundedSemaphore(_MAX_UNKNOWN)
        port = get_supervisor_port(config)
        try:
            self._listener = socket.create_server(("", port), backlog=len(nodes.addresses) + 16)
        except OSError as error:
            raise AlignerError(
                f"cluster.{config.cluster.kind}.port={port}: cannot listen: {error.strerror};"
                " choose another port"
            ) from error
        threading.Thread(target=self._accept, name="nodes", daemon=True).start()

    def __enter__(self) -> "NodeCluster":
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()
        for node in self.joined.values():
            node.channel.close()

    @property
    def addresses(self) -> Sequence[str]:
        """Address of each node."""
        return self._nodes.addresses

    def wait_for_nodes(self) -> None:
        """Wait until the agents of all nodes have joined.

        Raises:
            Stopped: A node did not join in time, or a stop was requested.
            Interrupted: A signal requested the immediate end of the run.
        """
        timeout = self._config.server.start_timeout_s
        deadline = time.monotonic() + timeout
        while len(self.joined) < len(self.addresses):
            self._interrupts.check_before_training()
            if time.monotonic() > deadline:
                missing = [
                    f"{index} ({address})"
                    for index, address in enumerate(self.addresses)
                    if index not in self.joined
                ]
                self._interrupts.stop(
                    f"node {', '.join(missing)} did not join the run within"
                    f" server.start_timeout_s={timeout:g} s"
                )
            time.sleep(_POLL_S)

    def end(self, code: int) -> None:
        """Let all agents exit with the exit code of this process, and wait until they have left."""
        for node in self.joined.values():
            with contextlib.suppress(OSError):
                node.channel.send({"do": "end", "code": code})
        deadline = time.monotonic() + _LEAVE_TIMEOUT_S
        while time.monotonic() < deadline and not all(
            node.has_left for node in self.joined.values()
        ):
            time.sleep(_POLL_S)

    def _accept(self) -> None:
        """Accept connections until the listener is closed."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if self._unknown.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Let an agent join, and queue its messages until the connection ends."""
        try:
            try:
                channel = Channel(connection, self._key, is_listener=True)
                greeting = channel.receive()
                if greeting is None:
                    raise ChannelError("the other side closed the connection")
                channel.send({"do": "welcome"})
                channel.accept_silence()
            finally:
                self._unknown.release()
        except (OSError, ChannelError):
            connection.close()
            return
        index = greeting["node"]
        node = self.joined[index] = _Node(channel, greeting["cpus"])
        for message in channel.receive_all():
            self.events.put((index, message))
        self.events.put((index, None))
        node.has_left = True


@dataclass(eq=False)
class NodeRank(Rank):
    """A rank on a node of the job."""

    number: int
    """Number of this start of the rank, in the messages to its agent."""
    node: int
    """Index of the node."""
    is_kill_requested: bool = field(default=False, kw_only=True)
    is_gone: bool = field(default=False, kw_only=True)
    """Whether the rank and its helper processes have ended after a kill."""

    @property
    def is_local(self) -> bool:
        """See `Rank`."""
        return False


class NodeRanks(Ranks):
    """The ranks of a run as processes on the nodes of its job. See `Ranks`."""

    def __init__(
        self,
        layout: JobLayout,
        cluster: NodeCluster,
        interrupts: Interrupts,
        config: Config,
        ports: FreePorts,
    ) -> None:
        """Prepare to start ranks.

        Args:
            layout: Placement of the roles.
            cluster: The agents of all nodes.
            interrupts: Receives the stop requests of the nodes.
            config: The run's configuration.
            ports: Free ports for the process groups.
        """
        self._layout = layout
        self._cluster = cluster
        self._interrupts = interrupts
        self._config = config
        self._ports = ports
        self._ranks: dict[int, NodeRank] = {}
        self._numbers = itertools.count()

    def start(self, role: str, restarts: int = 0) -> Sequence[NodeRank]:
        """See `Ranks`."""
        ranks = place_ranks(self._config, self._layout, role)
        nodes = self._layout.get_nodes(ranks.placement)
        cpus = min(self._cluster.joined[node].cpus for node in nodes)
        threads = compute_job_threads(self._config, self._layout, ranks.placement, cpus)
        assert threads is not None  # the CPUs of the nodes are known
        master = self._cluster.addresses[nodes[0]]
        environment = job_environment(self._config, role, ranks, master, next(self._ports), threads)
        logs = prepare_logs(self._config, role, len(ranks), restarts)
        started = []
        for position, node in enumerate(nodes):
            node_ranks = [
                NodeRank(
                    role,
                    rank,
                    logs[rank],
                    count_output_bytes(logs[rank]),
                    restarts,
                    next(self._numbers),
                    node,
                )
                for rank in ranks.get_ranks_of_node(position)
            ]
            self._ranks |= {rank.number: rank for rank in node_ranks}
            message = {
                "do": "start",
                "role": role,
                "ranks": [(rank.number, rank.rank) for rank in node_ranks],
                "environment": environment,
                "restarts": restarts,
            }
            self._send(node, message)
            started += node_ranks
        return started

    @property
    def running(self) -> list[Rank]:
        """See `Ranks`."""
        return [rank for rank in self._ranks.values() if rank.exit_code is None]

    def poll(self) -> None:
        """See `Ranks`.

        Raises:
            Stopped: The connection to a node was lost. The cluster starts all nodes again.
        """
        while not self._cluster.events.empty():
            self._handle(*self._cluster.events.get())

    def wait(self, timeout_s: float) -> None:
        """See `Ranks`."""
        with contextlib.suppress(queue.Empty):
            self._handle(*self._cluster.events.get(timeout=timeout_s))

    def _handle(self, node: int, message: dict[str, Any] | None) -> None:
        """Record a message of an agent."""
        event = "lost" if message is None else message["event"]
        if message is None:
            for rank in self._ranks.values():
                if rank.node == node:
                    rank.record_exit(-signal.SIGKILL, time.monotonic())
                    rank.is_gone = True
            was_closed = self._cluster.joined[node].is_closed
            self._cluster.joined[node].is_closed = True
            if not was_closed:
                self._interrupts.stop(
                    f"node {node} ({self._cluster.addresses[node]}) has left the run: its"
                    " connection was lost"
                )
        elif event == "exit":
            if (exited := self._ranks.get(message["rank"])) is not None:
                exited.record_exit(message["code"], time.monotonic())
        elif event == "gone":
            for number in message["ranks"]:
                if (gone := self._ranks.get(number)) is not None:
                    gone.is_gone = True
        elif event == "stop":
            self._interrupts.request_stop()
        elif event == "closed":
            self._cluster.joined[node].is_closed = True

    def send(self, number: signal.Signals, ranks: Sequence[Rank]) -> None:
        """See `Ranks`."""
        running = [rank for rank in self._find(ranks) if rank.exit_code is None]
        self._send_to_nodes(running, {"do": "signal", "signal": int(number)})

    def kill(self, ranks: Sequence[Rank]) -> bool:
        """See `Ranks`."""
        found = self._find(ranks)
        new = [rank for rank in found if not rank.is_kill_requested]
        for rank in new:
            rank.is_kill_requested = True
        self._send_to_nodes(new, {"do": "kill"})
        if not all(rank.is_gone for rank in found):
            return False
        for rank in found:
            del self._ranks[rank.number]
        return True

    def close(self) -> None:
        """See `Ranks`."""
        for node in self._cluster.joined:
            self._send(node, {"do": "close"})
        deadline = time.monotonic() + self._config.cluster.stop_timeout_s + _KILL_TIMEOUT_S
        while time.monotonic() < deadline and not all(
            node.is_closed for node in self._cluster.joined.values()
        ):
            with contextlib.suppress(Stopped):
                self.wait(_POLL_S)

    def _find(self, ranks: Sequence[Rank]) -> list[NodeRank]:
        """Return the given ranks that have not been dropped."""
        return [rank for rank in self._ranks.values() if rank in ranks]

    def _send_to_nodes(self, ranks: Sequence[NodeRank], message: dict[str, Any]) -> None:
        """Send a message about ranks to each of their nodes."""
        for node in sorted({rank.node for rank in ranks}):
            numbers = [rank.number for rank in ranks if rank.node == node]
            self._send(node, {**message, "ranks": numbers})

    def _send(self, node: int, message: dict[str, Any]) -> None:
        """Send a message to the agent of a node; `poll` reports a lost connection."""
        with contextlib.suppress(OSError):
            self._cluster.joined[node].channel.send(message)
