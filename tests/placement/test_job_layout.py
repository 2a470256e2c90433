"""Slurm layouts: nodes and devices of roles, checks, the submit script."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.checks import cluster
from aligner.config.compose import compose_config
from aligner.config.conf_files import find_built_in_directory
from aligner.errors import ConfigError
from aligner.placement.job_layout import RolePlacement, compute_job_layout
from aligner.placement.roles import count_role_ranks
from aligner.schema import Config
from aligner.schema.keys import with_values

NODES = "cluster.slurm.roles"
SCRIPTS = find_built_in_directory().parent / "launcher_scripts"
REPLICAS_OF_4 = ("engine=tensorrt_llm", "engine.parallel.tensor=4", "engine.parallel.data=2")


def layout(*overrides: str):
    return compute_job_layout(compose_config(["experiment=tiny_ppo", "cluster=slurm", *overrides]))


def problems(*overrides: str) -> str:
    return "\n".join(
        cluster.find_problems(
            compose_config(["experiment=tiny_ppo", "cluster=slurm", *overrides]), None, {}
        )
    )


def test_roles_get_enough_nodes_trainer_first() -> None:
    found = layout("actor.parallel.data=16", "critic.parallel.data=4", "reward.replicas=2")
    assert [(part.role, part.nodes, part.ranks_per_node) for part in found.components] == [
        ("trainer", 2, 8),
        ("critic", 1, 4),
        ("reward", 1, 2),
    ]
    assert found.placements["trainer"] == RolePlacement(0, 0, 2, 8, None)
    assert found.placements["reward.1"] == RolePlacement(2, 0, 1, 1, (1,))


def test_layout_is_described_as_nodes_times_gpus() -> None:
    described = layout(
        "cluster.slurm.roles.trainer.devices=0-7", "actor.parallel.data=16"
    ).describe()
    assert "trainer: 2 nodes \N{MULTIPLICATION SIGN} 8 GPUs" in described
    assert "reward: 1 node without GPUs" in described


def test_role_without_gpus_requests_no_devices() -> None:
    assert [part.devices_per_node for part in layout("critic.parallel.data=4").components] == [
        1,
        4,
        0,
    ]
    assert [part.devices_per_node for part in layout("cluster.slurm.gpus=none").components] == [
        0,
        0,
        0,
    ]


def test_roles_share_nodes_by_ranges_of_devices() -> None:
    found = layout(
        *("actor.parallel.data=6", f"{NODES}.trainer.devices=0-5", "critic.parallel.data=2"),
        *(f"{NODES}.critic.shares_nodes_with=trainer", f"{NODES}.critic.devices=6-7"),
    )
    assert [
        (part.role, part.nodes, part.ranks_per_node, part.devices_per_node)
        for part in found.components
    ] == [
        ("trainer", 1, 8, 8),
        ("reward", 1, 1, 0),
    ]
    assert found.placements["trainer"].devices == (0, 1, 2, 3, 4, 5)
    assert found.placements["critic"] == RolePlacement(0, 0, 1, 2, (6, 7))


def test_function_on_trainer_nodes_uses_no_device() -> None:
    found = layout(
        "algorithm=grpo",
        "actor.parallel.data=16",
        "engine.parallel.data=16",
        f"{NODES}.reward.shares_nodes_with=trainer",
    )
    assert [
        (part.nodes, part.ranks_per_node, part.devices_per_node) for part in found.components
    ] == [(2, 9, 8)]
    assert found.placements["trainer"] == RolePlacement(0, 0, 2, 8, None)
    assert found.placements["reward"] == RolePlacement(0, 0, 1, 1, None)


def test_homogeneous_job_has_one_component() -> None:
    found = layout("cluster.slurm.heterogeneous=false", "actor.parallel.data=16")
    assert [(part.nodes, part.ranks_per_node) for part in found.components] == [(4, 8)]
    assert [found.placements[role].node_range for role in ("trainer", "critic", "reward")] == [
        range(2),
        range(2, 3),
        range(3, 4),
    ]


@functools.cache
def plain() -> Config:
    return compose_config(["experiment=tiny_ppo", "cluster=slurm"])


@settings(max_examples=300, deadline=None)
@given(
    trainer=st.sampled_from([1, 2, 4, 8, 16, 32]),
    critic=st.sampled_from([1, 2, 8, 16]),
    replicas=st.integers(1, 5),
    slots=st.sampled_from([1, 2, 4, 8]),
    heterogeneous=st.booleans(),
)
def test_ranks_per_node_do_not_exceed_devices(
    trainer: int, critic: int, replicas: int, slots: int, heterogeneous: bool
) -> None:
    config = with_values(
        plain(),
        {
            "cluster.devices_per_node": slots,
            "cluster.slurm.heterogeneous": heterogeneous,
            "reward.replicas": replicas,
            "actor.parallel.data": trainer,
            "critic.parallel.data": critic,
        },
    )
    found = compute_job_layout(config)
    loads: dict[tuple[int, int], int] = {}
    for group, ranks in count_role_ranks(config).items():
        place = found.placements[group]
        assert place.nodes * place.ranks_per_node == ranks
        for node in place.node_range:
            assert node < found.components[place.component].nodes
            loads[place.component, node] = (
                loads.get((place.component, node), 0) + place.ranks_per_node
            )
    assert max(loads.values()) <= slots
    assert len(loads) == sum(
        part.nodes for part in found.components
    )  # every requested node is used


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["actor.parallel.data=9"],
            (
                "cluster.slurm.roles.trainer.nodes=null: 9 ranks cannot be distributed evenly"
                " over nodes with 8 devices"
            ),
        ),
        (
            ["actor.parallel.data=4", f"{NODES}.trainer.nodes=3"],
            "cluster.slurm.roles.trainer.nodes=3: 4 ranks cannot be distributed",
        ),
        (
            ["actor.parallel.data=32", f"{NODES}.trainer.nodes=2"],
            "cluster.slurm.roles.trainer.nodes=2: 32 ranks cannot be distributed",
        ),
        (
            [f"{NODES}.critic.shares_nodes_with=critic"],
            (
                "cluster.slurm.roles.critic.shares_nodes_with=critic: must be another role whose"
                " own `shares_nodes_with` is null"
            ),
        ),
        (
            [f"{NODES}.critic.shares_nodes_with=generator"],
            (
                "roles.critic.shares_nodes_with=generator: the run has no such role; must be one"
                " of trainer, critic, reward"
            ),
        ),
        (
            [f"{NODES}.critic.shares_nodes_with=trainer", f"{NODES}.critic.nodes=1"],
            "which places the role on the nodes of trainer; remove",
        ),
        (
            [f"{NODES}.critic.shares_nodes_with=trainer"],
            "cluster.slurm.roles.trainer.devices=null: must list devices",
        ),
        (
            [f"{NODES}.trainer.devices=0-8"],
            "cluster.slurm.roles.trainer.devices=0-8: must list different devices from 0 to 7",
        ),
        (
            [f"{NODES}.trainer.devices=0-300000000000"],
            (
                "cluster.slurm.roles.trainer.devices=0-300000000000: must list different devices"
                " from 0 to 7"
            ),
        ),
        (
            [f"{NODES}.trainer.devices=3-0"],
            "cluster.slurm.roles.trainer.devices=3-0: must list different devices from 0 to 7",
        ),
        (
            [f"{NODES}.trainer.devices=a"],
            "cluster.slurm.roles.trainer.devices=a: must be a list of numbers and ranges",
        ),
        (
            [
                f"{NODES}.critic.shares_nodes_with=trainer",
                f"{NODES}.critic.devices='0'",
                f"{NODES}.trainer.devices='0'",
            ],
            "cluster.slurm.roles.critic.devices=0: device 0 already belongs to trainer",
        ),
        (["cluster.slurm.time=soon"], "cluster.slurm.time=soon: must be minutes"),
        (["cluster.slurm.image=/nowhere.sqsh"], "cluster.slurm.image=/nowhere.sqsh: no such file"),
        (
            ["cluster.slurm.image='a b'"],
            "cluster.slurm.image=a b: must be a file or the name of an image",
        ),
        (
            ["cluster.slurm.image=a:1", "cluster.slurm.mounts=[/nowhere:/data]"],
            "/nowhere:/data: /nowhere does not exist",
        ),
        (
            ["cluster.slurm.image=a:1", "cluster.slurm.mounts=[/tmp]"],
            (
                "cluster.slurm.mounts: expected SOURCE:TARGET[:FLAGS] with an absolute TARGET,"
                " got /tmp"
            ),
        ),
        (
            [*REPLICAS_OF_4, "actor.parallel.data=8", "cluster.devices_per_node=2"],
            (
                "engine.parallel.tensor=4: a replica of engine.kind=tensorrt_llm must fit on one"
                " node, but the trainer has 2 ranks on each of 4 nodes (cluster.devices_per_node);"
                " set more ranks per node, or set engine.parallel.tensor to a divisor of 2"
            ),
        ),
        (
            [*REPLICAS_OF_4, "actor.parallel.data=8", f"{NODES}.trainer.devices=0-1"],
            "the trainer has 2 ranks on each of 4 nodes (cluster.slurm.roles.trainer.devices)",
        ),
        (
            [
                *REPLICAS_OF_4,
                "engine.placement=server",
                "engine.sleep=false",
                f"{NODES}.generator.nodes=8",
            ],
            "the generator has 1 ranks on each of 8 nodes (cluster.slurm.roles.generator.nodes)",
        ),
    ],
)
def test_invalid_slurm_setting_is_refused(overrides: list[str], problem: str) -> None:
    run = ["run.dir=/tmp/never-made"]
    assert problem in problems(*run, *overrides)


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (["engine.parallel.tensor=4", "engine.parallel.data=2"], ""),
        (["engine.parallel.pipeline=4", "engine.parallel.data=2"], ""),
        (["engine.parallel.tensor=1", "engine.parallel.data=8"], ""),
        (
            ["engine.parallel.pipeline=3", "engine.parallel.data=4", "actor.parallel.data=12"],
            "engine.parallel: a replica of engine.kind=vllm has 3 ranks (tensor=1 x pipeline=3),"
            " which must divide the trainer's 2 ranks on a node (cluster.devices_per_node), or be a"
            " multiple of them",
        ),
        (
            ["engine.parallel.pipeline=4", "engine.parallel.data=2", "cluster.slurm.gpus=none"],
            "the trainer has 2 ranks on each of 4 nodes; on CPUs, vLLM 0.32 supports a replica on"
            " several nodes only with one rank on each",
        ),
    ],
)
def test_vllm_replica_uses_whole_nodes_or_a_part_of_one(layout: list[str], problem: str) -> None:
    trainer = ["actor.parallel.data=8", "cluster.devices_per_node=2"]
    found = problems("run.dir=/tmp/never-made", "engine=vllm", *trainer, *layout)
    assert problem in found if problem else "a replica of engine.kind=vllm" not in found


def test_unmounted_data_path_is_refused(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    given = (
        f"run.dir={tmp_path}/run",
        "cluster.slurm.image='REGISTRY#NAME:1'",
        f"data.path={prompts}",
    )
    assert f"data.path={prompts}: is not visible in the container" in problems(*given)
    assert problems(*given, f"cluster.slurm.mounts=[{tmp_path}:{tmp_path}:ro]") == ""


def test_every_path_of_the_run_must_be_mounted(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    (tmp_path / "judge").mkdir()
    message = problems(
        *(f"run.dir={tmp_path}/run", "cluster.slurm.image='REGISTRY#NAME:1'", "reward=combined"),
        *(f"+data.sources.mine.path={prompts}", f"evaluation.path={prompts}", "evaluation.every=1"),
        f"+reward.sources.judge={{kind: model, path: {tmp_path}/judge}}",
    )
    for key, path in (
        ("data.sources.mine.path", prompts),
        ("evaluation.path", prompts),
        ("reward.sources.judge.path", tmp_path / "judge"),
    ):
        assert f"{key}={path}: is not visible in the container" in message


def test_replica_within_node_or_embedded_is_accepted() -> None:
    given = ("run.dir=/tmp/never-made", *REPLICAS_OF_4, "actor.parallel.data=8")
    assert problems(*given, "cluster.devices_per_node=4") == ""
    assert problems(*given, "cluster.devices_per_node=2", "engine=embedded") == ""


def submit_script_arguments(tmp_path: Path, cluster: Path) -> list[str]:
    """Run the submit script with a cluster file; return its arguments of `aligner`."""
    command = tmp_path / "aligner"
    command.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    command.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ALIGNER_CLUSTER": str(cluster)}
    called = ["bash", SCRIPTS / "submit_slurm.sh", "tiny_ppo", "run.name=mine"]
    return subprocess.run(
        called, env=environment, check=True, capture_output=True, text=True
    ).stdout.splitlines()


def test_submit_script_forwards_cluster_settings(tmp_path: Path) -> None:
    given = submit_script_arguments(tmp_path, SCRIPTS / "clusters/example_h100.sh")
    assert given[0] == "launch"
    config = compose_config(given[1:])
    assert config.cluster.slurm.sbatch == ["--exclusive", "--mem=0"]
    assert (config.cluster.slurm.partition, config.cluster.device_memory_gib, config.run.name) == (
        "gpu",
        76,
        "mine",
    )


def test_submit_script_keeps_special_characters(tmp_path: Path) -> None:
    flags = [
        "--comment=it's a test",
        "--comment=two 'words'",
        r"--comment=a\b \' c\\",
        "--comment=a,b=[c]",
        '--comment="d"',
    ]
    cluster = tmp_path / "cluster.sh"
    cluster.write_text(
        f"SLURM_SBATCH=({' '.join(map(shlex.quote, flags))})\nSLURM_CONSTRAINT={shlex.quote(flags[0])}\n"
    )
    slurm = compose_config(submit_script_arguments(tmp_path, cluster)[1:]).cluster.slurm
    assert (slurm.sbatch, slurm.constraint) == (flags, flags[0])


def test_invalid_layout_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="9 ranks cannot be distributed evenly"):
        layout("actor.parallel.data=9")
