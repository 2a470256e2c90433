"""Checks of a critic with `critic.path`, a model of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.models import model_source
from aligner.models.model_source import NORMALIZATION, absent_inputs, critic_shape
from aligner.placement.memory.role_memory import compute_role_memory
from aligner.placement.placement_table import build_placements
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


def compose(directory: Path, *overrides: str) -> Config:
    return compose_config(["experiment=tiny_ppo", f"run.dir={directory / 'run'}", *overrides])


def expect_error(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config)
    return str(caught.value)


def test_hub_name_of_critic_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "find_model", lambda name, key, weights: tmp_path / name)
    named = compose(tmp_path, "critic.path=org/judge", "reward.kind=model", "reward.path=org/judge")
    found = model_source.resolve_hub_models(with_values(named, {"model.config": {}}), weights=False)
    assert found.critic.path == found.reward.path == str(tmp_path / "org" / "judge")


def test_critic_shape_comes_from_critic_path(tmp_path: Path) -> None:
    path = judge(tmp_path)
    config = compose(tmp_path, f"critic.path={path}")
    policy = check(config)
    assert (policy.num_layers, critic_shape(config, policy).num_layers) == (4, 3)
    assert "critic: 3 layers" in describe_model(config, policy)
    assert {place.role: place.runs for place in build_placements(config)}[
        "critic"
    ] == f"value model, from {path}"
    with_path, plain = (
        next(role for role in compute_role_memory(chosen, policy) if role.role == "critic")
        for chosen in (config, compose(tmp_path))
    )
    assert with_path.peak.weights < plain.peak.weights
    assert "critic.parallel.pipeline=4" in expect_error(
        compose(tmp_path, f"critic.path={path}", "critic.parallel.pipeline=4")
    )
    assert check(compose(tmp_path, f"critic.path={path}", "critic.parallel.pipeline=3"))
    cut = compose(tmp_path, f"critic.path={path}", "critic.num_layers=1")
    assert critic_shape(cut, check(cut)).num_layers == 1
    assert (
        "critic.num_layers=4: must be at most 3, the number of layers of the model"
        in expect_error(compose(tmp_path, f"critic.path={path}", "critic.num_layers=4"))
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
def test_incompatible_critic_is_refused(
    tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    path = judge(tmp_path, **entries)
    found = expect_error(compose(tmp_path, f"critic.path={path}"))
    assert f"critic.path={path}: " in found and message in found


def test_invalid_normalization_or_path_is_refused(
    tmp_path: Path,
) -> None:
    path = judge(tmp_path)
    (path / NORMALIZATION).write_text('{"gain": 0, "bias": 1}')
    assert f"{path / NORMALIZATION}: gain=0: must be above 0" in expect_error(
        compose(tmp_path, f"critic.path={path}")
    )
    with pytest.raises(
        ConfigError, match=r"critic\.path=.*: has no effect with algorithm\.advantage=grpo"
    ):
        compose(tmp_path, "algorithm=grpo", f"critic.path={path}")


def test_learning_rate_of_frozen_head_is_refused(tmp_path: Path) -> None:
    rate = "critic.head_learning_rate=0.001"
    check(compose(tmp_path, rate, "critic.frozen=[model.embed_tokens.weight]"))
    found = expect_error(compose(tmp_path, rate, "critic.frozen=[score.*]"))
    assert (
        "critic.head_learning_rate=0.001: has no effect, because critic.frozen=['score.*']"
        " freezes the head; remove one of the two settings" in found
    )
    with pytest.raises(ConfigError, match=r"critic\.head_learning_rate=-1\.0: must be at least 0"):
        compose(tmp_path, "critic.head_learning_rate=-1")


def test_absent_critic_gets_shape_of_policy(
    tmp_path: Path,
) -> None:
    described = ["model.source=directory", "model.path=org/policy"]
    config = compose(tmp_path, *described, "critic.path=org/judge")
    assert model_source.resolve_hub_models(config, weights=False) == config, (
        "described models are not looked for on the Hub"
    )
    assert absent_inputs(config)["org/judge"] == absent_inputs(config)["org/policy"]
    check(config, absent_inputs(config))
