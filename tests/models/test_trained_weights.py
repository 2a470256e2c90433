"""Selection of trained weights: frozen name patterns, and LoRA adapters."""

from __future__ import annotations

import pytest

from aligner.checks.actor import find_lora_problems
from aligner.errors import ConfigError
from aligner.models.hugging_face import read_config
from aligner.models.weight_slices import (
    build_adapter_map,
    build_adapter_table,
    frozen_names,
    weight_table,
)
from aligner.schema import ActorConfig, LoraConfig

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 72,
}
GPT2 = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 72,
    "activation_function": "gelu_new",
}


def shape(architecture: str = "LlamaForCausalLM", **more):
    sizes = GPT2 if architecture.startswith("GPT2") else {**SIZES, "hidden_act": "silu"}
    return read_config({"architectures": [architecture], **sizes, **more}, "model")


def table(*arguments, **more):
    return weight_table(shape(*arguments, **more))


def test_frozen_patterns_freeze_only_matching_weights():
    frozen = frozen_names(table(), ["model.embed_tokens.*", "model.layers.[0-1].*"])
    names = {spec.name for spec in table()}
    assert frozen == {
        name
        for name in names
        if name.startswith(("model.embed_tokens.", "model.layers.0.", "model.layers.1."))
    }
    assert frozen_names(table(), []) == frozenset()


def test_frozen_file_tensor_freezes_all_its_weights():
    frozen = frozen_names(table("GPT2LMHeadModel"), ["transformer.h.0.attn.c_attn.*"])
    parts = ("query", "key", "value")
    assert frozen == {
        f"transformer.h.0.attn.{part}.{kind}" for part in parts for kind in ("weight", "bias")
    }


def test_frozen_pattern_without_match_is_refused():
    with pytest.raises(
        ConfigError, match=r"actor\.frozen: the pattern 'model\.layer\.0\.\*' matches no weight"
    ):
        frozen_names(table(), ["model.embed_tokens.*", "model.layer.0.*"], "actor.frozen")


def test_freezing_part_of_fused_parameter_is_refused():
    with pytest.raises(
        ConfigError,
        match=(
            r"layers\.2\.mlp\.gate_proj\.weight would be frozen, but .*2\.mlp\.up_proj\.weight"
            " would be trained"
        ),
    ):
        frozen_names(table(), ["model.layers.2.mlp.gate_proj.weight"])
    with pytest.raises(
        ConfigError,
        match=(
            r"self_attn\.q_proj\.weight, .*v_proj\.weight would be frozen, but .*k_proj\.weight"
            " would be trained"
        ),
    ):
        frozen_names(table(), ["model.layers.0.self_attn.[qv]_proj.weight"])


def test_freezing_qkv_weights_without_biases_is_refused():
    with pytest.raises(
        ConfigError, match="freeze the biases of query, key and value together with the weights"
    ):
        frozen_names(table("Qwen2ForCausalLM"), ["model.layers.0.self_attn.[qkv]_proj.weight"])
    frozen_names(table("Qwen2ForCausalLM"), ["model.layers.0.self_attn.[qkv]_proj.*"])
    frozen_names(table("Qwen2ForCausalLM"), ["model.layers.0.self_attn.[qkv]_proj.bias"])


def test_freezing_every_weight_is_refused():
    with pytest.raises(ConfigError, match="at least one weight must be trained"):
        frozen_names(table(), ["model.*", "lm_head.weight"])


def test_adapters_have_peft_names_and_shapes():
    specs = {
        spec.name: spec
        for spec in build_adapter_table(build_adapter_map(table(), LoraConfig(rank=8)))
    }
    assert len(specs) == 4 * 7 * 2
    layer = "model.layers.3."
    shapes = {
        name.removeprefix(layer): (spec.shape, spec.axis)
        for name, spec in specs.items()
        if name.startswith(layer)
    }
    assert shapes["self_attn.k_proj.lora_A.weight"] == ((8, 64), None)
    assert shapes["self_attn.k_proj.lora_B.weight"] == ((32, 8), 0)
    assert shapes["mlp.down_proj.lora_A.weight"] == ((8, 96), 1)
    assert shapes["mlp.down_proj.lora_B.weight"] == ((64, 8), None)


def test_adapters_of_fused_tensor_share_lora_a():
    adapters = build_adapter_map(
        table("GPT2LMHeadModel"), LoraConfig(rank=4, targets=["attention"])
    )
    name = "transformer.h.1.attn."
    assert {adapters[f"{name}{part}.weight"].down.name for part in ("query", "key", "value")} == {
        f"{name}c_attn.lora_A.weight"
    }
    key = adapters[f"{name}key.weight"].up
    assert (key.stored_range.name, key.stored_range.shape, key.stored_range.start) == (
        f"{name}c_attn.lora_B.weight",
        (192, 4),
        64,
    )
    assert adapters[f"{name}c_proj.weight"].down.axis == 1


def test_unsupported_adapters_are_reported():
    def problems(**lora):
        frozen = lora.pop("frozen", [])
        model = (
            shape("MixtralForCausalLM", num_local_experts=4)
            if lora.pop("experts", False)
            else shape()
        )
        return list(
            find_lora_problems("actor", ActorConfig(lora=LoraConfig(**lora), frozen=frozen), model)
        )

    assert (
        problems(rank=0, targets=["nothing"])
        == problems(rank=4)
        == problems(rank=4, targets=["attention"], experts=True)
        == []
    )
    assert (
        "must be one or more of attention, mlp"
        in problems(rank=4, targets=["attention", "q_proj"])[0]
    )
    assert (
        "LoRA on the experts of a mixture-of-experts model is not supported"
        in problems(rank=4, experts=True)[0]
    )
    assert (
        "which already freezes every weight of the base model"
        in problems(rank=4, frozen=["model.norm.*"])[0]
    )
