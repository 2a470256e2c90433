"""Logits of models whose config.json lacks entries, or has them in an older form, equal those of
transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from aligner.megatron import world as worlds
from tests.megatron import families, jobs

LINEAR = {"type": "linear", "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
SIZES: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 72,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 48}
CASES: Mapping[str, tuple[str, Mapping[str, Any], tuple[str, ...], Mapping[str, Any]]] = {
    # configuration class, settings, entries removed from config.json, entries added to it
    "Mixtral without eps and theta": (
        "Mixtral",
        {"num_local_experts": 4},
        ("rms_norm_eps", "rope_parameters"),
        {},
    ),
    "Qwen3-MoE without head_dim": ("Qwen3Moe", EXPERTS, ("head_dim",), {}),
    "GPT-NeoX without a share": ("GPTNeoX", {}, (), {"rope_parameters": DEFAULT}),
    "Mistral without a window": ("Mistral", {}, ("sliding_window",), {}),
    "Mistral with windows by layer_types": (
        "Mistral",
        {"sliding_window": 5},
        (),
        {"layer_types": ["sliding_attention"] * 2},
    ),
    "Llama with rope_scaling alone": (
        "Llama",
        {},
        ("rope_parameters",),
        {"rope_scaling": LINEAR, "rope_theta": 500.0},
    ),
    "Qwen2 with an unused window": (
        "Qwen2",
        {},
        ("layer_types",),
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
}


def logits(directory: str) -> Any:
    """Return the logits of a policy on one rank; `pool` runs this function."""
    actor = jobs.policy(directory, {})
    experience = jobs.make_experience(actor.runner.shape.vocab_size)
    result = jobs.policy_logits(actor, experience).numpy()
    worlds.shutdown()
    return result


def save(case: str, directory: Path) -> Path:
    import transformers

    name, settings, removed, added = CASES[case]
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**SIZES, **settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)

    file = directory / "config.json"
    entries = json.loads(file.read_text())
    kept = {key: value for key, value in entries.items() if key not in removed}
    file.write_text(json.dumps({**kept, **added}))
    return directory


@pytest.mark.promise("config-defaults-equal-transformers")
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_with_the_same_config(pool, tmp_path, case):
    import transformers

    directory = save(case, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    experience = jobs.make_experience(SIZES["vocab_size"])
    expected = families._logits(model.eval(), experience.tokens, experience.lengths)

    (found,) = pool.run(logits, 1, str(directory))
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=1e-5)
