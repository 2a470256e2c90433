"""Checks of offline training: data, micro-batches, evaluation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from aligner.checks import actor, algorithm, data, evaluation
from aligner.models.shape import ModelShape
from aligner.schema import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LoraConfig,
)
from aligner.schema.data_sources import FUNCTION


def problems(trainer: str, **sections: Any) -> list[str]:
    settings = AlgorithmConfig(trainer=trainer)
    records = dataclasses.replace(
        sections.pop("data", DataConfig()), path=f"{FUNCTION}records:make"
    )
    return find_problems(Config(algorithm=settings, data=records, **sections))


def find_problems(config: Config, model: ModelShape | None = None) -> list[str]:
    return [
        line
        for section in (data, actor, algorithm, evaluation)
        for line in section.find_problems(config, model, {})
    ]


@pytest.mark.parametrize("trainer", ["sft", "dpo", "reward_model"])
def test_offline_defaults_are_accepted(trainer: str) -> None:
    assert problems(trainer) == []


@pytest.mark.parametrize(
    ("trainer", "fits", "short"), [("sft", 30, 29), ("dpo", 60, 59), ("reward_model", 60, 59)]
)
def test_micro_batch_must_hold_one_record_or_pair(trainer: str, fits: int, short: int) -> None:
    records = DataConfig(max_prompt_tokens=20, max_response_tokens=10)
    assert problems(trainer, data=records, actor=ActorConfig(micro_batch_tokens=fits)) == []
    (problem,) = problems(trainer, data=records, actor=ActorConfig(micro_batch_tokens=short))
    assert problem.startswith(f"actor.micro_batch_tokens={short}: must be at least {fits} to hold")


@pytest.mark.parametrize(
    ("trainer", "sections", "message"),
    [
        (
            "sft",
            {"evaluation": EvaluationConfig(every=2)},
            "evaluation.every=2: requires held-out records",
        ),
        (
            "reward_model",
            {"data": DataConfig(normalization="x.jsonl")},
            "data.normalization=x.jsonl: no such file",
        ),
        (
            "reward_model",
            {"actor": ActorConfig(lora=LoraConfig(rank=2))},
            "actor.lora.rank=2: LoRA is not supported",
        ),
    ],
)
def test_unsupported_offline_settings_are_refused(
    trainer: str, sections: dict[str, Any], message: str
) -> None:
    (problem,) = problems(trainer, **sections)
    assert message in problem


def test_rows_beyond_model_positions_are_refused(tmp_path: Path) -> None:
    from aligner.models.hugging_face import read_config

    shape = read_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "num_hidden_layers": 1,
            "hidden_size": 8,
            "num_attention_heads": 2,
            "intermediate_size": 8,
            "vocab_size": 8,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        "test",
    )
    config = Config(
        algorithm=AlgorithmConfig(trainer="sft"), data=DataConfig(path=f"{FUNCTION}records:make")
    )
    (problem,) = find_problems(config, shape)
    assert "128 tokens exceed the 64 positions of the model" in problem
    assert find_problems(config, dataclasses.replace(shape, max_positions=128)) == []
