"""Tests of missing heartbeats: suspended ranks and their Triton, and killed launchers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from aligner.config.compose import compose_config, save_config
from aligner.launcher.heartbeats import HeartbeatMonitor
from aligner.launcher.rank_heartbeat import HEARTBEAT, STACKS_SIGNAL
from aligner.launcher.ranks import Rank, Ranks
from aligner.launcher.run_directory import read_state
from aligner.launcher.status import read_status
from aligner.placement.addresses import Endpoint, save_endpoints
from tests.launcher.test_launch import finish, processes_of, read_until, start, wait_for

LIVE = {"critic": "live", "reward": "serve", "trainer": "live"}


def rank_of(run: Path, role: str, behavior: str, rank: int = 0) -> psutil.Process:
    """Return the process of a rank, or of its helper, with this behavior."""
    for process in processes_of(run):
        if process.cmdline()[-3:] == [
            role,
            str(run / "config.yaml"),
            behavior,
        ] and process.environ()["RANK"] == str(rank):
            return process
    raise AssertionError(f"no {role} rank {rank}")


def all_show_life(run: Path, *names: str) -> bool:
    return all((run / "heartbeats" / name).exists() for name in names)


def wait_for_request_of_rank(requests: Path) -> None:
    """Wait until a rank knows that its Triton was healthy: it sends the second of two requests.

    The launcher sends requests only until all servers are healthy.
    """
    count = len(requests.read_text().splitlines())
    wait_for(lambda: len(requests.read_text().splitlines()) >= count + 2, "request of the rank")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behavior", "rank"),
    [
        ("live", 0),  # its helper, which stands in for Triton, still reports that it is healthy
        ("live", 1),
        ("ignore_sigterm", 0),  # the helper itself
    ],
)
def test_server_with_suspended_process_is_replaced(run: Path, behavior: str, rank: int) -> None:
    # status reports missing heartbeats only after half of this timeout
    launcher = start(run, LIVE, "critic.parallel.tensor=2", "server.health_timeout_s=8")
    read_until(launcher, "all servers are healthy")
    wait_for(lambda: all_show_life(run, "critic-0", "critic-1", "trainer-0"), "signs of life")
    time.sleep(1)  # the launcher must see the heartbeats first
    wait_for_request_of_rank(run / "critic_requests")
    stopped = rank_of(run, "critic", behavior, rank)
    stopped.suspend()
    wait_for(lambda: read_status(run).roles["critic"].health == "not answering", "word of it")
    message = (
        f"critic rank {rank} sent no heartbeat for 8 s (server.health_timeout_s) and was killed"
    )
    read_until(
        launcher,
        f"{message}; restarting critic (1 of 3 in the last hour)",
        "critic is healthy again",
    )
    assert not stopped.is_running()
    assert (state := read_state(run / "status.json")) is not None and not state.roles[
        "reward"
    ].restarts
    (run / "done").touch()
    code, _, error = finish(launcher, run)
    assert code == 0, error


@pytest.mark.slow
def test_suspended_rank_without_restarts_is_named(
    run: Path,
) -> None:
    for role, key, overrides in (
        ("critic", "server.health_timeout_s", ("server.max_restarts=0",)),
        ("trainer", "cluster.heartbeat_timeout_s", ("run.max_restarts=0",)),
    ):
        directory = run / role
        launcher = start(directory, LIVE, f"{key}=3", *overrides)
        read_until(launcher, "all servers are healthy")
        wait_for(
            lambda directory=directory: all_show_life(directory, "critic-0", "trainer-0"),
            "signs of life",
        )
        time.sleep(1)
        rank_of(directory, role, "live").suspend()
        code, _, error = finish(launcher, directory)
        assert code == 1
        assert error.startswith(
            f"{role} rank 0 sent no heartbeat for 3 s ({key}) and was killed; last lines of its log:\n"
        )


@pytest.mark.slow
def test_suspended_and_resumed_run_needs_no_restart(run: Path) -> None:
    launcher = start(run, LIVE, "server.health_timeout_s=2", "cluster.heartbeat_timeout_s=2")
    read_until(launcher, "all servers are healthy")
    wait_for(lambda: all_show_life(run, "critic-0", "trainer-0"), "signs of life")
    time.sleep(1)
    suspended = [psutil.Process(launcher.pid), *processes_of(run)]
    for process in suspended:
        process.suspend()
    time.sleep(5)
    for process in suspended:
        process.resume()
    time.sleep(3)
    (run / "done").touch()
    code, out, error = finish(launcher, run)
    assert code == 0 and "restarting" not in out, error


@pytest.mark.promise("no-process-outlives-the-launcher")
@pytest.mark.slow
def test_no_process_outlives_a_killed_launcher(
    run: Path,
) -> None:
    launcher = start(
        run, {"critic": "ignore_sigterm", "reward": "leave_grandchild", "trainer": "train_slowly"}
    )
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(processes_of(run)) == 5, "grandchild")
    rank_of(run, "trainer", "train_slowly").suspend()
    launcher.kill()
    wait_for(lambda: processes_of(run) == [], "end of the orphaned ranks", timeout_s=10)
    launcher.communicate()


def test_orphan_watcher_ends_with_its_launcher(run: Path) -> None:
    launcher = start(run, {"trainer": "train_slowly"})
    wait_for((run / "metrics.jsonl").exists, "training step")
    (watcher,) = [
        child
        for child in psutil.Process(launcher.pid).children()
        if "aligner.launcher.processes" in child.cmdline()
    ]
    launcher.send_signal(signal.SIGTERM)
    finish(launcher, run)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert not watcher.is_running()


@pytest.mark.slow
def test_collective_timeout_names_the_absent_rank(run: Path) -> None:
    code, _, error = finish(
        start(run, {"trainer": "late"}, "actor.parallel.pipeline=4", "run.max_restarts=0"), run
    )
    assert code == 1
    assert error.startswith(
        "trainer rank 0 exited with code 1: trainer rank 2 did not join a collective within"
        " cluster.collective_timeout_s (then trainer rank 1, trainer rank 3 failed); last lines of"
        " its log:\n"
    )


class ProcesslessRanks(Ranks):
    """Ranks without processes, which accept only the signals of a kill."""

    def start(self, role: str, restarts: int = 0) -> list[Rank]:
        raise NotImplementedError

    @property
    def running(self) -> list[Rank]:
        return []

    def poll(self) -> None:
        raise NotImplementedError

    def send(self, number: signal.Signals, ranks: object) -> None:
        assert number in (signal.SIGKILL, STACKS_SIGNAL)

    def kill(self, ranks: object) -> bool:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def test_heartbeat_timeout_counts_from_start_to_exit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now, names = 0.0, ("new", "ended", "lives", "silent")
    monkeypatch.setattr("aligner.launcher.heartbeats.time.monotonic", lambda: now)
    config = compose_config(
        ["experiment=tiny_ppo", f"run.dir={tmp_path}", "cluster.heartbeat_timeout_s=60"]
    )
    ranks = {
        name: Rank("trainer", place, tmp_path / "log", 0, 0) for place, name in enumerate(names)
    }
    (tmp_path / "heartbeats").mkdir()
    (tmp_path / "heartbeats" / "trainer-0").touch()  # heartbeat of an earlier start
    watch = HeartbeatMonitor(config, "trainer", list(ranks.values()))
    doubts, lines = list[bool](), list[str]()
    for second in range(0, 80, 5):
        now = float(second)
        for rank in {5: (1, 2, 3)}.get(second, (2,)):
            (tmp_path / "heartbeats" / f"trainer-{rank}").touch()
            os.utime(tmp_path / "heartbeats" / f"trainer-{rank}", (now, now))
        if second == 10:
            ranks["ended"].record_exit(0, now)
        watch.kill_silent(ProcesslessRanks(), lines.append)
        doubts.append(watch.is_silent)
    assert {name: rank.exit_code for name, rank in ranks.items()} == {
        "new": -9,
        "ended": 0,
        "lives": None,
        "silent": -9,
    }
    assert ranks["new"].ended_at == 65.0
    assert ranks["silent"].ended_at == 70.0
    assert doubts == [30 < second < 70 for second in range(0, 80, 5)]
    log = tmp_path / "log"
    assert lines == [
        f"waiting for trainer rank {rank}: no heartbeat for 35 s (limit 60 s,"
        f" cluster.heartbeat_timeout_s). Log: {log}"
        for rank in (0, 3)
    ]


def test_first_heartbeat_has_its_own_timeout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = 0.0
    monkeypatch.setattr("aligner.launcher.heartbeats.time.monotonic", lambda: now)
    config = compose_config(
        ["experiment=tiny_ppo", f"run.dir={tmp_path}", "cluster.heartbeat_timeout_s=60"]
    )
    rank = Rank("trainer", 0, tmp_path / "log", 0, 0)
    watch = HeartbeatMonitor(config, "trainer", [rank], first_heartbeat_s=180)
    heartbeat = tmp_path / "heartbeats" / "trainer-0"
    heartbeat.parent.mkdir()
    for second in range(0, 400, 5):
        now = float(second)
        if second == 150:
            heartbeat.touch()
        watch.kill_silent(ProcesslessRanks(), lambda _: None)
    assert rank.ended_at == 215.0


@pytest.mark.promise("suspended-process-is-replaced-or-named", "start-faults-are-replaced-or-named")
@pytest.mark.slow
@pytest.mark.parametrize("role", ["prepare", "critic", "trainer"])
def test_rank_without_first_heartbeat_is_named(run: Path, role: str) -> None:
    keys = ["cluster.heartbeat_timeout_s", "server.health_timeout_s"]
    # On a busy machine, ranks of the other roles may also be silent for 1.5 s.
    key, key_of_other_roles = reversed(keys) if role == "critic" else keys
    launcher = start(
        run,
        {"trainer": "train_until_done", role: "never_beats"},
        f"{key}=1.5",
        f"{key_of_other_roles}=60",
        "server.max_restarts=0",
        "run.max_restarts=0",
    )
    code, out, error = finish(launcher, run)
    assert code == 1
    assert error.startswith(f"{role} rank 0 sent no heartbeat for 1.5 s ({key}) and was killed")
    assert f"Python stacks of all ranks that responded: {run / 'logs'}/*.log" in error
    assert f"waiting for {role} rank 0: no heartbeat for 1 s (limit 1.5 s, {key}). Log:" in out


@pytest.mark.promise("suspended-process-is-replaced-or-named")
@pytest.mark.slow
def test_suspended_prepare_rank_is_restarted(run: Path) -> None:
    launcher = start(run, {"prepare": "stop_at_first"}, "cluster.heartbeat_timeout_s=2")
    code, out, error = finish(launcher, run)
    assert code == 0, error
    assert (
        "prepare rank 0 sent no heartbeat for 2 s (cluster.heartbeat_timeout_s) and was killed;"
        " restarting prepare (1 of 3 in the last hour)" in out
    )


@pytest.mark.slow
def test_ranks_log_stacks_before_kill_of_silent_rank(run: Path) -> None:
    launcher = start(
        run, {"trainer": "stop_at_once"}, "cluster.heartbeat_timeout_s=2", "run.max_restarts=0"
    )
    code, _, error = finish(launcher, run)
    assert code == 1, error
    assert "Current thread" not in (run / "logs" / "trainer-0.log").read_text()
    for server in ("critic", "reward"):
        log = (run / "logs" / f"{server}-0.log").read_text()
        assert "trainer rank 0 has sent no heartbeat for 2 s; the Python stacks of this" in log
        assert "serve_forever" in log and "fake_role.py" in log


def test_only_the_rank_itself_sends_its_heartbeats(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from aligner.launcher.rank_heartbeat import *; start_heartbeat();"
        "assert HEARTBEAT not in os.environ; time.sleep(0.3)"
    )
    environment = {**os.environ, HEARTBEAT: f"0.1:{tmp_path}/a: b/critic-", "RANK": "3"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert [file.name for file in (tmp_path / "a: b").iterdir()] == ["critic-3"]


def test_server_without_health_sends_no_heartbeats_after_start_timeout(
    tmp_path: Path,
) -> None:
    config = compose_config(
        [
            "experiment=tiny_ppo",
            f"run.dir={tmp_path}",
            "server.start_timeout_s=1",
            "server.health_timeout_s=2",
        ]
    )
    save_config(config, tmp_path / "config.yaml")
    save_endpoints({"critic": Endpoint("127.0.0.1", 1, 1, 1)}, tmp_path / "endpoints.json")
    heartbeat = tmp_path / "heartbeats" / "critic-0"
    code = (
        "import sys, time; from pathlib import Path;"
        "from aligner.launcher.rank_heartbeat import start_heartbeat;"
        "from aligner.config.compose import load_config;"
        "from aligner.launcher.heartbeats import require_triton_for_heartbeat;"
        "require_triton_for_heartbeat(load_config(Path(sys.argv[1])), 'critic');"
        "start_heartbeat(); time.sleep(2); Path(sys.argv[2]).unlink(); time.sleep(1)"
    )
    environment = {**os.environ, HEARTBEAT: f"0.1:{heartbeat.with_name('critic-')}", "RANK": "0"}
    command = [sys.executable, "-c", code, str(tmp_path / "config.yaml"), str(heartbeat)]
    subprocess.run(command, env=environment, check=True)
    assert not heartbeat.exists()
