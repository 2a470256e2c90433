"""Tests of complete `tiny_ppo` runs as jobs of a real Slurm with four nodes on this machine.

Each role is a component of a heterogeneous job.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from aligner.config.compose import compose_config, load_config, save_config
from aligner.launcher.slurm.submit import render_script
from aligner.launcher.status import read_status
from aligner.observability.metrics import read_metrics
from aligner.paths import RunPaths, find_complete_steps
from benchmarks.runs import REPOSITORY, checkpoint_differences, repeatable
from tests.slurm_cluster import NODES, SlurmCluster, why_no_containers, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

STEPS = 8
FOUR_NODES = (
    *(
        "cluster=slurm",
        "cluster.slurm.gpus=none",
        "cluster.devices_per_node=2",
        "cluster.threads_per_rank=1",
    ),
    *("actor.parallel.data=2", "cluster.slurm.roles.trainer.nodes=2"),
)
SECURE = ("server.tls.certificate=auto", "server.tls.mutual=true")
_TIMEOUT_S = 300


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    """Cancel the jobs of a test, so that a failed test does not affect the next tests."""
    yield
    slurm.command("scancel", "--user=root")


@dataclass(frozen=True)
class Job:
    """A run that was submitted to Slurm."""

    slurm: SlurmCluster
    number: str
    paths: RunPaths

    @property
    def log(self) -> str:
        """Output of the supervisor; empty before the job starts."""
        file = self.paths.job_log(self.number)
        return file.read_text() if file.exists() else ""

    def wait_for_state(self, *states: str) -> dict[str, str]:
        """Wait until the job is in one of these states, and return Slurm's record of the job."""
        deadline = time.monotonic() + _TIMEOUT_S
        while (found := self.slurm.state(self.number))["JobState"] not in states:
            assert time.monotonic() < deadline, f"{found}\n{self.log}"
            time.sleep(0.2)
        return found

    def wait_for_step(self, step: int) -> None:
        """Wait until this number of training steps is recorded."""
        deadline = time.monotonic() + _TIMEOUT_S
        while len(read_metrics(self.paths.metrics)) < step:
            assert time.monotonic() < deadline, self.log
            assert self.slurm.state(self.number)["JobState"] in ("PENDING", "RUNNING"), self.log
            time.sleep(0.05)

    def wait_for_checkpoint(self) -> None:
        """Wait until a checkpoint is complete; it is written while the next steps run."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not find_complete_steps(self.paths.checkpoints):
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)


def run_launch(
    slurm: SlurmCluster, directory: Path, *overrides: str
) -> subprocess.CompletedProcess[str]:
    """Run `aligner launch` like a user, and return its exit code and output."""
    command = [
        sys.executable,
        "-m",
        "aligner",
        "launch",
        "experiment=tiny_ppo",
        f"run.dir={directory}",
        *overrides,
    ]
    environment = {**slurm.environment, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def submit_run(slurm: SlurmCluster, directory: Path, *overrides: str) -> Job:
    """Submit a run with `aligner launch`, and return its job."""
    ended = run_launch(slurm, directory, *overrides)
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("job ")]
    return Job(slurm, line.removeprefix("job "), RunPaths(directory))


@pytest.fixture(scope="module")
def undisturbed(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = submit_run(
        slurm, tmp_path_factory.mktemp("undisturbed") / "run", *FOUR_NODES, f"run.steps={STEPS}"
    )
    assert job.wait_for_state("COMPLETED", "FAILED", "CANCELLED")["JobState"] == "COMPLETED", (
        job.log
    )
    return job


@pytest.mark.promise("slurm-heterogeneous-job")
def test_heterogeneous_job_on_four_nodes_completes(undisturbed: Job) -> None:
    assert [step["step"] for step in read_metrics(undisturbed.paths.metrics)] == list(
        range(1, STEPS + 1)
    )
    script = (undisturbed.paths.root / "job.sh").read_text()
    assert script.count("#SBATCH hetjob") == 2
    assert f"Summary of {STEPS} steps" in undisturbed.log
    assert (undisturbed.paths.checkpoints / f"step_{STEPS}" / "manifest.json").is_file()
    assert undisturbed.paths.trace.is_file()


@pytest.mark.promise("preempted-slurm-job-equals-uninterrupted")
def test_preempted_job_equals_undisturbed_job(
    undisturbed: Job, slurm: SlurmCluster, tmp_path: Path
) -> None:
    job = submit_run(slurm, tmp_path / "run", *FOUR_NODES, *SECURE, f"run.steps={STEPS}")
    job.wait_for_step(2)
    slurm.command("scancel", "--batch", "--signal=USR1", job.number)
    assert job.wait_for_state("PENDING", "COMPLETED", "FAILED")["Restarts"] == "1", job.log
    status = read_status(job.paths.root)
    assert (status.state, status.job) == ("queued", job.number)
    assert status.note is not None and f"squeue --jobs={job.number}" in status.note
    done = len(read_metrics(job.paths.metrics))
    assert 2 <= done < STEPS
    slurm.start_soon(job.number)
    assert job.wait_for_state("COMPLETED", "FAILED", "CANCELLED")["JobState"] == "COMPLETED", (
        job.log
    )
    assert "(requeued 1 time)" in job.log
    assert repeatable(read_metrics(job.paths.metrics)) == repeatable(
        read_metrics(undisturbed.paths.metrics)
    )
    assert checkpoint_differences(undisturbed.paths, job.paths, STEPS, "policy") == []
    assert checkpoint_differences(undisturbed.paths, job.paths, STEPS, "critic") == []


def test_preempted_job_resumes_from_checkpoint(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = submit_run(slurm, tmp_path / "run", *FOUR_NODES, "run.steps=1000", "checkpoint.every=2")
    job.wait_for_step(3)
    job.wait_for_checkpoint()
    slurm.command(
        "sbatch",
        "--partition=urgent",
        f"--nodes={NODES}",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 1",
    )
    assert job.wait_for_state("PENDING", "COMPLETED", "FAILED")["Restarts"] == "1", job.log
    assert re.search(
        r"\ntrainer rank [01] was killed by SIGTERM, which the launcher did not send\n", job.log
    ), job.log
    status = read_status(job.paths.root)
    assert (status.state, status.exit_code, status.step >= 3) == ("queued", 75, True)
    slurm.start_soon(job.number)
    job.wait_for_step(status.step + 2)
    steps = [record["step"] for record in read_metrics(job.paths.metrics)]
    assert steps == list(range(1, len(steps) + 1))
    assert load_config(job.paths.config).run.resume == "true"
    message_files = [
        [*job.paths.logs.glob(f"srun-{job.number}-{requeues}-trainer-*.log")] for requeues in (0, 1)
    ]
    assert [len(files) for files in message_files] == [1, 1] and "Terminated" in message_files[0][
        0
    ].read_text()
    slurm.command("scancel", job.number)
    assert (
        job.wait_for_state("PENDING", "COMPLETED", "FAILED", "CANCELLED")["JobState"] == "CANCELLED"
    ), job.log
    assert read_status(job.paths.root).exit_code == 143


def test_requeued_job_is_reported_as_queued(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    job = submit_run(slurm, tmp_path / "run", *FOUR_NODES, "run.steps=1000")
    deadline = time.monotonic() + _TIMEOUT_S
    while read_status(job.paths.root).state != "starting":
        assert time.monotonic() < deadline, job.log
        time.sleep(0.2)
    slurm.command("scontrol", "requeue", job.number)
    job.wait_for_state("PENDING")
    # Slurm does not wait for the supervisor to exit.
    while (status := read_status(job.paths.root)).exit_code is None:
        assert time.monotonic() < deadline, job.log
        time.sleep(0.2)
    assert (status.state, status.exit_code) == ("queued", 143)
    assert status.note is not None and status.note.startswith(
        "stopped by SIGTERM; the run's Slurm job is in the queue"
    )
    slurm.command("scancel", job.number)
    status = read_status(job.paths.root)
    assert status.state == "stopped"
    assert status.note == f"stopped by SIGTERM; restart the run with: sbatch {job.paths.job_script}"


def claimed_paths(role: str, job: Job) -> list[Path]:
    """Return Triton's directories and shared memory that a server's rank 0 has listed."""
    words = {f"role={role}", str(job.paths.config)}
    # the pids include that of srun
    pids = [
        each.pid
        for each in psutil.process_iter(["cmdline"])
        if words <= {*(each.info["cmdline"] or ())}
    ]
    (claim,) = [
        claim for pid in pids for claim in Path("/dev/shm").glob(f"aligner-server-*-{pid}-*")
    ]
    deadline = time.monotonic() + _TIMEOUT_S
    while not (found := (claim / "paths").read_text().splitlines()):
        assert time.monotonic() < deadline, job.log
        time.sleep(0.2)
    return [*map(Path, found)]


@pytest.mark.promise("slurm-heterogeneous-job")
def test_killed_job_steps_restart_up_to_the_limit(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = submit_run(
        slurm,
        tmp_path / "run",
        *FOUR_NODES,
        *SECURE,
        "run.steps=1000",
        "checkpoint.every=2",
        "run.max_restarts=1",
    )
    job.wait_for_step(1)

    def kill(role: str) -> None:
        *_, step = [
            number for name, number in slurm.steps(job.number).items() if name.startswith(role)
        ]
        slurm.command("scancel", "--signal=KILL", step)

    def wait_for(words: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while words not in job.log:
            assert time.monotonic() < deadline, job.log
            time.sleep(0.2)

    claimed = claimed_paths("critic", job)
    kill("critic")
    wait_for("critic is healthy again")
    assert not [path for path in claimed if path.exists()], "Slurm has killed who else removes it"
    assert (
        "critic rank 0 was killed by SIGKILL; restarting critic (1 of 3 in the last hour)"
        in job.log
    )
    job.wait_for_step(len(read_metrics(job.paths.metrics)) + 3)
    kill("trainer")
    wait_for("restarting trainer (1 of 1 in the last hour)")
    job.wait_for_step(len(read_metrics(job.paths.metrics)) + 3)
    assert job.log.count("restarting critic") == 1
    kill("trainer")
    assert job.wait_for_state("COMPLETED", "FAILED", "CANCELLED")["ExitCode"] == "1:0", job.log
    assert re.search(
        r"aligner: error: trainer rank [01] was killed by SIGKILL after 1 restart", job.log
    )
    assert re.search(r"log: .*/trainer-[01]\.log", job.log)


def test_srun_rejection_reports_restart_command(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = submit_run(
        slurm, tmp_path / "run", *FOUR_NODES, "cluster.slurm.srun=['--container-image=image']"
    )
    assert job.wait_for_state("COMPLETED", "FAILED", "CANCELLED")["ExitCode"] == "1:0", job.log
    assert re.search(
        r"aligner: error: prepare rank 0 exited with code \d+; srun reported:\n  \|"
        r" srun: ",
        job.log,
    )
    assert "container-image" in job.log and "Traceback" not in job.log
    status = read_status(job.paths.root)
    assert status.state == "failed"
    assert status.note is not None and status.note.endswith(
        f"restart the run with: sbatch {job.paths.job_script}"
    )


def write_machine_bundle(bundle: Path, **variables: str) -> None:
    """Write an OCI bundle whose files are those of this machine, read-only, for its own user."""
    program = bundle / "bin" / "aligner"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m aligner "$@"\n')
    program.chmod(0o755)
    environment = {
        "PATH": f"{program.parent}:/usr/bin:/bin",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        **variables,
    }
    subprocess.run(
        ["runc", "spec", "--rootless"],
        cwd=bundle,
        env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"},
        check=True,
    )
    config = json.loads((bundle / "config.json").read_text())
    config["root"] = {"path": "/", "readonly": True}
    config["process"]["env"] = [f"{name}={value}" for name, value in environment.items()]
    (bundle / "config.json").write_text(json.dumps(config))


@pytest.mark.skipif(why_no_containers() is not None, reason=str(why_no_containers()))
def test_containers_with_read_only_root_restart_and_stop(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    write_machine_bundle(tmp_path / "bundle", HOME="/home/does_not_exist")
    job = submit_run(
        slurm,
        tmp_path / "run",
        *("cluster=slurm", "cluster.slurm.gpus=none", "cluster.threads_per_rank=1"),
        *("cluster.slurm.container_runtime=oci", f"cluster.slurm.image={tmp_path}/bundle"),
        *("cluster.slurm.requeue=false", "run.steps=1000"),
    )
    job.wait_for_step(1)
    claimed = claimed_paths("critic", job)
    (step,) = [
        number for name, number in slurm.steps(job.number).items() if name.startswith("critic")
    ]
    slurm.command("scancel", "--signal=KILL", step)
    deadline = time.monotonic() + _TIMEOUT_S
    while "critic is healthy again" not in job.log:
        assert time.monotonic() < deadline, job.log
        time.sleep(0.2)
    assert "critic rank 0 was killed by SIGKILL; restarting critic" in job.log
    assert not [path for path in claimed if path.exists()]

    job.wait_for_step(len(read_metrics(job.paths.metrics)) + 2)
    slurm.command("scancel", "--batch", "--signal=USR1", job.number)
    assert job.wait_for_state("COMPLETED", "FAILED", "CANCELLED")["ExitCode"] == "75:0", job.log
    steps = len(read_metrics(job.paths.metrics))
    assert find_complete_steps(job.paths.checkpoints) == [steps]
    # No process of a container is left.
    assert not [
        each.pid
        for each in psutil.process_iter(["cmdline"])
        if str(job.paths.config) in (each.info["cmdline"] or ())
    ]


def test_second_launch_of_a_queued_run_is_refused(slurm: SlurmCluster, tmp_path: Path) -> None:
    directory, given = (
        tmp_path / "two words" / "run",
        (
            *FOUR_NODES,
            "cluster.slurm.sbatch=[--hold]",
            "run.resume=auto",
        ),
    )
    job = submit_run(slurm, directory, *given)
    before = job.paths.config.read_text(), job.paths.job_script.read_text()
    (tmp_path / "link").symlink_to(directory)
    for same in (directory, tmp_path / "link"):
        second = run_launch(slurm, same, *given, "run.steps=1000")
        assert second.returncode == 2
        message = (
            f"already queued as job {job.number}; wait until the job ends, or cancel the job with"
            f" `scancel {job.number}`"
        )
        assert second.stderr == f"aligner: error: run.dir={same}: {message}\n"
    assert (job.paths.config.read_text(), job.paths.job_script.read_text()) == before
    slurm.command("scancel", job.number)
    again = submit_run(slurm, directory, *given)
    assert again.number != job.number
    slurm.command("scancel", again.number)


_SEES = """
import os, subprocess, sys
from pathlib import Path
from aligner.config.compose import load_config
from aligner.paths import RunPaths
from aligner.placement.job_layout import compute_job_layout
from aligner.launcher.job_ranks import configured_environment
from aligner.launcher.rank_environment import world_environment
from aligner.launcher.rank_heartbeat import IS_TASK
from aligner.launcher.slurm.job_steps import read_allocation, srun_command

paths = RunPaths(Path(sys.argv[1]))
config = load_config(paths.config)
layout = compute_job_layout(config)
allocation = read_allocation(layout)
look = "import os; from aligner.launcher.rank_environment import adopt_environment; adopt_environment()"
look += "; print(os.environ['CUDA_VISIBLE_DEVICES'])"
for role, ranks in (("trainer", 2), ("critic", 2)):
    place, nodes = layout.placements[role], allocation.nodes[role]
    command = srun_command(config, role, place, nodes, ranks, None, role, [sys.executable, "-c", look])
    environment = {**os.environ, IS_TASK: "1", **world_environment(ranks, place.ranks_per_node, nodes.address, 1, 1)}
    subprocess.run(command, env={**environment, **configured_environment(config, role, place)}, check=True)
    paths.log(role, ranks).write_text(str(nodes.cpus))
"""


def test_roles_on_shared_node_see_own_devices(slurm: SlurmCluster, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    given = (
        *(
            "experiment=tiny_ppo",
            "cluster=slurm",
            f"run.dir={tmp_path}",
            "actor.parallel.data=2",
            "critic.parallel.data=2",
        ),
        *("cluster.slurm.roles.trainer.devices=0-3", "cluster.slurm.roles.critic.devices=6-7"),
        *(
            "cluster.slurm.roles.critic.shares_nodes_with=trainer",
            "cluster.slurm.roles.reward.shares_nodes_with=trainer",
        ),
        "cluster.slurm.roles.reward.devices='5'",
    )
    config = compose_config(given)
    save_config(config, paths.config)
    paths.logs.mkdir()
    (tmp_path / "sees.py").write_text(_SEES)
    asked = [line for line in render_script(config).splitlines() if line.startswith("#SBATCH")]
    run = f"{sys.executable} {tmp_path / 'sees.py'} {tmp_path}"
    paths.job_script.write_text(
        "\n".join(["#!/usr/bin/env bash", *asked, f"PYTHONPATH={REPOSITORY} {run}", ""])
    )
    slurm.command("sbatch", "--wait", str(paths.job_script))
    seen = {
        role: [paths.log(role, rank).read_text().strip() for rank in range(3)]
        for role in ("trainer", "critic")
    }
    assert seen == {"trainer": ["0,1", "0,1", "5"], "critic": ["6,7", "6,7", "5"]}


def test_gpu_check_script_runs_as_a_slurm_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.sh"
    cluster.write_text("SLURM_PARTITION=main\nSLURM_TIME=5\nSLURM_SBATCH=(--mem=0)\n")
    script, output = REPOSITORY / "launcher_scripts" / "gpu_check.sh", tmp_path / "checked.jsonl"
    path = f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"
    environment = {**slurm.environment, "PATH": path, "ALIGNER_CLUSTER": str(cluster)}
    done = subprocess.run(
        [str(script), "--output", str(output)],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    checked = [json.loads(line) for line in output.read_text().splitlines()]
    # The GPUs of this Slurm are files, so every check reports `absent`.
    assert len(checked) > 5 and {each["result"] for each in checked} == {"absent"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("cluster.slurm.partition=nowhere", "invalid partition specified: nowhere"),
        ("cluster.slurm.time=2-00:00:00", "Requested time limit is invalid"),
        (
            "cluster.slurm.roles.trainer.nodes=2 actor.parallel.data=32",
            "Requested node configuration is not available",
        ),
    ],
)
def test_rejected_job_leaves_no_run_directory(
    slurm: SlurmCluster, tmp_path: Path, override: str, said: str
) -> None:
    ended = run_launch(
        slurm, tmp_path / "run", *FOUR_NODES, "cluster.devices_per_node=100", *override.split()
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("aligner: error: cluster.slurm: Slurm rejected the job: ")
    assert said in ended.stderr
    assert not (tmp_path / "run").exists()
    # A job of an earlier test may be in the state COMPLETING.
    assert slurm.command("squeue", "--noheader", "--states=PENDING,RUNNING") == ""
