"""Tests of complete `tiny_ppo` runs on the nodes of a job, as on Kubernetes and with SkyPilot.

The nodes are processes of this machine that run the command of a pod, and get the signals and the
restarts that Kubernetes would cause.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from aligner.config.compose import compose_config, save_config
from aligner.launcher.nodes.node_list import NODE_INDEX, NODE_STATE, NODES
from aligner.launcher.status import read_status
from aligner.observability.metrics import read_metrics
from aligner.paths import RunPaths, find_complete_steps
from aligner.placement.addresses import create_access_key
from aligner.placement.job_layout import compute_job_layout
from benchmarks.runs import checkpoint_differences, repeatable
from tests.worker_pool import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 8
_TIMEOUT_S = 400


class Nodes:
    """The nodes of one attempt of a job."""

    def __init__(self, directory: Path, kind: str = "kubernetes", *overrides: str) -> None:
        self.paths = RunPaths(directory / "run")
        if not self.paths.config.is_file():
            config = compose_config(
                [
                    "experiment=tiny_ppo",
                    f"cluster={kind}",
                    *(["cluster.kubernetes.gpu_resource=null"] if kind == "kubernetes" else []),
                    "cluster.devices_per_node=1",
                    "cluster.threads_per_rank=1",
                    "actor.parallel.data=2",
                    f"cluster.{kind}.port={free_port()}",
                    f"run.dir={self.paths.root}",
                    f"run.steps={STEPS}",
                    *overrides,
                ]
            )
            self.paths.root.mkdir(parents=True)
            save_config(config, self.paths.config)
            create_access_key(config)
            self.count = compute_job_layout(config).node_count
        else:
            self.count = 4
        self.states = [directory / f"state-{node}" for node in range(self.count)]
        self.log = directory / "nodes.log"
        self.processes = [self._start(node) for node in range(self.count)]

    def _start(self, node: int) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            NODES: ",".join(["127.0.0.1"] * self.count),
            NODE_INDEX: str(node),
            NODE_STATE: str(self.states[node]),
        }
        command = [sys.executable, "-m", "aligner", "supervise", str(self.paths.root)]
        with self.log.open("ab") as output:
            return subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def wait(self) -> list[int]:
        """Return the exit codes of all nodes."""
        return [process.wait(_TIMEOUT_S) for process in self.processes]

    def wait_for_step(self, step: int) -> None:
        """Wait until this number of training steps is recorded."""
        deadline = time.monotonic() + _TIMEOUT_S
        while len(read_metrics(self.paths.metrics)) < step:
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.processes[0].poll() is None, self.log.read_text()
            time.sleep(0.05)

    def find_ranks(self, node: int) -> list[psutil.Process]:
        """Return the ranks on a node."""
        processes = psutil.Process(self.processes[node].pid).children(recursive=True)
        return [process for process in processes if "--config" in process.cmdline()]

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with closing(Nodes(tmp_path_factory.mktemp("undisturbed"))) as nodes:
        ready = set[Path]()
        while nodes.processes[0].poll() is None:
            ready |= {state for state in nodes.states if (state / "ready").exists()}
            time.sleep(0.1)
        assert nodes.wait() == [0] * nodes.count, nodes.log.read_text()
        assert ready == {*nodes.states}
        yield nodes


def test_run_on_four_nodes_completes(undisturbed: Nodes) -> None:
    assert undisturbed.count == 4
    status = read_status(undisturbed.paths.root)
    assert (status.state, status.step) == ("finished", STEPS)
    assert {role: state.ranks for role, state in status.roles.items()} == {
        "trainer": 2,
        "critic": 1,
        "reward": 1,
    }
    # A node that has ended is not ready.
    assert not any((state / "ready").exists() for state in undisturbed.states)


@pytest.mark.parametrize("node", [0, 3])
def test_preempted_nodes_resume_with_equal_weights(
    tmp_path: Path, undisturbed: Nodes, node: int
) -> None:
    with closing(Nodes(tmp_path)) as nodes:
        nodes.wait_for_step(2)
        nodes.processes[node].send_signal(signal.SIGTERM)
        # The exit code makes the failure policy of the JobSet restart all pods.
        assert nodes.wait() == [75] * 4, nodes.log.read_text()
    assert find_complete_steps(nodes.paths.checkpoints)
    assert read_status(nodes.paths.root).state == "queued"
    with closing(Nodes(tmp_path)) as again:
        assert again.wait() == [0] * 4, again.log.read_text()
    for part in ("policy", "critic"):
        assert checkpoint_differences(undisturbed.paths, again.paths, STEPS, part) == []
    assert repeatable(read_metrics(again.paths.metrics)) == repeatable(
        read_metrics(undisturbed.paths.metrics)
    )


def test_killed_rank_restarts_without_the_job(tmp_path: Path) -> None:
    with closing(Nodes(tmp_path)) as nodes:
        nodes.wait_for_step(2)
        (critic,) = [rank for rank in nodes.find_ranks(2) if "role=critic" in rank.cmdline()]
        critic.kill()
        assert nodes.wait() == [0] * 4, nodes.log.read_text()
    assert read_status(nodes.paths.root).roles["critic"].restarts == 1


def test_lost_node_ends_all_nodes_with_the_resumable_code(tmp_path: Path) -> None:
    with closing(Nodes(tmp_path)) as nodes:
        nodes.wait_for_step(1)
        ranks = nodes.find_ranks(3)
        nodes.processes[3].kill()
        assert nodes.wait() == [75, 75, 75, -signal.SIGKILL], nodes.log.read_text()
        assert "node 3 (127.0.0.1) has left the run" in nodes.log.read_text()
        # In a pod, the kernel would end the ranks together with the agent.
        psutil.wait_procs(ranks, timeout=60)
        assert not any(rank.is_running() for rank in ranks)


def test_failed_role_ends_all_nodes_with_its_code(tmp_path: Path) -> None:
    broken = "reward.function=aligner_examples.missing:score"
    with closing(Nodes(tmp_path, "kubernetes", broken)) as nodes:
        codes = nodes.wait()
    # The JobSet does not restart a run whose error would occur again.
    assert codes in ([1] * 4, [2] * 4), nodes.log.read_text()
    assert "aligner_examples.missing" in nodes.log.read_text()


def test_skypilot_task_completes_on_equal_nodes(tmp_path: Path) -> None:
    with closing(Nodes(tmp_path, "skypilot", "run.steps=2")) as nodes:
        assert nodes.wait() == [0] * nodes.count, nodes.log.read_text()
    assert read_status(nodes.paths.root).state == "finished"
