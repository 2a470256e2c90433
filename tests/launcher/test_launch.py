"""Tests of the launcher's supervision with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from aligner.config.compose import compose_config, save_config
from aligner.launcher.status import describe_status, read_status
from aligner.observability.log_files import count_output_bytes
from tests.rounds import slow

LAUNCHER = Path(__file__).with_name("launcher.py")
HEALTHY = {"prepare": "prepare", "critic": "serve", "reward": "serve", "trainer": "train"}


def processes_of(run: Path) -> list[psutil.Process]:
    """Return running processes that have the run directory on their command lines."""
    matches = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any(str(run) in argument for argument in process.cmdline()):
                matches.append(process)
    return matches


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(0.05)


def launch_overrides(run: Path, *overrides: str) -> list[str]:
    return [
        "experiment=tiny_ppo",
        f"run.dir={run}",
        "run.steps=7",
        "cluster.stop_timeout_s=2",
        *overrides,
    ]


def start(
    run: Path,
    behaviors: dict[str, str] | None = None,
    *overrides: str,
    before: tuple[str, ...] = (),
) -> subprocess.Popen[str]:
    """Start a launch with fake roles; `before` is a command prefix, such as `sh -c`."""
    command = [
        *before,
        sys.executable,
        str(LAUNCHER),
        json.dumps(launch_overrides(run, *overrides)),
        json.dumps({**HEALTHY, **(behaviors or {})}),
    ]
    environment = {**os.environ, "COLUMNS": "120"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def finish(launcher: subprocess.Popen[str], run: Path) -> tuple[int, str, str]:
    try:
        out, error = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert processes_of(run) == [], "processes outlived the launcher"
    return launcher.returncode, out, error


def test_finished_run_prints_steps_and_summary_and_exits_0(run: Path) -> None:
    code, out, error = finish(start(run, None, "actor.parallel.pipeline=2"), run)
    assert code == 0, error
    lines = out.splitlines()
    assert lines[0] == f"run directory: {run}"
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == [
        f"step {step}/7" for step in range(1, 8)
    ]
    assert "step 7/7  reward 0.700  KL 0.0100  0.50 s/step  ETA 0:00:00" in lines
    assert r"answer 7\n\x1b[2J" in out and "prompt [red]text[/red]" in out
    assert re.search(r"reward +│ +0\.3000 │ +0\.5000 │ \+0\.2000", out)
    assert (
        "largest engine-trainer log-prob difference (mismatch/logprob_abs): 7.00e-06 at step 7"
        in lines
    )
    assert "total: 7 steps, 3.5 s, 14 samples (4.0/s)" in lines
    assert {file.name for file in (run / "logs").iterdir()} == {
        "prepare-0.log",
        "critic-0.log",
        "reward-0.log",
        "trainer-0.log",
        "trainer-1.log",
    }
    assert "trainer rank 1 of 2: train" in (run / "logs" / "trainer-1.log").read_text()


def test_error_names_first_cause_of_failed_ranks(run: Path) -> None:
    code, _, error = finish(
        start(run, {"trainer": "fail_rank_1"}, "actor.parallel.pipeline=2"), run
    )
    assert code == 1
    assert error.startswith(
        "trainer rank 1 exited with code 1 (then trainer rank 0 failed); last lines of its log:\n"
    )
    assert "  | aligner: error: step 3: the reward is nan for the prompt 'abc'" in error
    assert error.rstrip().endswith(f"log: {run / 'logs' / 'trainer-1.log'}")


def test_error_names_killed_server_and_signal(run: Path) -> None:
    code, _, error = finish(start(run, {"critic": "killed", "trainer": "hang"}), run)
    assert code == 1
    assert error.startswith("critic rank 0 was killed by SIGKILL; last lines of its log:\n")
    assert "  | about to be killed" in error


def test_server_exit_0_during_training_fails_the_run(run: Path) -> None:
    code, _, error = finish(start(run, {"reward": "exit", "trainer": "hang"}), run)
    assert code == 1
    assert error.startswith("reward rank 0 exited with code 0; last lines of its log:\n")


@pytest.mark.slow
def test_server_start_timeout_is_reported(run: Path) -> None:
    started = time.monotonic()
    code, out, error = finish(
        start(run, {"reward": "never_healthy", "trainer": "hang"}, "server.start_timeout_s=4"), run
    )
    assert code == 1
    assert time.monotonic() - started < 20
    assert "waiting for servers: reward" in out
    assert error.startswith(
        "reward did not become healthy within server.start_timeout_s=4 s; last lines of its log:\n"
    )
    assert "  | loading something that never loads" in error


@pytest.mark.slow
def test_preparation_may_take_longer_than_the_timeout_while_it_progresses(run: Path) -> None:
    launch = start(run, {"prepare": "prepare_slowly"}, "server.start_timeout_s=3")
    wait_for(lambda: (run / "stages" / "prepare").exists(), "stage")
    assert any("prepare: tokenizing: " in describe_status(read_status(run)) for _ in range(100))
    code, _, error = finish(launch, run)
    assert code == 0, error


@pytest.mark.slow
def test_preparation_without_progress_is_ended_with_its_last_report(run: Path) -> None:
    launch = start(run, {"prepare": "prepare_and_hang"}, "server.start_timeout_s=3")
    code, _, error = finish(launch, run)
    assert code == 1
    assert error.startswith(
        "prepare made no progress for server.start_timeout_s=3 s; its last report was: tokenizing:"
        " 90%"
    )


def test_failed_preparation_starts_no_role(run: Path) -> None:
    code, _, error = finish(start(run, {"prepare": "killed"}), run)
    assert code == 1
    assert error.startswith("prepare rank 0 was killed by SIGKILL")
    assert [file.name for file in (run / "logs").iterdir()] == ["prepare-0.log"]


def test_trainer_rank_that_does_not_exit_is_named(run: Path) -> None:
    overrides = ("actor.parallel.pipeline=2", "cluster.collective_timeout_s=1")
    code, _, error = finish(start(run, {"trainer": "rank_1_hangs"}, *overrides), run)
    assert code == 1
    assert error.startswith(
        "trainer rank 1 is still running 1 s (cluster.collective_timeout_s) after another trainer"
        " rank exited"
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_to_launcher_ends_every_process(
    run: Path, number: signal.Signals, code: int
) -> None:
    launcher = start(run, {"trainer": "train_slowly"})
    wait_for((run / "metrics.jsonl").exists, "training step")
    launcher.send_signal(number)
    exit_code, out, _ = finish(launcher, run)
    assert exit_code == code
    assert f"stopped by {number.name}; all processes of the run have exited" in out


def test_ctrl_c_before_training_ends_the_run(run: Path) -> None:
    launcher = start(run, {"reward": "never_healthy", "trainer": "hang"})
    wait_for((run / "logs" / "reward-0.log").exists, "rank that hangs")
    launcher.send_signal(signal.SIGINT)
    exit_code, out, _ = finish(launcher, run)
    assert exit_code == 130
    assert "stopped by SIGINT; all processes of the run have exited" in out


def test_launcher_under_nohup_ignores_sighup(run: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # like nohup
    try:
        launcher = start(run)
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for((run / "metrics.jsonl").exists, "training step")
    launcher.send_signal(signal.SIGHUP)
    assert finish(launcher, run)[0] == 0


@pytest.mark.slow
def test_processes_that_ignore_sigterm_are_killed(run: Path) -> None:
    behaviors = {
        "critic": "ignore_sigterm",
        "reward": "leave_grandchild",
        "trainer": "train_slowly",
    }
    launcher = start(run, behaviors)
    wait_for((run / "critic_ignores_sigterm").exists, "critic")
    # Five processes: launcher, critic, reward, trainer, and the orphaned grandchild of reward.
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(processes_of(run)) == 5, "grandchild")
    started = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    code, _, _ = finish(launcher, run)
    assert code == 143
    assert 2 <= time.monotonic() - started < 15


def test_server_helper_runs_until_server_has_drained(run: Path) -> None:
    code, _, error = finish(start(run, {"critic": "drain_with_helper"}), run)
    assert code == 0, error
    assert (run / "logs" / "critic-0.log").read_text().endswith("drained\n")


def test_ranks_end_when_their_launcher_is_killed(run: Path) -> None:
    launcher = start(run, {"trainer": "train_slowly"})
    wait_for((run / "metrics.jsonl").exists, "training step")
    assert processes_of(run), "the ranks run before the launcher is killed"
    launcher.kill()
    wait_for(lambda: processes_of(run) == [], "end of the orphaned ranks", timeout_s=10)
    launcher.communicate()


def test_resumed_run_prints_only_new_steps(run: Path) -> None:
    (run / "checkpoints" / "step_2").mkdir(parents=True)
    (run / "checkpoints" / "step_2" / "manifest.json").touch()
    save_config(compose_config(launch_overrides(run)), run / "config.yaml")
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.9}\n{"step": 2, "reward/mean": 0.9}\n'
    )
    (run / "initial_model").mkdir()
    code, out, error = finish(start(run, {"prepare": "exit"}, "run.resume=true"), run)
    assert code == 0, error
    assert "reward 0.900" not in out and "step 7/7  reward 0.700" in out


def read_until(launcher: subprocess.Popen[str], *texts: str) -> None:
    """Read output until lines with these prefixes were printed; fail if the launcher exits first."""
    assert launcher.stdout is not None
    missing = set(texts)
    while missing:
        line = launcher.stdout.readline()
        assert line, f"the launcher ended without printing {missing}"
        missing = {text for text in missing if not line.strip().startswith(text)}


@pytest.mark.slow
def test_killed_servers_restart_on_the_same_ports(run: Path) -> None:
    behaviors = {
        "critic": "serve_from_helper",
        "reward": "serve",
        "reward.1": "serve_from_helper",
        "trainer": "train_until_done",
    }
    launcher = start(run, behaviors, "critic.parallel.tensor=2", "reward.replicas=2")
    read_until(launcher, "waiting for servers: critic, reward, reward.1", "all servers are healthy")
    endpoints = (run / "endpoints.json").read_text()
    old = [
        process
        for process in processes_of(run)
        if {"serve_from_helper", "ignore_sigterm"} & set(process.cmdline())
    ]
    assert len(old) == 5, "three ranks and two helpers"
    for process in old:
        group, _, behavior = process.cmdline()[-3:]
        if behavior == "serve_from_helper" and (group, process.environ()["RANK"]) in (
            ("critic", "1"),
            ("reward.1", "0"),
        ):
            process.kill()
    read_until(
        launcher,
        "critic rank 1 was killed by SIGKILL; restarting critic (1 of 3 in the last hour)",
        "reward.1 rank 0 was killed by SIGKILL; restarting reward.1 (1 of 3 in the last hour)",
        "critic is healthy again",
        "reward.1 is healthy again",
    )
    assert [process for process in old if process.is_running()] == [], (
        "what is left of a start holds the ports"
    )
    assert (run / "endpoints.json").read_text() == endpoints
    (run / "done").touch()
    code, _, error = finish(launcher, run)
    assert code == 0, error
    ports = []
    for rank in (0, 1):
        log = (run / "logs" / f"critic-{rank}.log").read_text()
        before, after = log.split("--- restarting critic (restart 1 of this launch) ---\n")
        assert f"critic rank {rank} of 2" in before and f"critic rank {rank} of 2" in after
        ports.append(re.findall(r"master port (\d+)", log))
    assert ports[0] == ports[1] and ports[0][0] != ports[0][1]
    assert "restarting" not in (run / "logs" / "reward-0.log").read_text()


@pytest.mark.parametrize(
    ("restarts", "how"), [(0, ""), pytest.param(1, " after 1 restart", marks=pytest.mark.slow)]
)
def test_server_over_its_restart_limit_ends_the_run(run: Path, restarts: int, how: str) -> None:
    behaviors = {"critic": "die_when_healthy", "trainer": "hang"}
    code, out, error = finish(start(run, behaviors, f"server.max_restarts={restarts}"), run)
    assert code == 1
    assert out.count("restarting critic") == restarts
    assert error.startswith(f"critic rank 0 exited with code 3{how}; last lines of its log:\n")
    assert error.count("healthy, and dead") == 1, "an earlier start's words are not the cause"


@pytest.mark.slow
def test_resumable_first_server_failure_is_retried(run: Path) -> None:
    launcher = start(run, {"reward": "crash_at_first", "trainer": "train_until_done"})
    read_until(
        launcher,
        "reward rank 0 exited with code 75; restarting reward (1 of 3 in the last hour)",
        "all servers are healthy",
    )
    (run / "done").touch()
    code, _, error = finish(launcher, run)
    assert code == 0, error


@pytest.mark.slow
def test_server_unhealthy_after_restart_ends_the_run(run: Path) -> None:
    behaviors = {"reward": "healthy_once", "trainer": "hang"}
    code, _, error = finish(start(run, behaviors, "server.start_timeout_s=4"), run)
    assert code == 1
    assert error.startswith(
        "reward did not become healthy within server.start_timeout_s=4 s after restart 1; last lines of"
        " its log:\n"
    )
    assert "  | loading something that never loads again" in error


def test_trainer_error_precedes_server_restart(
    run: Path,
) -> None:
    behaviors = {"critic": "die_when_healthy", "trainer": "fail_with_the_server"}
    code, out, error = finish(start(run, behaviors), run)
    assert code == 1
    assert error.startswith(
        "trainer rank 0 exited with code 1 (then critic rank 0 failed); last lines of its log:\n"
    )
    assert "  | aligner: error: step 3: the reward is nan" in error
    assert "restarting critic" not in out


@pytest.mark.parametrize(
    "behaviors", [slow({"prepare": "hang"}), {"reward": "never_healthy", "trainer": "hang"}]
)
def test_run_stopped_before_training_can_be_resumed(run: Path, behaviors: dict[str, str]) -> None:
    launcher = start(run, behaviors)
    wait_for(
        lambda: all((run / "logs" / f"{role}-0.log").exists() for role in behaviors),
        "rank that hangs",
    )
    launcher.send_signal(signal.SIGUSR1)
    code, out, error = finish(launcher, run)
    assert (code, error) == (75, "")
    assert "stopped on request before training started\n" in out
    assert "stopped; resume the run with: aligner launch " in out
    code, _, error = finish(start(run, None, "run.resume=auto"), run)
    assert code == 0, error


def test_external_sigterm_to_trainer_exits_75(run: Path) -> None:
    launcher = start(run, {"trainer": "train_slowly"})
    wait_for((run / "metrics.jsonl").exists, "training step")
    (trainer,) = [process for process in processes_of(run) if "trainer" in process.cmdline()]
    trainer.terminate()
    code, out, error = finish(launcher, run)
    assert (code, error) == (75, "")
    assert "trainer rank 0 was killed by SIGTERM, which the launcher did not send\n" in out
    assert "stopped; resume the run with: aligner launch " in out


@pytest.mark.slow
def test_bounded_log_keeps_last_lines_of_its_rank(run: Path) -> None:
    log = run / "logs" / "trainer-0.log"
    launcher = start(run, {"trainer": "flood"}, "logging.file_mib=1")
    code, _, error = finish(launcher, run)
    assert code == 1 and "trainer rank 0 exited with code 1" in error
    assert "step 3: the reward is nan" in error and "  | 19999: xxx" in error
    lines = log.read_text().splitlines()
    assert log.stat().st_size <= 1 << 20 and len(lines) > 4000
    header, *numbered_lines, _ = lines
    assert "bytes of older output were dropped" in header
    assert [int(line.partition(":")[0]) for line in numbered_lines] == list(
        range(20_000 - len(numbered_lines), 20_000)
    )


@pytest.mark.parametrize("role", ["prepare", "reward"])
def test_log_of_process_that_prints_without_end_is_bounded(run: Path, role: str) -> None:
    launcher = start(run, {role: "print_without_end"}, "logging.file_mib=1")
    log = run / "logs" / f"{role}-0.log"
    wait_for(lambda: log.exists() and "were dropped" in read_first_line(log), "shortened log")
    sizes: list[int] = []

    def has_printed_much() -> bool:
        sizes.append(log.stat().st_size)
        # Between two checks, a log can grow by more than its limit, on a busy machine by far.
        return count_output_bytes(log) > max(20 << 20, 2 * max(sizes))

    wait_for(has_printed_much, "twice as much output as was in the log", timeout_s=120)
    launcher.send_signal(signal.SIGINT)
    finish(launcher, run)
    assert log.stat().st_size <= 1 << 20
    assert "lines of a chatty process" in log.read_text().splitlines()[-2]


def test_logs_are_bounded_after_the_launcher_was_killed(run: Path) -> None:
    launcher = start(
        run, {"reward": "print_after_sigterm"}, "logging.file_mib=1", "cluster.stop_timeout_s=5"
    )
    log = run / "logs" / "reward-0.log"
    wait_for(lambda: log.exists() and log.stat().st_size, "line in the log")
    launcher.kill()
    wait_for(lambda: "were dropped" in read_first_line(log), "shortened log")
    wait_for(lambda: processes_of(run) == [], "end of the processes")


def read_first_line(log: Path) -> str:
    with log.open(errors="replace") as lines:
        return lines.readline(1000)
