"""Tests of the connection between the supervisor and the agents of a job's nodes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from aligner.config.compose import compose_config, save_config
from aligner.errors import AlignerError, Stopped
from aligner.launcher.nodes.channel import Channel, ChannelError, load_node_key
from aligner.launcher.nodes.node_list import FIRST_NODE, NODE_INDEX, NODES, NodeList, read_node_list
from aligner.launcher.nodes.node_ranks import NodeCluster, NodeRanks
from aligner.launcher.processes import Interrupts
from aligner.launcher.rank_environment import FreePorts
from aligner.paths import RunPaths
from aligner.placement.job_layout import compute_job_layout
from aligner.schema import Config
from tests.worker_pool import free_port


def config(tmp_path: Path, *overrides: str) -> Config:
    return compose_config(
        [
            "experiment=tiny_ppo",
            "cluster=kubernetes",
            "cluster.kubernetes.gpu_resource=null",
            f"cluster.kubernetes.port={free_port()}",
            f"run.dir={tmp_path}/run",
            *overrides,
        ]
    )


def connect(listener_key: bytes, connector_key: bytes) -> tuple[Channel, Channel, socket.socket]:
    """Return both sides of a channel, and the socket of the connecting side."""
    sides = socket.socketpair()
    listener: list[Channel] = []
    thread = threading.Thread(
        target=lambda: listener.append(Channel(sides[0], listener_key, is_listener=True))
    )
    thread.start()
    connector = Channel(sides[1], connector_key, is_listener=False)
    thread.join()
    return listener[0], connector, sides[1]


def test_messages_arrive_in_both_directions() -> None:
    listener, connector, _ = connect(b"key", b"key")
    for number in range(3):
        connector.send({"number": number})
        assert listener.receive() == {"number": number}
        listener.send({"text": "ä\n"})
        assert connector.receive() == {"text": "ä\n"}
    connector.close()
    assert listener.receive() is None


def test_message_with_other_key_is_refused() -> None:
    listener, connector, _ = connect(b"key", b"other")
    connector.send({"event": "joined"})
    with pytest.raises(ChannelError, match="does not have the node key of this run"):
        listener.receive()


def test_repeated_or_changed_message_is_refused() -> None:
    listener, connector, raw = connect(b"key", b"key")
    sent: list[bytes] = []

    class Recorder:
        def sendall(self, data: bytes) -> None:
            sent.append(data)

    connector._connection = Recorder()  # type: ignore[assignment]
    connector.send({"code": 0})
    connector.send({"code": 1})
    raw.sendall(sent[0])
    assert listener.receive() == {"code": 0}
    raw.sendall(sent[0])
    with pytest.raises(ChannelError):
        listener.receive()
    raw.sendall(sent[1].replace(b"1}", b"2}"))
    with pytest.raises(ChannelError):
        listener.receive()


def test_node_key_is_private_and_stays(tmp_path: Path) -> None:
    made = config(tmp_path)
    (tmp_path / "run").mkdir()
    key = load_node_key(made)
    assert len(key) == 64 and load_node_key(made) == key
    assert RunPaths(tmp_path / "run").node_key.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({}, f"{NODES} and {NODE_INDEX}: not set; `aligner supervise` must be called on a node"),
        ({NODES: "a,b", NODE_INDEX: "0"}, "the job has 2 nodes, but the configuration requires 3"),
        ({NODES: "a,b,c", NODE_INDEX: "x"}, "must be numbers"),
        ({NODES: "a,b,c", NODE_INDEX: "1", FIRST_NODE: "2"}, "node 3 is not one of 3 nodes"),
    ],
)
def test_wrong_node_variables_are_refused(
    tmp_path: Path, environment: dict[str, str], problem: str
) -> None:
    with pytest.raises(AlignerError, match=problem):
        read_node_list(compute_job_layout(config(tmp_path)), environment)


class Agents:
    """The agents of all nodes as processes of this machine."""

    def __init__(self, tmp_path: Path, *overrides: str) -> None:
        self.config = config(tmp_path, *overrides)
        self.paths = RunPaths(tmp_path / "run")
        self.paths.root.mkdir()
        save_config(self.config, self.paths.config)
        self.layout = compute_job_layout(self.config)
        count = self.layout.node_count
        self.nodes = NodeList(0, ("127.0.0.1",) * count)
        self.processes = [self._start(tmp_path, node) for node in range(count)]

    def _start(self, tmp_path: Path, node: int) -> subprocess.Popen[str]:

        environment = {
            **os.environ,
            NODES: ",".join(self.nodes.addresses),
            NODE_INDEX: str(node),
            "ALIGNER_NODE_STATE": f"{tmp_path}/node-{node}",
        }
        command = [sys.executable, "-m", "aligner", "supervise", str(self.paths.root), "--agent"]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with closing(Agents(tmp_path)) as started:
        yield started


def wait_for(condition: object, ranks: NodeRanks | None = None) -> None:
    """Wait until a function returns True."""
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        if ranks is None:
            time.sleep(0.05)
        else:
            ranks.wait(0.05)


@pytest.mark.slow
def test_agents_start_signal_and_kill_ranks(tmp_path: Path, agents: Agents) -> None:
    with (
        Interrupts(Console(quiet=True)) as interrupts,
        NodeCluster(agents.config, agents.nodes, interrupts) as cluster,
        FreePorts() as ports,
    ):
        cluster.wait_for_nodes()
        ranks = NodeRanks(agents.layout, cluster, interrupts, agents.config, ports)
        (prepare,) = ranks.start("prepare")
        wait_for(lambda: prepare.exit_code is not None, ranks)
        assert prepare.exit_code == 0, prepare.log.read_text()
        wait_for(lambda: ranks.kill([prepare]), ranks)

        for kill in (
            lambda rank: ranks.send(signal.SIGKILL, [rank]),
            lambda rank: ranks.kill([rank]),
        ):
            (critic,) = ranks.start("critic")
            assert critic in ranks.running
            kill(critic)
            wait_for(lambda rank=critic: rank.exit_code is not None, ranks)
            assert critic.exit_code == -signal.SIGKILL
            wait_for(lambda rank=critic: ranks.kill([rank]), ranks)
            assert critic not in ranks.running

        # A stop request of the cluster arrives at any node.
        agents.processes[2].send_signal(signal.SIGTERM)
        wait_for(lambda: interrupts.is_stop_requested, ranks)
        ranks.close()
        cluster.end(75)
    assert [process.wait(30) for process in agents.processes] == [75, 75, 75]
    assert (tmp_path / "node-0").is_dir() and not [*(tmp_path / "node-0").iterdir()]


@pytest.mark.slow
def test_lost_node_stops_the_run(agents: Agents) -> None:
    with (
        Interrupts(Console(quiet=True)) as interrupts,
        NodeCluster(agents.config, agents.nodes, interrupts) as cluster,
        FreePorts() as ports,
    ):
        cluster.wait_for_nodes()
        ranks = NodeRanks(agents.layout, cluster, interrupts, agents.config, ports)
        agents.processes[1].kill()
        with pytest.raises(Stopped, match=r"node 1 \(127\.0\.0\.1\) has left the run"):
            wait_for(lambda: False, ranks)
        ranks.close()
    # Without a message about the end of the run, the run can be resumed.
    assert [agents.processes[node].wait(30) for node in (0, 2)] == [75, 75]


def test_strangers_do_not_delay_the_nodes(tmp_path: Path) -> None:
    made = config(tmp_path)
    (tmp_path / "run").mkdir()
    nodes = NodeList(0, ("127.0.0.1",) * 3)
    with (
        Interrupts(Console(quiet=True)) as interrupts,
        NodeCluster(made, nodes, interrupts) as cluster,
    ):
        address = ("127.0.0.1", made.cluster.kubernetes.port)
        strangers = [socket.create_connection(address) for _ in range(20)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[1].sendall(b"x" * (1 << 16))
        impostor = Channel(socket.create_connection(address), b"guess", is_listener=False)
        impostor.send({"event": "joined", "node": 1, "cpus": 1})
        assert impostor.receive() is None
        for node in range(3):
            channel = Channel(
                socket.create_connection(address), load_node_key(made), is_listener=False
            )
            channel.send({"event": "joined", "node": node, "cpus": 1})
            assert channel.receive() == {"do": "welcome"}
        cluster.wait_for_nodes()
        assert sorted(cluster.joined) == [0, 1, 2]
        for stranger in strangers:
            stranger.close()


def test_used_supervisor_port_is_reported(tmp_path: Path) -> None:
    made = config(tmp_path)
    (tmp_path / "run").mkdir()
    with (
        socket.create_server(("", made.cluster.kubernetes.port)),
        Interrupts(Console(quiet=True)) as interrupts,
        pytest.raises(AlignerError, match=r"cluster\.kubernetes\.port=\d+: cannot listen: "),
    ):
        NodeCluster(made, NodeList(0, ("a", "b", "c")), interrupts)
