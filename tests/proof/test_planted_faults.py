"""`aligner prove` finds faults in one layer of the trainer, and names the layer and the parameter."""

from __future__ import annotations

import random
from typing import Any

import pytest

from aligner.models.architectures import ARCHITECTURES
from aligner.proof.run_proof import parse_layout, prove
from tests.megatron import families
from tests.proof import planted_faults
from tests.rounds import slow

# The family that has the part, the model_type that must be supported, and the texts that the first
# cause contains, or one of the causes with "gradient".
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "swapped gate and up": ("llama3", "llama", ("mlp.gate_proj.weight",)),
    "wrong rope base": ("qwen3", "qwen3", ("rotary positions (rope)", "from position 1")),
    "missing bias": ("qwen2", "qwen2", ("self_attn.q_proj.bias",)),
    "transposed expert": ("qwen3_moe", "qwen3_moe", ("experts.1.down_proj.weight",)),
    "norm without 1+": ("gemma3", "gemma3_text", ("pre_feedforward_layernorm.weight",)),
    "KV head order": ("llama2-grouped", "llama", ("self_attn.k_proj.weight",)),
    "tied embedding": ("llama3", "llama", ("model.embed_tokens.weight", "gradient")),
    "router scaling": ("mixtral", "mixtral", ("gate.weight", "router's weights")),
    "wrong sink": ("gpt-oss", "gpt_oss", ("self_attn.sinks",)),
    "shared expert gate": ("qwen2_moe", "qwen2_moe", ("mlp.shared_expert_gate.weight",)),
}
SUPPORTED = {architecture.model_type for architecture in ARCHITECTURES}
"""The faults of parts that no supported family has are planted as soon as one has them."""
FIRST = ("swapped gate and up", "tied embedding")


def config_of(family: str) -> dict[str, Any]:
    """Return the config.json of a family's tiny model."""
    import transformers

    name = "llama-linear" if family == "llama2-grouped" else family
    config = families.CONFIGS[name](transformers)
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return config.to_dict() | {"architectures": [model_class.__name__]}


@pytest.mark.parametrize(
    ("fault", "seed"),
    [
        (fault, seed) if fault in FIRST else slow(fault, seed)
        for seed, (fault, (_, model_type, _)) in enumerate(CASES.items())
        if model_type in SUPPORTED
    ],
)
def test_planted_fault_is_named(pool, tmp_path, fault, seed):
    family, _, texts = CASES[fault]
    layer = random.Random(seed).randrange(4)

    def run(function, world, *arguments):
        call = (fault, layer, function.__module__, function.__name__)
        return pool.run(planted_faults.run_with_fault, world, *call, *arguments)

    proof = prove(config_of(family), family, [parse_layout("")], tmp_path, ranks=run)
    causes = proof.layouts[0].causes
    assert not proof.passed
    assert all(text in causes[0] for text in texts), causes
    if fault != "tied embedding":
        assert causes[0].startswith(f"layer {layer}"), causes
