from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from aligner.data.examples import Demonstration, LabeledSteps, Preference
from aligner.data.model_directory import prepare_model
from aligner.data.run_data import RunData, open_run_data
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.schema import AlgorithmConfig, Config, DataConfig, ModelConfig, RunConfig

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
PAIRS = [{"prompt": "ab", "chosen": letter, "rejected": letter * 2} for letter in "cdefg"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    run = RunConfig(dir=str(tmp_path_factory.mktemp("run")))
    return Tokenizer(prepare_model(Config(run=run, model=ModelConfig(source="random", config=SHAPE))))


def written(file: Path, records: Sequence[Mapping[str, Any]]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def opened(trainer: str, tokenizer: Tokenizer, path: str, **data: Any) -> RunData:
    return open_run_data(Config(algorithm=AlgorithmConfig(trainer=trainer), data=DataConfig(path=path, **data)), tokenizer)


def test_the_last_rows_are_held_out_and_never_taken(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = opened("dpo", tokenizer, written(tmp_path / "pairs.jsonl", PAIRS), held_out=2)
    answers = [tokenizer.decode(pair.chosen.tokens[2:]) for pair in data.held_out]
    assert answers == ["f", "g"]
    assert {tokenizer.decode(pair.chosen.tokens[2:]) for pair in data.examples.take(0, 9)} == set("cde")


def test_a_file_with_too_few_rows_to_hold_out_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = written(tmp_path / "pairs.jsonl", PAIRS)
    with pytest.raises(ConfigError, match=r"data\.held_out=5: there are 5 rows; hold out fewer"):
        opened("dpo", tokenizer, path, held_out=5)


def test_a_reward_model_learns_from_pairs_or_from_steps_as_the_file_has_them(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pairs = opened("reward_model", tokenizer, written(tmp_path / "pairs.jsonl", PAIRS))
    assert isinstance(pairs.examples.take(0, 1)[0], Preference) and pairs.samples is None
    path = written(tmp_path / "steps.jsonl", [{"prompt": "ab", "steps": ["c", "de"], "labels": [1, 0]}])
    steps = opened("reward_model", tokenizer, path)
    assert isinstance(steps.examples.take(0, 1)[0], LabeledSteps)
    samples = written(tmp_path / "samples.jsonl", [{"prompt": "ab", "response": "c"}])
    with pytest.raises(ConfigError, match="a step's reward is a logit, which is not normalized"):
        opened("reward_model", tokenizer, path, normalization=samples)


def test_the_first_samples_of_a_file_are_normalized_by(tokenizer: Tokenizer, tmp_path: Path) -> None:
    samples = written(
        tmp_path / "samples.jsonl", [{"prompt": "ab", "response": letter, "prompt_index": 0} for letter in "cde"]
    )
    path = written(tmp_path / "pairs.jsonl", PAIRS)
    data = opened("reward_model", tokenizer, path, normalization=samples, normalization_samples=2)
    assert data.samples is not None and all(isinstance(sample, Demonstration) for sample in data.samples)
    assert [tokenizer.decode(sample.tokens[2:]) for sample in data.samples] == ["c", "d"]
