"""Tests of Slurm job scripts, job steps and submission, without Slurm."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aligner.checks.cluster import find_problems
from aligner.config.compose import compose_config, save_config
from aligner.config.prerequisites import plan_run
from aligner.errors import AlignerError, ConfigError
from aligner.launcher.failure import build_rank_error
from aligner.launcher.job_ranks import configured_environment
from aligner.launcher.job_submission import render_preview, submit
from aligner.launcher.rank_environment import DEVICES, FreePorts, adopt_environment
from aligner.launcher.rank_heartbeat import IS_TASK
from aligner.launcher.slurm import submit as submitting
from aligner.launcher.slurm.job_steps import (
    Allocation,
    Nodes,
    SlurmSteps,
    Step,
    TaskRank,
    read_allocation,
    srun_command,
)
from aligner.launcher.slurm.slurm_commands import RETRY_ATTEMPTS, slurm_command
from aligner.launcher.slurm.submit import render_script
from aligner.models.model_source import NOTHING_EXPECTED
from aligner.paths import RunPaths
from aligner.placement.job_layout import compute_job_layout
from tests.launcher.stand_ins import stand_in

GENEROUS = (
    *(
        "cluster.slurm.account=a",
        "cluster.slurm.partition=main",
        "cluster.slurm.time=4:00:00",
        "cluster.slurm.qos=high",
    ),
    *(
        "cluster.slurm.reservation=r",
        "cluster.slurm.constraint=h100",
        "cluster.slurm.roles.critic.partition=other",
    ),
    *(
        "cluster.slurm.setup=['module load cuda']",
        "cluster.slurm.sbatch=['--comment=two words']",
        "cluster.slurm.grace_s=90",
    ),
    *(
        "cluster.slurm.roles.reward.sbatch=[--exclusive]",
        "cluster.slurm.requeue=false",
        "actor.parallel.data=16",
    ),
)


def config(tmp_path: Path, *overrides: str):
    return compose_config(
        ["experiment=tiny_ppo", "cluster=slurm", f"run.dir={tmp_path}/run", *overrides]
    )


def test_job_script_requests_configured_resources(tmp_path: Path) -> None:
    script = render_script(config(tmp_path, *GENEROUS))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    parts = [
        [line.removeprefix("#SBATCH ") for line in part.splitlines() if line.startswith("#SBATCH ")]
        for part in script.split("#SBATCH hetjob")
    ]
    of_all = {
        "--account=a",
        "--qos=high",
        "--reservation=r",
        "--constraint=h100",
        "--time=4:00:00",
        "--comment='two words'",
    }
    assert all(of_all <= {*part} for part in parts)
    trainer, critic, reward = parts
    assert {"--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--partition=main"} <= {
        *trainer
    }
    assert {
        "--signal=B:USR1@90",
        "--no-requeue",
        "--open-mode=append",
        f"--chdir={Path.cwd()}",
    } <= {*trainer}
    assert {"--nodes=1", "--gpus-per-node=1", "--partition=other"} <= {*critic}
    assert {"--nodes=1", "--exclusive"} <= {*reward}
    assert not [flag for flag in reward if "gpu" in flag]  # reward is a function and needs no GPU
    assert script.splitlines()[-2:] == ["module load cuda", script.splitlines()[-1]]
    assert script.splitlines()[-1].endswith(f"-m aligner supervise {tmp_path}/run")


def test_job_script_quotes_run_directory_with_space(tmp_path: Path) -> None:
    script = render_script(config(tmp_path / "two words", "run.name=name"))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert f"supervise '{tmp_path}/two words/run'" in script


@pytest.mark.parametrize(
    ("explicit", "cache"),
    [
        ("", "/home/a user/.cache/aligner"),
        ("/big/cache", "/big/cache"),
        ("mine", f"{Path.cwd()}/mine"),
    ],
)
def test_job_script_exports_cache_of_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, explicit: str, cache: str
) -> None:
    for name, value in {
        "HOME": "/home/a user",
        "XDG_CACHE_HOME": "",
        "ALIGNER_CACHE": explicit,
    }.items():
        monkeypatch.setenv(name, value)
    script = render_script(config(tmp_path, "cluster.slurm.setup=['module load cuda']"))
    before, _ = script.split("module load cuda")  # the setup commands may override the cache
    elsewhere = {"PATH": os.environ["PATH"], "HOME": "/home/aligner"}
    printed = subprocess.run(
        ["bash", "-c", f"{before}\nprintenv ALIGNER_CACHE"],
        env=elsewhere,
        capture_output=True,
        text=True,
    )
    assert printed.stdout == f"{cache}\n"


def test_homogeneous_job_requests_gres(tmp_path: Path) -> None:
    script = render_script(
        config(tmp_path, "cluster.slurm.heterogeneous=false", "cluster.slurm.gpus=gres")
    )
    assert "hetjob" not in script
    assert "#SBATCH --nodes=3\n" in script and "#SBATCH --gres=gpu:1\n" in script


def step_of(tmp_path: Path, role: str, ranks: int, *overrides: str) -> list[str]:
    made = config(tmp_path, *overrides)
    nodes = Nodes(1, ("n3", "n4"), "10.0.0.3")
    layout = compute_job_layout(made)
    cores = None if layout.is_shared(layout.placements[role]) else 6
    return srun_command(
        made, role, layout.placements[role], nodes, ranks, cores, "name-1", ["a", "b c"]
    )


def test_job_step_runs_on_the_nodes_of_its_role(tmp_path: Path) -> None:
    command = step_of(
        tmp_path, "critic", 2, "critic.parallel.data=2", "cluster.slurm.roles.critic.nodes=2"
    )
    wanted = {"--het-group=1", "--nodes=2", "--nodelist=n3,n4", "--ntasks=2", "--ntasks-per-node=1"}
    assert wanted | {"--kill-on-bad-exit=0", "--export=ALL", "--cpus-per-task=6"} <= {*command}
    assert command[-2:] == ["a", "b c"]
    assert not [flag for flag in command if flag.startswith("--container")]


def test_shared_node_job_steps_are_not_bound_to_cores(tmp_path: Path) -> None:
    beside = ("cluster.slurm.roles.trainer.devices=0-5", "cluster.slurm.roles.critic.devices=6-7")
    steps = {
        role: step_of(
            tmp_path, role, 1, *beside, "cluster.slurm.roles.critic.shares_nodes_with=trainer"
        )
        for role in ("trainer", "critic", "reward")
    }
    for role in ("trainer", "critic"):
        assert {"--whole", "--cpu-bind=none"} <= {
            *steps[role]
        } and "--cpus-per-task=6" not in steps[role]
    assert "--cpus-per-task=6" in steps["reward"] and "--whole" not in steps["reward"]


def test_container_step_mounts_run_and_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNER_CACHE", "/cache")
    given = (
        *(
            "cluster.slurm.image='REGISTRY#NAME:1'",
            "cluster.slurm.mounts=[/data:/data:ro]",
            "cluster.slurm.workdir=/work",
        ),
        *(
            "cluster.slurm.roles.critic.image='REGISTRY#OTHER:2'",
            "cluster.slurm.srun=['--mpi=none']",
        ),
    )
    critic, reward = (step_of(tmp_path, role, 1, *given) for role in ("critic", "reward"))
    assert (
        "--container-image=REGISTRY#OTHER:2" in critic
        and "--container-image=REGISTRY#NAME:1" in reward
    )
    mounts = f"--container-mounts={tmp_path}/run:{tmp_path}/run,/cache:/cache,/data:/data:ro"
    assert {mounts, "--container-workdir=/work", "--no-container-mount-home", "--mpi=none"} <= {
        *reward
    }


def preview(tmp_path: Path, *overrides: str) -> list[str]:
    """Return the srun commands that a dry launch prints, without the comment signs."""
    plan = plan_run(config(tmp_path, *overrides))
    text = render_preview(plan, NOTHING_EXPECTED)
    assert text.startswith(render_script(plan.config))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return [
        line.removeprefix("# ")
        for line in text.splitlines()
        if line.startswith("# ") and " --job-name=" in line
    ]


def test_dry_launch_prints_the_job_steps_that_the_job_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNER_CACHE", f"{tmp_path}/cache")
    overrides = (
        "cluster.slurm.image='REGISTRY#NAME:1'",
        "cluster.slurm.workdir=/work",
        "cluster.slurm.srun=['--mpi=none']",
        "cluster.slurm.mounts=[/tmp:/tmp,/work:/work]",
    )
    lines = preview(tmp_path, *overrides)
    names = [re.search(r"--job-name=(\S+)", line)[1] for line in lines]
    assert names == ["prepare-1", "critic-2", "reward-3", "trainer-4"]

    # Start the steps on nodes with the names of the placeholders, and compare the commands.
    stand_in(tmp_path, monkeypatch, "srun", 'printf "%s\\n" "$@" > "$RECORDED"')
    plan = plan_run(config(tmp_path, *overrides))
    layout = compute_job_layout(plan.config)
    component_nodes = {
        group: Nodes(placement.component, (f"NODE{placement.component}",), "10.0.0.1", 6)
        for group, placement in layout.placements.items()
    }
    with FreePorts() as ports:
        steps = SlurmSteps(layout, Allocation("7", component_nodes), plan.config, ports)
        for name, line in zip(names, lines, strict=True):
            recorded = tmp_path / name
            monkeypatch.setenv("RECORDED", str(recorded))
            steps.start(name.partition("-")[0])
            while steps.running:
                steps.poll()
            arguments = shlex.split(line.replace("CORES", "6"))[1:]
            assert recorded.read_text().splitlines() == arguments
            assert {"--container-image=REGISTRY#NAME:1", "--container-workdir=/work"} <= {
                *arguments
            }


def test_dry_launch_shows_binding_of_roles_that_share_nodes(tmp_path: Path) -> None:
    _prepare, critic, reward, trainer = preview(
        tmp_path,
        "cluster.slurm.roles.trainer.devices=0-5",
        "cluster.slurm.roles.critic.devices=6-7",
        "cluster.slurm.roles.critic.shares_nodes_with=trainer",
    )
    assert trainer.startswith("ALIGNER_DEVICES=0 srun ")
    assert critic.startswith("ALIGNER_DEVICES=6 srun ")
    assert " --cpu-bind=none " in critic and " --cpu-bind=none " in trainer
    assert reward.startswith("srun ") and " --cpus-per-task=" in reward


def test_role_environment_overrides_common_variables(tmp_path: Path) -> None:
    made = config(
        tmp_path,
        *(
            "+cluster.slurm.environment.A=1",
            "+cluster.slurm.environment.B=2",
            "+cluster.slurm.roles.critic.environment.B=3",
        ),
        *(
            "cluster.slurm.roles.critic.devices=6-7",
            "cluster.slurm.roles.critic.shares_nodes_with=trainer",
        ),
        *("cluster.slurm.roles.trainer.devices=0-3",),
    )
    places = compute_job_layout(made).placements
    assert configured_environment(made, "critic", places["critic"]) == {
        "A": "1",
        "B": "3",
        "ALIGNER_DEVICES": "6",
    }
    assert configured_environment(made, "trainer", places["trainer"])["B"] == "2"


@pytest.mark.parametrize(
    ("said", "code", "expected"),
    [
        ("", 0, [0, 0, 0]),
        ("srun: error: n2: task 1: Exited with exit code 3\n", 3, [0, 3, 0]),
        (
            (
                "srun: error: n1: tasks 0,2: Killed\nsrun: error: n2: task 1: Exited with exit"
                " code 1\n"
            ),
            137,
            [-9, 1, -9],
        ),
        ("srun: error: n[1-2]: tasks 0-2: Terminated\n", 143, [-15, -15, -15]),
        ("srun: error: n1: task 0: Segmentation fault (core dumped)\n", 139, [-11, 0, 0]),
        ("srun: error: n1: task 2: Out Of Memory\n", 137, [0, 0, -9]),
        ("srun: error: Unable to create step for job 7: Invalid partition\n", 1, [1, 1, 1]),
    ],
)
def test_exit_codes_are_parsed_from_srun_messages(
    tmp_path: Path, said: str, code: int, expected: list[int]
) -> None:
    messages = tmp_path / "srun.log"
    messages.write_text(said)
    process = subprocess.Popen(["bash", "-c", f"exit {code}"])
    process.wait()
    ranks = [
        TaskRank("trainer", rank, tmp_path / f"{rank}.log", 0, 0, messages) for rank in range(3)
    ]
    Step("trainer-1", process, messages, ranks).poll()
    assert [rank.exit_code for rank in ranks] == expected
    assert all(rank.ended_at is not None for rank in ranks)


@pytest.mark.parametrize(
    ("code", "is_contained", "expected"),
    [(137, True, -9), (139, True, -11), (137, False, 137), (3, True, 3), (255, True, 255)],
)
def test_exit_code_of_container_stands_for_signal(
    tmp_path: Path, code: int, is_contained: bool, expected: int
) -> None:
    messages = tmp_path / "srun.log"
    messages.write_text(f"srun: error: n1: task 0: Exited with exit code {code}\n")
    process = subprocess.Popen(["bash", "-c", f"exit {code}"])
    process.wait()
    rank = TaskRank("trainer", 0, tmp_path / "0.log", 0, 0, messages)
    Step("trainer-1", process, messages, [rank], is_contained).poll()
    assert rank.exit_code == expected


def test_rank_end_times_follow_srun_messages(tmp_path: Path) -> None:
    messages = tmp_path / "srun.log"
    messages.write_text(
        "srun: error: n2: task 1: Exited with exit code 3\nsrun: error: n1: task 0: Terminated\n"
    )
    process = subprocess.Popen(["sleep", "30"])
    ranks = [
        TaskRank("trainer", rank, tmp_path / f"{rank}.log", 0, 0, messages) for rank in range(3)
    ]
    Step("trainer-1", process, messages, ranks).poll()
    process.kill()
    process.wait()
    assert (
        ranks[1].ended_at is not None
        and ranks[0].ended_at is not None
        and ranks[1].ended_at < ranks[0].ended_at
    )
    assert ranks[2].exit_code is None


def test_allocation_outside_a_slurm_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AlignerError, match="SLURM_JOB_ID is not set"):
        read_allocation(compute_job_layout(config(tmp_path)), {})


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("srun: error: n2: task 1: Exited with exit code 3\nsrun: Terminating StepId=7.0\n", ""),
        ("srun: error: Unable to create step for job 7: Invalid partition\n", "Invalid partition"),
        ("srun: error: n2: task 1: Terminated\nsrun: Force Terminated StepId=7.0\n", ""),
        (
            (
                "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME"
                " LIMIT ***\n"
            ),
            "TIME LIMIT",
        ),
        ("srun: error: n1: task 2: Out Of Memory\n", "task 2: Out Of Memory"),
    ],
)
def test_other_srun_messages_are_added_to_rank_error(tmp_path: Path, said: str, told: str) -> None:
    messages, log = tmp_path / "srun.log", tmp_path / "0.log"
    messages.write_text(said)
    log.touch()
    error = build_rank_error("prepare rank 0 ended", TaskRank("prepare", 0, log, 0, 0, messages))
    message = str(error)
    assert ("srun reported" in message) == bool(told)
    assert told in message and told in error.summary
    assert message.endswith(f"last lines of its log:\n  (its log is empty)\nlog: {log}")


def set_task_environment(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, chosen: str | None
) -> None:
    """Set the environment variables of a Slurm task in this process."""
    given = {
        IS_TASK: "1",
        "SLURM_PROCID": "9",
        "SLURM_LOCALID": "1",
        "CUDA_VISIBLE_DEVICES": visible,
        DEVICES: chosen,
    }
    for name, value in {**given, "RANK": "", "LOCAL_RANK": ""}.items():
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("visible", "chosen", "seen"),
    [
        (None, "6,7", "6,7"),
        ("0,1,2,3,4,5,6,7", "6,7", "6,7"),
        ("GPU-a,GPU-b,GPU-c", "0,2", "GPU-a,GPU-c"),
        ("4,5", None, "4,5"),
    ],
)
def test_task_sees_devices_of_its_role(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, chosen: str | None, seen: str
) -> None:
    set_task_environment(monkeypatch, visible, chosen)
    adopt_environment()
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"]) == (
        "9",
        "1",
        seen,
    )


def test_task_refuses_job_step_without_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    set_task_environment(monkeypatch, "0,1", "6,7")
    with pytest.raises(
        AlignerError,
        match="devices 6,7 of its node, but Slurm gave its job step only CUDA_VISIBLE_DEVICES=0,1;",
    ):
        adopt_environment()


def test_failed_slurm_command_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "echo x >> $0.calls; [ $(wc -l < $0.calls) -ge 2 ] || { echo busy >&2; exit 1; }; echo done"
    )
    stand_in(tmp_path, monkeypatch, "squeue", script)
    with pytest.raises(AlignerError, match="squeue: busy"):
        slurm_command("squeue")
    (tmp_path / "squeue.calls").unlink()
    assert slurm_command("squeue", attempts=2) == "done"


def test_requeue_of_pending_job_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(
        tmp_path,
        monkeypatch,
        "scontrol",
        "echo 'Job is pending execution for job 7' >&2; echo x >> $0.calls; exit 1",
    )
    assert (
        slurm_command(
            "scontrol",
            "requeue",
            "7",
            attempts=RETRY_ATTEMPTS,
            success_text="Job is pending execution",
        )
        == ""
    )
    assert (tmp_path / "scontrol.calls").read_text() == "x\n"
    with pytest.raises(AlignerError, match="Job is pending execution"):
        slurm_command("scontrol", "requeue", "7")


def test_rejected_job_leaves_run_directory_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = (
        '[ "$1" = --test-only ] || { echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit'
        " 1; }"
    )
    stand_in(tmp_path, monkeypatch, "sbatch", refuses)
    stand_in(tmp_path, monkeypatch, "squeue", "")
    given = ["experiment=tiny_ppo", "cluster=slurm", f"run.dir={tmp_path}/run"]
    with pytest.raises(
        ConfigError, match="Slurm rejected the job: sbatch: QOSMaxSubmitJobPerUserLimit"
    ):
        submit(plan_run(compose_config(given)))
    assert not (tmp_path / "run").exists()
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    for _ in range(2):
        with pytest.raises(ConfigError, match="QOSMaxSubmitJobPerUserLimit"):
            submit(plan_run(compose_config(given)))
        assert not [*paths.root.iterdir()]
    (paths.checkpoints / "step_1").mkdir(parents=True)
    (paths.checkpoints / "step_1" / "manifest.json").write_text("{}")
    save_config(compose_config(given), paths.config)
    paths.job_script.write_text("as it was")
    before, files = paths.config.read_text(), {*paths.root.iterdir()}
    with pytest.raises(ConfigError, match="QOSMaxSubmitJobPerUserLimit"):
        submit(plan_run(compose_config([*given, "run.resume=true", "run.steps=99"])))
    assert (paths.config.read_text(), paths.job_script.read_text()) == (before, "as it was")
    assert {*paths.root.iterdir()} == files


ACCEPTS = '[ "$1" = --test-only ]'


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ("exec sleep 60", r"sbatch --parsable \S+/run/job.sh: no answer within 0.5 s"),
        (
            (
                'echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv'
                ' operation" >&2; exit 1'
            ),
            "sbatch: Batch job submission failed: Socket timed out on send/recv operation",
        ),
    ],
)
def test_uncertain_submission_keeps_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: str, said: str
) -> None:
    stand_in(tmp_path, monkeypatch, "sbatch", f"{ACCEPTS} || {{ {answers}; }}")
    stand_in(tmp_path, monkeypatch, "squeue", "")
    monkeypatch.setattr(submitting, "_SUBMIT_TIMEOUT_S", 0.5)
    given = ["experiment=tiny_ppo", "cluster=slurm", f"run.dir={tmp_path}/run", "run.name=mine"]
    message = (
        f"{said}: it is unknown whether the job was queued. Check with `squeue --me --name=mine`"
    )
    with pytest.raises(AlignerError, match=message):
        submit(plan_run(compose_config(given)))
    paths = RunPaths(tmp_path / "run")
    assert all(
        path.exists() for path in (paths.config, paths.job_script, paths.access_key, paths.logs)
    )
    stand_in(tmp_path, monkeypatch, "sbatch", "echo 7")
    submit(plan_run(compose_config([*given, "run.resume=auto"])))


@pytest.mark.parametrize(
    ("waits", "said", "is_kept"),
    [
        ("--test-only", "interrupted", False),
        (
            "--parsable",
            (
                "interrupted: it is unknown whether the job was queued. Check with `squeue --me"
                " --name=run`; if the job is not queued, launch again with run.resume=auto"
            ),
            True,
        ),
    ],
)
def test_interrupted_submission_prints_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: str, said: str, is_kept: bool
) -> None:
    stand_in(
        tmp_path,
        monkeypatch,
        "sbatch",
        f'[ "$1" != {waits} ] || {{ touch "$0.asked"; exec sleep 60; }}',
    )
    stand_in(tmp_path, monkeypatch, "squeue", "")
    command = [
        sys.executable,
        "-m",
        "aligner",
        "launch",
        "experiment=tiny_ppo",
        "cluster=slurm",
        f"run.dir={tmp_path}/run",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "sbatch.asked").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (130, f"aligner: error: {said}\n")
    assert (tmp_path / "run" / "config.yaml").exists() == (tmp_path / "run").exists() == is_kept


def test_nested_submission_drops_slurm_job_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "sbatch", 'env > "$0.env"; echo 7')
    stand_in(tmp_path, monkeypatch, "squeue", "")
    monkeypatch.setenv("SLURM_CPU_BIND", "mask_cpu:0x1")
    monkeypatch.setenv("SLURM_CONF", "here")
    submit(
        plan_run(
            compose_config(["experiment=tiny_ppo", "cluster=slurm", f"run.dir={tmp_path}/run"])
        )
    )
    seen = (tmp_path / "sbatch.env").read_text().splitlines()
    assert "SLURM_CONF=here" in seen and not [
        line for line in seen if line.startswith("SLURM_CPU_BIND")
    ]


def test_job_script_is_checked_before_it_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "sbatch", f'{ACCEPTS} && cp "$2" "$0.checked"; echo 7')
    stand_in(tmp_path, monkeypatch, "squeue", "")
    given = ["experiment=tiny_ppo", "cluster=slurm", f"run.dir={tmp_path}/run"]
    submit(plan_run(compose_config(given)))
    queued = RunPaths(tmp_path / "run").job_script
    assert (tmp_path / "sbatch.checked").read_text() == queued.read_text()


@pytest.mark.parametrize(
    ("cluster", "code", "told"),
    [
        (
            "local",
            2,
            "cluster.kind=local: must be slurm, kubernetes or skypilot; start this run with"
            " `aligner launch`",
        ),
        (
            "slurm",
            1,
            "SLURM_JOB_ID is not set: `aligner supervise` must be called by the script of a Slurm"
            " job",
        ),
    ],
)
def test_supervise_outside_a_slurm_job_is_refused(
    tmp_path: Path, cluster: str, code: int, told: str
) -> None:
    composed = compose_config(
        ["experiment=tiny_ppo", f"cluster={cluster}", f"run.dir={tmp_path}/run"]
    )
    (tmp_path / "run").mkdir()
    save_config(composed, tmp_path / "run" / "config.yaml")
    ended = subprocess.run(
        [sys.executable, "-m", "aligner", "supervise", f"{tmp_path}/run"],
        env={name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == code and told in ended.stderr


def test_log_path_escapes_percent_of_run_directory(tmp_path: Path) -> None:
    script = render_script(config(tmp_path / "50%j off", "run.name=name"))
    assert f"#SBATCH --output='{tmp_path}/50%%j off/run/logs/job-%j.log'" in script


@pytest.mark.parametrize(
    ("name", "image", "problem"),
    [
        ("a\\b", (), "must not contain a backslash with cluster=slurm"),
        ("a:b", ("cluster.slurm.image=IMAGE",), "must not contain a colon or a comma"),
        ("a,b", ("cluster.slurm.image=IMAGE",), "must not contain a colon or a comma"),
    ],
)
def test_characters_that_slurm_cannot_use_are_refused(
    tmp_path: Path, name: str, image: tuple[str, ...], problem: str
) -> None:
    given = config(tmp_path / name, "run.name=name", *image)
    (found,) = [text for text in find_problems(given, None, NOTHING_EXPECTED) if "run.dir" in text]
    assert problem in found
