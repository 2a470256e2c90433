"""Tests of the fork server: forked ranks as processes, their modules and their exit."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from typing import NoReturn

import pytest

from aligner.cli import runs
from aligner.cli.command_table import parse_arguments
from aligner.errors import ConfigError
from aligner.launcher.forks import ForkServer
from aligner.launcher.local import start_fork_server

LAUNCHER = """
import json, os, signal, sys, time
from contextlib import closing
from pathlib import Path

import psutil

from aligner.config.compose import compose_config, save_config
from aligner.launcher.local import start_fork_server
from aligner.launcher.processes import Processes
from aligner.launcher.rank_environment import library_environment, build_role_command
from aligner.observability.log_files import LogLimit

root = Path(sys.argv[1])
file, report = root / "config.yaml", root / "report.json"
config = compose_config(["experiment=tiny_ppo", f"run.dir={root}", "algorithm.loss=probe:loss"])
save_config(config, file)
facts = []


def rank_of(number, role="prepare"):
    report.unlink(missing_ok=True)
    environment = {"RANK": str(number), "REPORT": str(report)}
    command = build_role_command("prepare", config)  # the probe runs in `prepare` for every role
    rank = processes.spawn(role, number, command, environment, root / f"rank-{number}.log")
    while not report.exists() and rank.poll():
        time.sleep(0.02)
    process = psutil.Process(rank.process.pid)
    shown = {"name": " ".join(process.cmdline()).strip(), "launcher": os.getpid()}
    facts.append({**json.loads(report.read_text()), **shown})
    return rank


with closing(Processes(5, LogLimit(root, 1, "text"))) as processes:
    forks = start_fork_server()
    processes.use_fork_server(forks)
    forks.set_up(file, ["critic", "reward", "trainer"], library_environment(1))
    first, reward, second = rank_of(0), rank_of(3, "reward"), rank_of(1, "trainer")
    processes.send(signal.SIGTERM, [first, reward])
    while first.poll() or reward.poll():
        time.sleep(0.02)
    while not processes.kill([second]) or second.poll():
        pass
    (server,) = [child for child in psutil.Process().children() if "aligner.cli.fork_server" in " ".join(child.cmdline())]
    server.kill()
    server.wait()
    third = rank_of(2)
reward_facts = facts.pop(1)
print(json.dumps({"facts": facts, "reward": reward_facts, "codes": [first.exit_code, second.exit_code, third.exit_code],
                  "left": len(psutil.Process().children(recursive=True))}))
"""
PROBE = """
import json, os, signal, sys, time
from pathlib import Path

import torch

own = {
    "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "rank": os.environ["RANK"],
    "threads": len(os.listdir("/proc/self/task")), "modules": sorted(sys.modules), "cuda": torch.cuda.is_initialized(),
    "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
}
print("words of the rank", flush=True)
unfinished = Path(os.environ["REPORT"]).with_suffix(".new")
unfinished.write_text(json.dumps(own))
unfinished.rename(os.environ["REPORT"])
time.sleep(60)
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Properties of three ranks.

    The first rank starts early, the second is forked after all imports, and the third starts after
    the fork server was killed.
    """
    root = tmp_path_factory.mktemp("forks")
    (root / "probe.py").write_text(PROBE)
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", LAUNCHER, str(root)]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ended.returncode == 0, ended.stderr
    return {**json.loads(ended.stdout), "root": root}


@pytest.mark.slow
def test_forked_rank_is_child_of_launcher(report):
    for number, fact in enumerate(report["facts"]):
        assert (fact["parent"], fact["session"], fact["rank"]) == (
            fact["launcher"],
            fact["pid"],
            str(number),
        )
        name = f"aligner prepare --config {report['root'] / 'config.yaml'}"
        # The third rank was not forked.
        assert fact["name"].endswith(name if number == 2 else f"{name} rank={number}")
        assert signal.SIGUSR1 in fact["blocked"]
        assert (report["root"] / f"rank-{number}.log").read_text().count("words of the rank") == 1
    assert report["codes"] == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGTERM]
    assert report["left"] == 0


@pytest.mark.slow
def test_forked_rank_has_modules_but_no_threads(report):
    first, second, _ = report["facts"]
    # The first rank prepares the run and does not wait for this import.
    assert "megatron.core" not in first["modules"]
    roles = {
        "aligner.training.setup",
        "aligner.servers.critic_server",
        "aligner.servers.reward_server",
    }
    assert roles | {"megatron.core", "pytriton.triton", "tritonclient.grpc"} < set(
        second["modules"]
    )
    # Each import takes most of a second, and no rank on CPUs needs it.
    unwanted = {"torch._dynamo", "torch.distributed.tensor", "sympy", "wandb", "transformers"}
    assert not (unwanted | {"mlflow"}) & set(second["modules"])
    assert [(fact["threads"], fact["cuda"]) for fact in (first, second)] == [(1, False)] * 2


@pytest.mark.slow
def test_reward_function_rank_skips_megatron_import(report):
    modules = set(report["reward"]["modules"])

    assert {"aligner.servers.reward_server", "pytriton.triton"} <= modules
    assert "megatron.core" not in modules


@pytest.mark.slow
def test_ranks_start_after_fork_server_was_killed(report):
    third = report["facts"][2]
    assert "aligner.cli.fork_server" not in third["modules"]
    assert "aligner.training.prepare" in third["modules"]


SUSPENDED = """
import os, signal, time
from aligner.cli import fork_server

first, close = os.getpid(), os.close


def close_in_rank(descriptor):
    if os.getpid() != first:
        os.kill(os.getpid(), signal.SIGSTOP)
    close(descriptor)


os.close = close_in_rank
pid = fork_server._fork()
os.kill(pid, signal.SIGKILL)
print("reported")
"""


def test_fork_returns_pid_of_suspended_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUSPENDED], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "reported\n"


def test_refused_launch_ends_its_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(parsed: argparse.Namespace) -> NoReturn:
        raise ConfigError("run.steps=0: must be > 0")

    def start() -> ForkServer:
        started.append(start_fork_server())
        return started[-1]

    started: list[ForkServer] = []
    monkeypatch.setattr(runs, "_plan_run", refuse)
    monkeypatch.setattr(runs, "has_gpu", lambda: False)
    monkeypatch.setattr(runs, "start_fork_server", start)

    with pytest.raises(ConfigError):
        runs.launch(parse_arguments(["launch"]))

    (server,) = started
    assert server._process.returncode == -signal.SIGKILL


def test_fork_server_without_a_run_ends_with_its_launcher() -> None:
    server = start_fork_server()
    assert server._process.stdin is not None
    server._process.stdin.close()

    assert server._process.wait(60) == 0
    server.close()
