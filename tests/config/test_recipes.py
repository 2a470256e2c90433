"""Every file in conf/: each option of each group is one that a run can be made of; experiments:
`test_dry_run.py`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from aligner.checks.check import check
from aligner.config.compose import built_in_directory, compose_config
from aligner.config.prerequisites import plan_run
from aligner.errors import ConfigError
from aligner.launcher.slurm.submit import render_script
from aligner.models.model_source import absent_inputs
from aligner.models.shape import ModelShape
from aligner.placement.memory.role_memory import memory_needs

ENTRIES = sorted((file.parent.name, file.stem) for file in built_in_directory().glob("*/*.yaml"))
RECIPES = [name for group, name in ENTRIES if group == "experiment" and name.startswith("llama3_")]

# What an option needs beside itself to make a run of it.
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
    ("engine", "vllm"): ["cluster=slurm"],  # on CPUs this model's heads are too small for it
    ("reward", "judge"): ["reward.judge_url=http://127.0.0.1:9/v1", "reward.judge_model=judge"],
    ("reward", "remote"): ["reward.url=http://127.0.0.1:9/get_reward"],
}


@pytest.mark.parametrize(
    ("group", "name"),
    [pytest.param(*entry, id="=".join(entry)) for entry in ENTRIES if entry[0] != "experiment"],
)
def test_every_option_of_every_group_makes_a_valid_run(
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
def test_a_recipe_fits_its_devices_with_room_to_spare(name: str) -> None:
    config = compose_config([f"experiment={name}"])
    described = absent_inputs(config)
    shape = check(config, described)
    limit = config.cluster.device_memory_gib
    assert limit is not None
    for role in memory_needs(config, shape, described):
        # The limit leaves a GPU's context and communication buffers out; fragments, which are not
        # counted, have room.
        assert role.peak.total < (limit - 4) * 2**30, role


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_waits_for_what_takes_long_and_loses_little(name: str) -> None:
    config = compose_config([f"experiment={name}"])
    server, cluster = config.server, config.cluster
    assert server.start_timeout_s >= config.engine.tensorrt_llm.timeout_s
    # The trainer's other ranks wait in a collective for what its first one waits for.
    assert cluster.collective_timeout_s > max(server.start_timeout_s, server.request_timeout_s)
    assert 0 < config.checkpoint.every <= config.run.steps // 10
    assert cluster.slurm.grace_s >= 900


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipes_nodes_are_its_own(name: str) -> None:
    script = render_script(compose_config([f"experiment={name}"]))
    assert (
        script.count("#SBATCH --exclusive\n")
        == script.count("#SBATCH --mem=0\n")
        == script.count("#SBATCH --nodes=")
    )


def test_what_fits_one_node_asks_for_one() -> None:
    script = render_script(compose_config(["experiment=llama3_8b_grpo"]))
    asked = [
        line
        for line in script.splitlines()
        if line.startswith(("#SBATCH --nodes", "#SBATCH --gpus", "#SBATCH hetjob"))
    ]
    assert asked == ["#SBATCH --nodes=1", "#SBATCH --gpus-per-node=8"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_does_not_start_without_its_weights(name: str) -> None:
    config = compose_config([f"experiment={name}"])
    with pytest.raises(ConfigError) as caught:
        check(config)
    problems = str(caught.value).splitlines()
    assert f"model.path={config.model.path}: no such model directory" in problems
    assert "data.path=data/prompts.jsonl: no such file" in problems
    if config.reward.kind == "model":
        assert f"reward.path={config.reward.path}: no such model directory" in problems


def test_a_directory_that_is_there_counts_and_not_what_describes_it(tmp_path: Path) -> None:
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
    there = ["experiment=llama3_8b_grpo", f"model.path={tmp_path}"]
    config = compose_config([*there, f"data.path={tmp_path}/prompts.jsonl"])
    assert absent_inputs(config) == {}
    assert check(config).vocab_size == 1024
    config = compose_config(there)
    with pytest.raises(ConfigError, match=r"^data\.path=data/prompts\.jsonl: no such file$"):
        check(config, absent_inputs(config))


def test_a_reward_models_description_is_the_policys_but_for_what_it_says_itself() -> None:
    def described(name: str, *overrides: str) -> tuple[ModelShape, ModelShape]:
        config = compose_config([f"experiment={name}", *overrides])
        shapes = absent_inputs(config)
        assert config.model.path is not None and config.reward.path is not None
        policy, reward = shapes[config.model.path], shapes[config.reward.path]
        assert policy is not None and reward is not None
        return policy, reward

    policy, reward = described("llama3_8b_ppo")
    assert policy == reward
    assert described("llama3_8b_ppo", "+reward.config.num_hidden_layers=16") == (
        policy,
        dataclasses.replace(policy, num_layers=16),
    )
    policy, reward = described("llama3_405b_ppo")
    assert (policy.num_layers, reward.num_layers) == (126, 80)
    assert reward == described("llama3_70b_ppo")[1]
