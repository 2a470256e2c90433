"""What a critic that begins from a model of its own must fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.models import hub
from aligner.models.model_source import NORMALIZATION, absent_inputs, critic_shape
from aligner.placement.memory.role_memory import memory_needs
from aligner.placement.placement_table import placements
from aligner.placement.roles import describe_model
from aligner.schema import Config
from aligner.schema.keys import with_values

JUDGE = {
    "architectures": ["LlamaForSequenceClassification"],
    "num_labels": 1,
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


def judge(directory: Path, **entries: Any) -> Path:
    (directory / "judge").mkdir()
    (directory / "judge" / "config.json").write_text(json.dumps({**JUDGE, **entries}))
    return directory / "judge"


def composed(directory: Path, *overrides: str) -> Config:
    return compose_config(["experiment=tiny_ppo", f"run.dir={directory / 'run'}", *overrides])


def refused(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config)
    return str(caught.value)


def test_a_name_of_the_hub_stands_for_its_directory_as_it_does_for_the_reward_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "find_model", lambda name, key, weights: tmp_path / name)
    named = composed(
        tmp_path, "critic.path=org/judge", "reward.kind=model", "reward.path=org/judge"
    )
    found = hub.with_found_models(with_values(named, {"model.config": {}}), weights=False)
    assert found.critic.path == found.reward.path == str(tmp_path / "org" / "judge")


def test_its_shape_is_that_models_in_layout_memory_and_description(tmp_path: Path) -> None:
    path = judge(tmp_path)
    config = composed(tmp_path, f"critic.path={path}")
    policy = check(config)
    assert (policy.num_layers, critic_shape(config, policy).num_layers) == (4, 3)
    assert "critic: 3 layers" in describe_model(config, policy)
    assert {place.role: place.runs for place in placements(config)}[
        "critic"
    ] == f"value model, from {path}"
    begun, plain = (
        next(role for role in memory_needs(chosen, policy) if role.role == "critic")
        for chosen in (config, composed(tmp_path))
    )
    assert begun.peak.weights < plain.peak.weights
    assert "critic.parallel.pipeline=4" in refused(
        composed(tmp_path, f"critic.path={path}", "critic.parallel.pipeline=4")
    )
    assert check(composed(tmp_path, f"critic.path={path}", "critic.parallel.pipeline=3"))
    cut = composed(tmp_path, f"critic.path={path}", "critic.num_layers=1")
    assert critic_shape(cut, check(cut)).num_layers == 1
    assert "critic.num_layers=4: must be at most 3, the number of layers of the model" in refused(
        composed(tmp_path, f"critic.path={path}", "critic.num_layers=4")
    )


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"vocab_size": 32},
            "the model has 32 tokens in its vocabulary, but the policy generates 64",
        ),
        (
            {"max_position_embeddings": 31},
            "the model has 31 positions, but the longest sequence has 32 tokens",
        ),
        ({"architectures": ["BertModel"]}, "architecture BertModel is not supported"),
    ],
)
def test_a_model_that_cannot_read_the_policys_responses_is_refused_by_name(
    tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    path = judge(tmp_path, **entries)
    found = refused(composed(tmp_path, f"critic.path={path}"))
    assert f"critic.path={path}: " in found and message in found


def test_a_normalization_that_cannot_be_read_is_refused_and_so_is_a_path_without_a_critic(
    tmp_path: Path,
) -> None:
    path = judge(tmp_path)
    (path / NORMALIZATION).write_text('{"gain": 0, "bias": 1}')
    assert f"{path / NORMALIZATION}: gain=0: must be above 0" in refused(
        composed(tmp_path, f"critic.path={path}")
    )
    with pytest.raises(
        ConfigError, match=r"critic\.path=.*: has no effect with algorithm\.advantage=grpo"
    ):
        composed(tmp_path, "algorithm=grpo", f"critic.path={path}")


def test_a_learning_rate_for_a_head_that_is_frozen_is_refused(tmp_path: Path) -> None:
    rate = "critic.head_learning_rate=0.001"
    check(composed(tmp_path, rate, "critic.frozen=[model.embed_tokens.weight]"))
    found = refused(composed(tmp_path, rate, "critic.frozen=[score.*]"))
    assert (
        "critic.head_learning_rate=0.001: has no effect, because critic.frozen=['score.*']"
        " freezes the head; remove one of the two settings" in found
    )
    assert "critic.head_learning_rate=-1.0: must be at least 0" in refused(
        composed(tmp_path, "critic.head_learning_rate=-1")
    )


def test_one_that_is_not_there_yet_is_taken_to_be_as_the_policy_is_described(
    tmp_path: Path,
) -> None:
    described = ["model.source=directory", "model.path=org/policy"]
    config = composed(tmp_path, *described, "critic.path=org/judge")
    assert hub.with_found_models(config, weights=False) == config, (
        "described models are not looked for on the Hub"
    )
    assert absent_inputs(config)["org/judge"] == absent_inputs(config)["org/policy"]
    check(config, absent_inputs(config))
