"""The normalization file of a reward model, which holds its gain and bias."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.checks import reward
from aligner.errors import ConfigError
from aligner.models.model_source import NORMALIZATION, read_normalization
from aligner.schema import Config, RewardConfig


def test_missing_normalization_is_gain_1_and_bias_0(tmp_path: Path) -> None:
    assert read_normalization(tmp_path) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot be read"),
        ('{"gain": 1}', 'must contain .* got {"gain": 1}'),
        ('{"gain": 1, "bias": NaN}', "with finite numbers"),
        ('{"gain": true, "bias": 0}', "with finite numbers"),
        ('{"gain": 1e400, "bias": 0}', "with finite numbers"),
        ('{"gain": 1, "bias": 1' + "0" * 400 + "}", "with finite numbers"),
        ('{"gain": -1, "bias": 0}', "gain=-1: must be above 0"),
    ],
)
def test_invalid_normalization_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / NORMALIZATION).write_text(text)
    with pytest.raises(ConfigError, match=f"{NORMALIZATION}.* {problem}"):
        read_normalization(tmp_path)
    shape = {
        "architectures": ["LlamaForSequenceClassification"],
        "model_type": "llama",
        "num_hidden_layers": 1,
    }
    shape |= {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 8,
        "hidden_act": "silu",
    }
    shape |= {
        "max_position_embeddings": 8,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (found,) = reward.find_problems(
        Config(reward=RewardConfig(kind="model", path=str(tmp_path))), None, {}
    )
    assert NORMALIZATION in found
