"""Tests of SkyPilot task files and their submission."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from aligner.checks.cluster import find_problems
from aligner.config.compose import compose_config
from aligner.config.prerequisites import plan_run
from aligner.errors import AlignerError, ConfigError
from aligner.launcher.job_submission import render_preview, submit
from aligner.launcher.nodes.node_list import read_node_list
from aligner.launcher.skypilot.task_file import build_task, render_task
from aligner.placement.job_layout import compute_job_layout
from aligner.schema import Config
from tests.launcher.stand_ins import stand_in

# A Python environment in which SkyPilot is installed.
PYTHON = os.environ.get("ALIGNER_SKYPILOT_PYTHON")
EVERYTHING = (
    "actor.parallel.data=16",
    "cluster.skypilot.infra=aws/us-east-1",
    "cluster.skypilot.accelerator=H100",
    "cluster.skypilot.image='docker:registry/aligner:1'",
    "cluster.skypilot.cpus=32+",
    "cluster.skypilot.memory_gib=512+",
    "cluster.skypilot.use_spot=true",
    "cluster.skypilot.secrets=[WANDB_API_KEY, TOKEN]",
    "+cluster.skypilot.environment={HF_TOKEN: '${oc.env:TOKEN}'}",
    "cluster.skypilot.setup=['pip install aligner']",
    "cluster.skypilot.roles.reward.shares_nodes_with=trainer",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNER_CACHE", f"{tmp_path}/cache")
    monkeypatch.setenv("TOKEN", "hunter2")


def config(tmp_path: Path, *overrides: str) -> Config:
    return compose_config(
        [
            "experiment=tiny_ppo",
            "cluster=skypilot",
            f"+cluster.skypilot.volumes={{{tmp_path}: shared}}",
            f"run.dir={tmp_path}/run",
            *overrides,
        ]
    )


def test_task_has_the_nodes_of_all_roles(tmp_path: Path) -> None:
    task = build_task(config(tmp_path, *EVERYTHING))
    assert task["num_nodes"] == 3  # two of the trainer, one of the critic
    assert task["resources"] == {
        "infra": "aws/us-east-1",
        "accelerators": "H100:8",
        "cpus": "32+",
        "memory": "512+",
        "image_id": "docker:registry/aligner:1",
        "use_spot": True,
        "job_recovery": {"recover_on_exit_codes": [75]},
    }
    assert task["volumes"] == {str(tmp_path): "shared"}
    assert task["secrets"] == {"WANDB_API_KEY": None, "TOKEN": None}


def test_task_contains_no_secret_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-shell")
    text = render_task(config(tmp_path, *EVERYTHING))
    assert "hunter2" not in text and "secret-of-the-shell" not in text


@pytest.mark.parametrize("rank", [0, 2])
def test_run_commands_set_the_node_from_skypilot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    made = config(tmp_path, *EVERYTHING)
    stand_in(tmp_path, monkeypatch, "aligner", 'echo "$@"; env > "$0.env"')
    monkeypatch.setenv("SKYPILOT_NODE_IPS", "10.0.0.1\n10.0.0.2\n10.0.0.3")
    monkeypatch.setenv("SKYPILOT_NODE_RANK", str(rank))
    ended = subprocess.run(
        ["bash", "-c", build_task(made)["run"]], capture_output=True, text=True, check=True
    )
    assert ended.stdout == f"supervise {tmp_path}/run\n"
    lines = (tmp_path / "aligner.env").read_text().splitlines()
    variables = dict(line.partition("=")[::2] for line in lines)
    nodes = read_node_list(compute_job_layout(made), variables)
    assert (nodes.index, nodes.addresses) == (rank, ("10.0.0.1", "10.0.0.2", "10.0.0.3"))


@pytest.mark.skipif(PYTHON is None, reason="ALIGNER_SKYPILOT_PYTHON: not set to a Python")
@pytest.mark.parametrize("overrides", [(), EVERYTHING])
def test_skypilot_accepts_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x")
    file = tmp_path / "task.yaml"
    file.write_text(render_task(config(tmp_path, *overrides)))
    code = (
        "import json, sys, sky; task = sky.Task.from_yaml(sys.argv[1]);"
        " print(json.dumps([task.name, task.num_nodes]))"
    )
    read = subprocess.run([str(PYTHON), "-c", code, str(file)], capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    assert json.loads(read.stdout) == ["run", 3]
    file.write_text(file.read_text() + "nodes: 1\n")
    refused = subprocess.run([str(PYTHON), "-c", code, str(file)], capture_output=True, text=True)
    assert refused.returncode != 0 and "nodes" in refused.stderr


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["cluster.skypilot.infra=aws us"], "cluster.skypilot.infra=aws us: must be CLOUD"),
        (
            ["cluster.skypilot.accelerator='H100:8'"],
            "cluster.skypilot.accelerator=H100:8: must be the type of a GPU without a number",
        ),
        (["cluster.skypilot.cpus=many"], "cluster.skypilot.cpus=many: must be a number"),
        (["cluster.skypilot.secrets=[A-B]"], "cluster.skypilot.secrets: A-B: must be the name"),
        (["run.dir=/elsewhere/run"], "run.dir=/elsewhere/run: is not on a volume of the job"),
        (["server.interface=127.0.0.1"], "must be 0.0.0.0 with cluster=skypilot"),
    ],
)
def test_invalid_skypilot_setting_is_refused(
    tmp_path: Path, overrides: list[str], problem: str
) -> None:
    assert problem in "\n".join(find_problems(config(tmp_path, *overrides), None, {}))


def test_dry_launch_prints_the_task(tmp_path: Path) -> None:
    plan = plan_run(config(tmp_path))
    assert yaml.safe_load(render_preview(plan)) == build_task(plan.config)


def test_launch_submits_a_managed_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = 'case "$1$2" in jobslaunch) echo "$@" > "$0.asked"; echo "Job ID: 42";; esac'
    stand_in(tmp_path, monkeypatch, "sky", answers)
    monkeypatch.setenv("WANDB_API_KEY", "x")
    submit(plan_run(config(tmp_path, "cluster.skypilot.secrets=[WANDB_API_KEY]")))
    arguments = (
        f"jobs launch --yes --detach-run --secret WANDB_API_KEY {tmp_path}/run/skypilot.yaml"
    )
    assert (tmp_path / "sky.asked").read_text() == f"{arguments}\n"
    printed = capsys.readouterr().out
    assert "job 42\n" in printed and "sky jobs cancel --name run" in printed


def test_missing_secret_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "sky", "")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="WANDB_API_KEY is not set in the environment"):
        submit(plan_run(config(tmp_path, "cluster.skypilot.secrets=[WANDB_API_KEY]")))


def test_active_job_with_the_same_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "sky", 'echo "42  -  run  1x[H100:8]  RUNNING"')
    with pytest.raises(ConfigError, match=r"run\.name=run: SkyPilot already has an active job"):
        submit(plan_run(config(tmp_path)))
    assert not (tmp_path / "run").exists()


def test_rejected_task_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "sky", '[ "$2" != launch ] || { echo "no H100" >&2; exit 1; }')
    with pytest.raises(AlignerError, match="SkyPilot rejected the run: sky: no H100"):
        submit(plan_run(config(tmp_path)))
    assert not (tmp_path / "run").exists()


def test_missing_skypilot_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"cluster\.kind=skypilot: requires sky; install"):
        submit(plan_run(config(tmp_path)))
