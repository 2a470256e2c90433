"""Files in conf/: group options and llama3 recipes; for experiments see `test_dry_run.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.config.conf_files import find_built_in_directory
from aligner.config.prerequisites import plan_run
from aligner.errors import ConfigError
from aligner.launcher.slurm.submit import render_script
from aligner.models.model_source import absent_inputs
from aligner.models.shape import ModelShape
from aligner.placement.memory.role_memory import compute_role_memory

ENTRIES = sorted(
    (file.parent.name, file.stem) for file in find_built_in_directory().glob("*/*.yaml")
)
RECIPES = [name for group, name in ENTRIES if group == "experiment" and name.startswith("llama3_")]

# Overrides that an option requires for a valid run.
WITH = {
    **{
        ("algorithm", name): ["data.path=preferences.jsonl"]
        for name in ("dpo", "simpo", "orpo", "rpo", "kto", "reward_model")
    },
    ("algorithm", "sft"): ["data=sum_demonstrations"],
    ("algorithm", "teacher_scores"): ["data=sum_demonstrations"],
    ("algorithm", "on_policy_distillation"): [
        "run.dir=/absent/run",
        "teacher.path=/absent/run/initial_model",
    ],
    ("data", "sum_demonstrations"): ["algorithm=sft"],
    ("engine", "tensorrt_llm"): ["cluster=slurm"],
    ("engine", "vllm"): ["cluster=slurm"],  # on CPUs, vLLM does not support this model's head size
    ("cluster", "kubernetes"): [
        "cluster.kubernetes.image=image:1",
        "cluster.kubernetes.volumes=['root:/']",
    ],
    ("cluster", "skypilot"): ["+cluster.skypilot.volumes={/: root}"],
    ("reward", "judge"): ["reward.judge_url=http://127.0.0.1:9/v1", "reward.judge_model=judge"],
    ("reward", "remote"): ["reward.url=http://127.0.0.1:9/get_reward"],
}


@pytest.mark.parametrize(
    ("group", "name"),
    [pytest.param(*entry, id="=".join(entry)) for entry in ENTRIES if entry[0] != "experiment"],
)
def test_every_group_option_makes_a_valid_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "preferences.jsonl").write_text(
        json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n"
    )
    plan = plan_run(
        compose_config(["experiment=tiny_ppo", f"{group}={name}", *WITH.get((group, name), [])])
    )
    assert plan.check(absent_inputs(plan.config)).num_layers > 0


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_leaves_4_gib_of_device_memory(name: str) -> None:
    config = compose_config([f"experiment={name}"])
    expected = absent_inputs(config)
    shape = check(config, expected)
    limit = config.cluster.device_memory_gib
    assert limit is not None
    for role in compute_role_memory(config, shape, expected):
        # The limit already excludes the GPU's context and communication buffers. The margin of
        # 4 GiB is for fragmentation, which the estimate does not include.
        assert role.peak.total < (limit - 4) * 2**30, role


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_timeouts_are_consistent(name: str) -> None:
    config = compose_config([f"experiment={name}"])
    server, cluster = config.server, config.cluster
    assert server.start_timeout_s >= config.engine.tensorrt_llm.timeout_s
    # While rank 0 of the trainer waits for a server, the other ranks wait in a collective.
    assert cluster.collective_timeout_s > max(server.start_timeout_s, server.request_timeout_s)
    assert 0 < config.checkpoint.every <= config.run.steps // 10
    assert cluster.slurm.grace_s >= 900


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_requests_exclusive_nodes(name: str) -> None:
    script = render_script(compose_config([f"experiment={name}"]))
    assert (
        script.count("#SBATCH --exclusive\n")
        == script.count("#SBATCH --mem=0\n")
        == script.count("#SBATCH --nodes=")
    )


def test_8b_recipe_requests_a_single_node() -> None:
    script = render_script(compose_config(["experiment=llama3_8b_grpo"]))
    resources = [
        line
        for line in script.splitlines()
        if line.startswith(("#SBATCH --nodes", "#SBATCH --gpus", "#SBATCH hetjob"))
    ]
    assert resources == ["#SBATCH --nodes=1", "#SBATCH --gpus-per-node=8"]


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_without_model_and_data_files_is_refused(name: str) -> None:
    config = compose_config([f"experiment={name}"])
    with pytest.raises(ConfigError) as caught:
        check(config)
    problems = str(caught.value).splitlines()
    assert f"model.path={config.model.path}: no such model directory" in problems
    assert "data.path=data/prompts.jsonl: no such file" in problems
    if config.reward.kind == "model":
        assert f"reward.path={config.reward.path}: no such model directory" in problems


def test_model_directory_overrides_described_shape(tmp_path: Path) -> None:
    small = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
    }
    small |= {
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(small))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    overrides = ["experiment=llama3_8b_grpo", f"model.path={tmp_path}"]
    config = compose_config([*overrides, f"data.path={tmp_path}/prompts.jsonl"])
    assert absent_inputs(config) == {}
    assert check(config).vocab_size == 1024
    config = compose_config(overrides)
    with pytest.raises(ConfigError, match=r"^data\.path=data/prompts\.jsonl: no such file$"):
        check(config, absent_inputs(config))


def test_reward_model_shape_defaults_to_policy() -> None:
    def policy_and_reward_shapes(name: str, *overrides: str) -> tuple[ModelShape, ModelShape]:
        config = compose_config([f"experiment={name}", *overrides])
        shapes = absent_inputs(config)
        assert config.model.path is not None and config.reward.path is not None
        policy, reward = shapes[config.model.path], shapes[config.reward.path]
        assert policy is not None and reward is not None
        return policy, reward

    policy, reward = policy_and_reward_shapes("llama3_8b_ppo")
    assert policy == reward
    assert policy_and_reward_shapes("llama3_8b_ppo", "+reward.config.num_hidden_layers=16") == (
        policy,
        policy.with_layers(16),
    )
    policy, reward = policy_and_reward_shapes("llama3_405b_ppo")
    assert (policy.num_layers, reward.num_layers) == (126, 80)
    assert reward == policy_and_reward_shapes("llama3_70b_ppo")[1]
