"""Tests of `aligner status` for running, ended and abandoned runs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from aligner.config.compose import compose_config, save_config
from aligner.errors import AlignerError, ConfigError
from aligner.launcher.run_directory import LauncherState, RoleState, read_state
from aligner.launcher.status import RoleStatus, describe_status, read_status
from aligner.paths import RunPaths
from tests.launcher.stand_ins import stand_in
from tests.launcher.test_launch import finish, launch_overrides, processes_of, start, wait_for
from tests.rounds import slow


def resume_command(run: Path, *overrides: str) -> str:
    """Return the command that resumes a run that was launched with `start`."""
    kept = [text for text in launch_overrides(run, *overrides) if not text.startswith("run.dir=")]
    return shlex.join(["aligner", "launch", *kept, f"run.dir={run}", "run.resume=auto"])


def state_of(run: Path) -> str:
    return read_status(run).state if (run / "status.json").exists() else "none"


def healths(run: Path) -> dict[str, str]:
    return {name: role.health for name, role in read_status(run).roles.items()}


def rank_of(run: Path, role: str) -> psutil.Process:
    (process,) = [process for process in processes_of(run) if role in process.cmdline()]
    return process


def test_status_follows_a_run_from_start_to_stop(run: Path) -> None:
    launcher = start(run, {"trainer": "train_slowly"})
    seen = set[str]()
    wait_for(lambda: seen.add(state_of(run)) or "running" in seen, "running status")
    assert seen <= {"none", "starting", "running"} and "starting" in seen
    wait_for(lambda: set(healths(run).values()) == {"healthy"}, "healthy roles")
    status = read_status(run)
    assert (status.step, status.steps, status.metrics["reward/mean"]) == (1, 7, 0.1)
    assert (status.seconds_per_step, status.seconds_left, status.resumable) == (0.5, 3.0, False)
    assert status.last_step_age_s is not None and status.last_step_age_s < 30
    description = describe_status(status)
    assert description.startswith(
        "run: running  step 1/7  reward 0.100  KL 0.0100  0.50 s/step  ETA 0:00:03  last step 0:00:"
    )
    assert description.endswith(" ago  [critic healthy, reward healthy, trainer healthy]")
    # Until the launcher has seen a server healthy, status reports `starting`, not `not answering`.
    wait_for(
        lambda: (state := read_state(run / "status.json")) and state.roles["critic"].healthy,
        "the launcher's own look",
    )
    rank_of(run, "critic").suspend()
    assert healths(run) == {"critic": "not answering", "reward": "healthy", "trainer": "healthy"}
    rank_of(run, "critic").resume()
    launcher.send_signal(signal.SIGTERM)
    finish(launcher, run)
    status = read_status(run)
    assert (status.state, status.exit_code, status.seconds_left) == ("stopped", 143, None)
    assert status.note == f"stopped by SIGTERM; restart the run with: {resume_command(run)}"
    assert set(healths(run).values()) == {"gone"}


def test_finished_run_reports_its_last_step(run: Path) -> None:
    code, _, error = finish(start(run), run)
    assert code == 0, error
    status = read_status(run)
    assert (status.state, status.exit_code, status.resumable, status.note) == (
        "finished",
        0,
        False,
        None,
    )
    assert describe_status(status).startswith(
        "run: finished  step 7/7  reward 0.700  KL 0.0100  0.50 s/step  last step "
    )


@pytest.mark.parametrize(
    ("behavior", "reason"),
    [
        (
            "fail_rank_1",
            (
                "rank 1 exited with code 1 (then trainer rank 0 failed): step 3: the reward is"
                " nan for the prompt 'abc'"
            ),
        ),
        slow(
            "raise",
            "rank {rank} exited with code 1 (then trainer rank {other} failed): ValueError: the"
            " scorer returned nan",
        ),
        slow("killed", "rank {rank} was killed by SIGKILL (then trainer rank {other} failed)"),
    ],
)
def test_failed_run_reports_reason_and_command(run: Path, behavior: str, reason: str) -> None:
    code, _, error = finish(
        start(run, {"trainer": behavior}, "actor.parallel.pipeline=2", "run.max_restarts=0"), run
    )
    assert code == 1
    (run / "checkpoints" / "step_2").mkdir(parents=True)
    (run / "checkpoints" / "step_2" / "manifest.json").write_text("{}")
    status = read_status(run)
    assert (status.state, status.exit_code, status.resumable) == ("failed", 1, True)
    rank = int(error.startswith("trainer rank 1"))
    failure = reason.format(rank=rank, other=1 - rank)
    assert (
        status.note == f"trainer {failure}; resume the run with:"
        f" {resume_command(run, 'actor.parallel.pipeline=2', 'run.max_restarts=0')}"
    )


@pytest.mark.slow
def test_unhealthy_server_is_restarting_after_restart(run: Path) -> None:
    launcher = start(run, {"critic": "healthy_once", "trainer": "hang"})
    # Do not call read_status here: the server exits after its first health request.
    wait_for(
        lambda: (state := read_state(run / "status.json")) and state.roles["critic"].restarts,
        "restart",
    )
    assert read_status(run).roles["critic"] == RoleStatus(ranks=1, health="restarting", restarts=1)
    launcher.send_signal(signal.SIGTERM)
    finish(launcher, run)


@pytest.mark.slow
def test_run_with_killed_launcher_is_stopped(run: Path) -> None:
    launcher = start(run, {"trainer": "train_slowly"})
    wait_for(lambda: state_of(run) == "running", "running status")
    launcher.kill()
    launcher.wait()
    status = read_status(run)
    assert (status.state, status.exit_code) == ("stopped", None)
    assert status.note is not None and f"process {launcher.pid} on " in status.note
    assert (
        "is no longer running and did not record the end of the run; restart the run with: aligner"
        " launch experiment=tiny_ppo" in status.note
    )
    wait_for(lambda: not processes_of(run), "end of its ranks")


def create_run_directory(
    directory: Path, state: LauncherState | None, steps: int, *overrides: str
) -> Path:
    """Create the run directory of a run of five steps, of which `steps` are recorded."""
    directory.mkdir()
    composed = compose_config(
        ["experiment=tiny_ppo", f"run.dir={directory}", "run.steps=5", *overrides]
    )
    save_config(composed, directory / "config.yaml")
    if state is not None:
        state.write(RunPaths(directory).status)
    records = [{"step": step, "reward/mean": 0.5, "time/step": 2.0} for step in range(1, steps + 1)]
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    return directory


def test_remote_launcher_lives_while_status_is_fresh(tmp_path: Path) -> None:
    roles = {"trainer": RoleState(8, healthy=True)}
    state = LauncherState(1, None, "node-17", time.time() - 500, roles, job="4242")
    run = create_run_directory(tmp_path / "run", state, steps=2)
    status = read_status(run)
    assert (status.state, status.job, status.roles["trainer"].health) == (
        "running",
        "4242",
        "healthy",
    )
    assert "ETA 0:00:06" in describe_status(status) and "job 4242" in describe_status(status)
    os.utime(run / "status.json", (time.time() - 400,) * 2)
    status = read_status(run)
    assert (
        status.state == "stopped"
        and status.note is not None
        and status.note.startswith("the launcher (job 4242) is no longer running")
    )


SBATCH = "restart the run with: sbatch {run}/job.sh"
IN_QUEUE = "the run's Slurm job is in the queue and will resume the run: squeue --jobs=4242"
UNKNOWN = (
    "if the run's job is still queued (squeue --jobs=4242), the job resumes the run; otherwise "
)


@pytest.mark.parametrize(
    ("squeue", "requeue", "state", "note"),
    [
        ("echo PENDING; echo PENDING", True, "queued", IN_QUEUE),
        ("echo RUNNING", True, "queued", IN_QUEUE),
        ("", True, "stopped", SBATCH),
        (
            "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
            True,
            "stopped",
            SBATCH,
        ),
        ("echo COMPLETING", True, "stopped", UNKNOWN + SBATCH),
        (
            "echo 'Unable to contact slurm controller' >&2; exit 1",
            True,
            "stopped",
            UNKNOWN + SBATCH,
        ),
        ("exec sleep 60", True, "stopped", UNKNOWN + SBATCH),
        ("echo PENDING", False, "stopped", SBATCH),
    ],
)
@pytest.mark.parametrize("exit_code", [143, None])
def test_status_depends_on_slurm_queue(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    squeue: str,
    requeue: bool,
    state: str,
    note: str,
    exit_code: int | None,
) -> None:
    stand_in(tmp_path, monkeypatch, "squeue", squeue)
    monkeypatch.setattr("aligner.launcher.status._QUEUE_TIMEOUT_S", 1.0)
    now = time.time()
    stopped = LauncherState(
        1,
        None,
        "node-17",
        now - 500,
        {},
        "4242",
        now if exit_code else None,
        exit_code,
        "stopped by SIGTERM",
    )
    run = create_run_directory(
        tmp_path / "run", stopped, 2, "cluster=slurm", f"cluster.slurm.requeue={requeue}"
    )
    if exit_code is None:
        os.utime(run / "status.json", (now - 400,) * 2)
    status = read_status(run)
    why = (
        "stopped by SIGTERM"
        if exit_code
        else "the launcher (job 4242) is no longer running and did not record the end of the run"
    )
    assert (status.state, status.note) == (state, f"{why}; {note.format(run=run)}")


def test_reused_process_id_is_not_the_launcher(tmp_path: Path) -> None:
    state = LauncherState(os.getpid(), 12345, os.uname().nodename, time.time(), {}, None)
    assert read_status(create_run_directory(tmp_path / "run", state, steps=1)).state == "stopped"


@pytest.mark.parametrize(("steps", "state"), [(5, "finished"), (2, "stopped")])
def test_run_without_status_file_is_judged_by_its_steps(
    tmp_path: Path, steps: int, state: str
) -> None:
    status = read_status(create_run_directory(tmp_path / "run", None, steps))
    assert (status.state, status.step, status.roles) == (state, steps, {})


def test_run_ended_by_target_is_finished_with_reason(tmp_path: Path) -> None:
    why = "ended after step 2: reward/mean 0.5 has reached run.end_at=reward/mean:0.5"
    state = LauncherState(1, None, "node-17", time.time() - 9, {}, None, time.time(), 0, why)
    run = create_run_directory(tmp_path / "run", state, 2, "run.end_at=reward/mean:0.5")
    (run / "checkpoints" / "step_2").mkdir(parents=True)
    (run / "checkpoints" / "step_2" / "manifest.json").write_text("{}")
    assert (read_status(run).state, read_status(run).resumable) == ("stopped", True)
    (run / "end.txt").write_text(f"{why}\n")
    status = read_status(run)
    assert (status.state, status.resumable, status.note) == ("finished", False, why)
    assert describe_status(status).startswith("run: finished  step 2/5") and describe_status(
        status
    ).endswith(f"\n  {why}")


def test_status_of_invalid_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"{tmp_path / 'absent'}: no such directory; give a run directory"
    ):
        read_status(tmp_path / "absent")
    with pytest.raises(
        ConfigError, match=f"{tmp_path}: not a run directory, because it has no config.yaml"
    ):
        read_status(tmp_path)
    run = create_run_directory(tmp_path / "run", None, 1)
    (run / "status.json").write_text("[]")
    with pytest.raises(AlignerError, match=r"status\.json: not a valid status file"):
        read_status(run)


def test_status_command_prints_line_or_json(tmp_path: Path) -> None:
    def status(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "aligner", "status", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    run = create_run_directory(tmp_path / "run", None, 5)
    done = status(str(run), "--watch")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "run: finished  step 5/5  reward 0.500  2.00 s/step  last step 0:00:"
    )
    printed = json.loads(status(str(run), "--json").stdout)
    assert (
        printed["state"],
        printed["step"],
        printed["metrics"]["reward/mean"],
        printed["roles"],
    ) == (
        "finished",
        5,
        0.5,
        {},
    )
    refused = status(str(tmp_path / "absent"))
    assert refused.returncode == 2 and refused.stderr.startswith("aligner: error: ")
