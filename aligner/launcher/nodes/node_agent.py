"""The agent of a node: start, watch and end the ranks on this node for the supervisor.

The agent connects to the supervisor on the first node. The messages of the supervisor have a key
`do` with the action: `start`, `signal`, `kill`, `close` or `end`. The agent reports the exits of
ranks (`exit`), killed ranks whose processes have all ended (`gone`), a request of the cluster to
stop the run (`stop`), and that all ranks have ended (`closed`).

Two files in the directory `ALIGNER_NODE_STATE` show the state of the node to its probes: the agent
touches `live` while it works, and `ready` while the servers whose rank 0 runs on this node are
healthy.
"""

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aligner.errors import RESUMABLE, STOP_SIGNAL, AlignerError, Stopped, build_exit_error
from aligner.launcher.exhausted_resources import read_cpu_quota
from aligner.launcher.job_ranks import configured_environment, place_ranks
from aligner.launcher.nodes.channel import Channel, ChannelError, derive_secret, load_node_key
from aligner.launcher.nodes.node_list import NODE_STATE, NodeList, get_supervisor_port
from aligner.launcher.processes import Processes, RankProcess
from aligner.launcher.rank_environment import build_role_command, is_healthy
from aligner.observability.log_files import LogLimit
from aligner.paths import get_run_paths
from aligner.placement.addresses import WORLD_SECRET, load_endpoints
from aligner.placement.job_layout import compute_job_layout
from aligner.placement.roles import count_server_ranks
from aligner.schema import Config

STOP_SIGNALS = (STOP_SIGNAL, signal.SIGTERM)
"""Signals that request the end of the run after a checkpoint, on any node of the job."""
# Seconds between two checks of the ranks and of the supervisor's messages.
_POLL_S = 0.1
# Seconds between two attempts to connect to the supervisor.
_RECONNECT_S = 1.0
_CONNECT_TIMEOUT_S = 10.0
# Seconds between two updates of the files for the probes.
_PROBE_S = 2.0
# A size that no log reaches.
_NO_LIMIT_MIB = 1 << 40
# Timeout of a request to the health endpoint of a server in seconds.
_HEALTH_TIMEOUT_S = 5.0


def run_agent(config: Config, nodes: NodeList) -> None:
    """Run the agent of this node until the supervisor ends the run.

    Args:
        config: The run's configuration.
        nodes: The nodes of the job.

    Raises:
        Stopped: The run was stopped or lost its supervisor, and can be resumed.
        AlignerError: The run failed; the supervisor has reported the reason.
    """
    _Agent(config, nodes).run()


def count_cpus() -> int:
    """Return the number of CPUs that this process may use, within the limit of its container."""
    cpus = len(os.sched_getaffinity(0))
    quota = read_cpu_quota()
    return cpus if quota is None else min(cpus, max(1, int(quota)))


class _Agent:
    """The state of one agent. See `run_agent`."""

    def __init__(self, config: Config, nodes: NodeList) -> None:
        self._config = config
        self._nodes = nodes
        self._layout = compute_job_layout(config)
        self._key = load_node_key(config)
        self._messages: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._ranks: dict[int, RankProcess] = {}
        """Ranks by the number that the supervisor gave them."""
        self._reported: set[int] = set()
        """Numbers of ranks whose exit has been reported."""
        self._killed: list[list[int]] = []
        """Groups of ranks that are being killed."""
        self._is_stop_requested = False
        self._probe_files = _ProbeFiles(config, self._list_local_servers)

    def run(self) -> None:
        """See `run_agent`."""
        for number in (*STOP_SIGNALS, signal.SIGINT):
            signal.signal(number, self._request_stop)
        host, port = self._nodes.addresses[0], get_supervisor_port(self._config)
        print(f"node {self._nodes.index}: connecting to {host}:{port}", flush=True)
        channel = self._connect(host, port)
        print(f"node {self._nodes.index}: has joined the run", flush=True)
        threading.Thread(target=self._read, args=(channel,), name="messages", daemon=True).start()
        log_limit = LogLimit.from_config(self._config)
        if self._nodes.index:
            # All nodes share the logs, and the agent of the first node limits them.
            log_limit = replace(log_limit, max_mib=_NO_LIMIT_MIB)
        processes = Processes(self._config.cluster.stop_timeout_s, log_limit)
        is_stop_reported = False
        try:
            while True:
                self._probe_files.update()
                processes.wait(_POLL_S)
                processes.poll()
                self._report_exits(channel)
                if self._is_stop_requested and not is_stop_reported:
                    channel.send({"event": "stop"})
                    is_stop_reported = True
                self._kill_ranks(processes, channel)
                while not self._messages.empty():
                    self._handle(self._messages.get(), processes, channel)
        except OSError as error:
            raise Stopped(f"the connection to the supervisor was lost: {error}") from error
        finally:
            processes.close()
            channel.close()
            self._probe_files.close()

    def _request_stop(self, number: int, frame: object) -> None:
        self._is_stop_requested = True

    def _connect(self, host: str, port: int) -> Channel:
        """Return a channel to the supervisor, which may start later than this node.

        Raises:
            Stopped: A stop was requested, or the supervisor did not answer in time.
        """
        deadline = time.monotonic() + self._config.server.start_timeout_s
        while True:
            self._probe_files.update()
            try:
                connection = socket.create_connection((host, port), _CONNECT_TIMEOUT_S)
                channel = Channel(connection, self._key, is_listener=False)
                channel.send({"event": "joined", "node": self._nodes.index, "cpus": count_cpus()})
                channel.receive()  # proves that the supervisor has the key
                channel.accept_silence()
                return channel
            except (OSError, ChannelError) as error:
                reason = error
            if self._is_stop_requested:
                raise Stopped("stopped on request before the supervisor answered")
            if time.monotonic() > deadline:
                raise Stopped(
                    f"the supervisor at {host}:{port} did not answer within"
                    f" server.start_timeout_s={self._config.server.start_timeout_s:g} s: {reason}"
                )
            time.sleep(_RECONNECT_S)

    def _read(self, channel: Channel) -> None:
        """Queue the supervisor's messages; None at the end of the connection."""
        for message in channel.receive_all():
            self._messages.put(message)
        self._messages.put(None)

    def _handle(
        self, message: Mapping[str, Any] | None, processes: Processes, channel: Channel
    ) -> None:
        """Execute a message of the supervisor.

        Raises:
            Exception: The message ends this agent with its exit code.
        """
        if message is None:
            raise Stopped("the supervisor has exited without ending the run")
        action = message["do"]
        if action == "start":
            self._start(message, processes)
        elif action == "signal":
            ranks = [self._ranks[number] for number in message["ranks"] if number in self._ranks]
            processes.send(signal.Signals(message["signal"]), ranks)
        elif action == "kill":
            self._killed.append(message["ranks"])
        elif action == "close":
            processes.close()
            self._report_exits(channel)
            channel.send({"event": "closed"})
        elif action == "end":
            self._end(message["code"])
        else:
            raise AlignerError(f"unknown message of the supervisor: {action}")

    def _start(self, message: Mapping[str, Any], processes: Processes) -> None:
        """Start ranks of a role on this node."""
        paths = get_run_paths(self._config)
        role = message["role"]
        command = build_role_command(role, self._config)
        placement = place_ranks(self._config, self._layout, role).placement
        shared_environment = {
            **message["environment"],
            # Secrets are not sent: they are in private files of the run directory, or follow from
            # the node key.
            **configured_environment(self._config, role, placement),
            WORLD_SECRET: derive_secret(self._key, message["environment"][WORLD_SECRET]),
        }
        for local_rank, (number, rank) in enumerate(message["ranks"]):
            environment = {
                **shared_environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
            }
            self._ranks[number] = processes.spawn(
                role, rank, command, environment, paths.log(role, rank), message["restarts"]
            )

    def _report_exits(self, channel: Channel) -> None:
        """Report the exits of ranks since the last call."""
        for number, rank in self._ranks.items():
            if rank.exit_code is not None and number not in self._reported:
                self._reported.add(number)
                channel.send({"event": "exit", "rank": number, "code": rank.exit_code})

    def _kill_ranks(self, processes: Processes, channel: Channel) -> None:
        """Continue to kill ranks, and report those whose processes have all ended."""
        for numbers in list(self._killed):
            ranks = [self._ranks[number] for number in numbers if number in self._ranks]
            is_gone = processes.kill(ranks)
            self._report_exits(channel)
            if is_gone:
                channel.send({"event": "gone", "ranks": numbers})
                self._killed.remove(numbers)
                for number in numbers:
                    self._ranks.pop(number, None)

    def _end(self, code: int) -> None:
        """End this process with the exit code of the supervisor, so that the cluster treats all
        nodes alike."""
        if code == 0:
            raise SystemExit(0)
        if code == RESUMABLE:
            raise Stopped("the run was stopped")
        raise build_exit_error(code, "the run has ended; the first node has reported the reason")

    def _list_local_servers(self) -> list[str]:
        """Return the server groups whose rank 0 runs on this node."""
        groups = count_server_ranks(self._config)
        return [
            rank.role for rank in self._ranks.values() if rank.rank == 0 and rank.role in groups
        ]


class _ProbeFiles:
    """The files `live` and `ready`, which the probes of a node read."""

    def __init__(self, config: Config, list_servers: Callable[[], list[str]]) -> None:
        """Create the directory of the files.

        Args:
            config: The run's configuration.
            list_servers: Function that returns the server groups whose rank 0 runs on this node.
        """
        self._config = config
        self._list_servers = list_servers
        directory = os.environ.get(NODE_STATE)
        self._directory = None if directory is None else Path(directory)
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
        self._update_at = 0.0
        self._check: threading.Thread | None = None

    def update(self) -> None:
        """Touch `live`, and start a check of the servers; at most every `_PROBE_S` seconds."""
        if self._directory is None or time.monotonic() < self._update_at:
            return
        self._update_at = time.monotonic() + _PROBE_S
        (self._directory / "live").touch()
        # A server that does not answer must not delay the messages of the supervisor.
        if self._check is None or not self._check.is_alive():
            self._check = threading.Thread(
                target=self._check_servers, args=(self._directory / "ready",), daemon=True
            )
            self._check.start()

    def _check_servers(self, file: Path) -> None:
        endpoints_file = get_run_paths(self._config).endpoints
        groups = self._list_servers()
        try:
            endpoints = load_endpoints(endpoints_file) if groups else {}
            ready = all(
                is_healthy(self._config, group, endpoints[group], timeout_s=_HEALTH_TIMEOUT_S)
                for group in groups
            )
        except (OSError, ValueError, KeyError):
            ready = False
        if ready:
            file.touch()
        else:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the files, so that a node that is ending is not ready."""
        if self._directory is not None:
            for name in ("live", "ready"):
                (self._directory / name).unlink(missing_ok=True)
