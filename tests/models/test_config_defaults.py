"""config.json is read as by the transformers classes: defaults, both forms of rotary entries, and
refusal of unsupported entries."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from typing import Any

import pytest

from aligner.data.checkpoint_files import derive_model_config
from aligner.errors import ConfigError
from aligner.models.architectures import (
    ARCHITECTURES,
    COMMON_SUPPORTED,
    COMMON_WITHOUT_EFFECT,
    GENERATION_ENTRIES,
    Architecture,
)
from aligner.models.hugging_face import (
    config_notes,
    hugging_face_config,
    read_config,
    read_described_config,
)
from aligner.models.model_source import directory_config, directory_shape
from aligner.models.shape import Experts, LatentAttention, ModelShape
from tests.models.test_families import CONFIGS, LLAMA3, SIZES, frequencies

GPT2 = "GPT2LMHeadModel"
NAMES = [architecture.causal_name for architecture in ARCHITECTURES]
BY_NAME = {architecture.causal_name: architecture for architecture in ARCHITECTURES}
ROTARY = [name for name in NAMES if BY_NAME[name].rope and not BY_NAME[name].rope.local_theta]
NESTED = [name for name in NAMES if BY_NAME[name].rope and BY_NAME[name].rope.local_theta]
ENTRIES = [(name, entry.key) for name in NAMES for entry in BY_NAME[name].shape_entries] + [
    (name, key) for name in NAMES for key in ("eos_token_id", "pad_token_id")
]
WINDOWED = [name for name in NAMES if BY_NAME[name].window != "none"]


def full(name: str) -> dict[str, Any]:
    """Return a configuration in which no entry of the shape has the class's default."""
    architecture = BY_NAME[name]
    config = dict(CONFIGS[name])
    for entry in architecture.shape_entries:
        if isinstance(entry.default, bool):
            config[entry.key] = not entry.default
        elif isinstance(entry.default, float):
            config[entry.key] = 3e-4
        elif isinstance(entry.default, str):
            config[entry.key] = "gelu_fast"
    config |= {"hidden_size": 64, "head_dim": 16, "sliding_window": 48}
    config |= {"num_experts": 16, "num_local_experts": 16}
    config |= {"n_embd": 64, "n_inner": 40, "vocab_size": 60000} if name == GPT2 else {}
    unread = {"hidden_size", "head_dim", "num_key_value_heads"}
    unread |= {"num_experts", "num_local_experts"}
    unread |= architecture.supported.keys()
    read = {entry.key for entry in architecture.shape_entries}
    config = {key: value for key, value in config.items() if key in read or key not in unread}
    return {**config, "architectures": [name], "eos_token_id": [3, 4], "pad_token_id": 5}


def transformers_config(config: dict[str, Any]) -> Any:
    import transformers

    model_class = getattr(transformers, config["architectures"][0])
    # the class changes objects inside its argument
    return model_class.config_class.from_dict(copy.deepcopy(config))


def transformers_shape(config: dict[str, Any]) -> dict[str, Any]:
    """Return those attributes of a shape that the transformers class defines, with its values."""
    architecture, read = BY_NAME[config["architectures"][0]], transformers_config(config)
    values = {
        attribute: getattr(read, entry.key, None)
        for attribute, entry in architecture.entries.items()
    }
    for attribute, entry in architecture.entries.items():
        values[attribute] = entry.to_shape(values[attribute])
    values["delta_net"] = None
    if architecture.delta_net_entries:
        values["delta_net"] = {
            attribute: getattr(read, entry.key)
            for attribute, entry in architecture.delta_net_entries.items()
        }
        values["delta_net_layers"] = [kind == "linear_attention" for kind in read.layer_types]
    values["experts"] = None
    if architecture.expert_entries:
        experts = {
            attribute: entry.to_shape(getattr(read, entry.key))
            for attribute, entry in architecture.expert_entries.items()
        }
        implied = architecture.implied_experts
        values["experts"] = dataclasses.asdict(Experts(**experts, **implied))
    tanh = ("gelu_fast", "gelu_new", "gelu_pytorch_tanh")
    activation = values.get("activation", architecture.implied.get("activation", "silu"))
    values["activation"] = "gelu_tanh" if activation in tanh else activation
    heads, hidden = values["num_heads"], values["hidden_size"]
    values["head_dim"] = values.get("head_dim") or hidden // heads
    values["latent_attention"] = None
    if architecture.latent_entries:
        latent = LatentAttention(
            **{
                attribute: getattr(read, entry.key)
                for attribute, entry in architecture.latent_entries.items()
            }
        )
        values["latent_attention"] = dataclasses.asdict(latent)
        values["head_dim"] = read.qk_head_dim
    values["num_kv_heads"] = values.get("num_kv_heads") or heads
    values["ffn_hidden_size"] = values["ffn_hidden_size"] or 4 * hidden
    eos = read.eos_token_id
    values["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    # defaults of the class that belong to a larger vocabulary
    if architecture.eos_token_id and config.get("eos_token_id") is None:
        values["eos_token_ids"] = tuple(
            token for token in values["eos_token_ids"] if token < values["vocab_size"]
        )
    pad = read.pad_token_id or 0
    values["pad_token_id"] = pad if pad < values["vocab_size"] else 0
    layers = range(values["num_layers"])
    values["windows"] = [transformers_window(architecture, read, layer) for layer in layers]
    if architecture.rope is not None:
        values["rotary"] = [transformers_rope(read, layer) for layer in layers]
    return values


def transformers_rope(read: Any, layer: int) -> tuple[float, float] | None:
    """Return base and rotated fraction of a layer."""
    types = getattr(read, "layer_types", None)
    if types and types[layer] == "linear_attention":
        return None
    if hasattr(read, "no_rope_layers") and not read.no_rope_layers[layer]:
        return None
    rope = read.rope_parameters
    if types and types[layer] in rope:
        rope = rope[types[layer]]
    return rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)


def transformers_window(architecture: Architecture, read: Any, layer: int) -> int | None:
    if architecture.window == "none":
        return None
    types = getattr(read, "layer_types", None)
    if architecture.window != "always" and types and types[layer] == "full_attention":
        return None
    return read.sliding_window


def shape_values(shape: ModelShape, names: Any) -> dict[str, Any]:
    values = dataclasses.asdict(shape) | {
        "num_layers": shape.num_layers,
        "rotary": [
            layer.rope and (layer.rope.theta, layer.rope.fraction) for layer in shape.layers
        ],
        "windows": [layer.sliding_window for layer in shape.layers],
        "delta_net_layers": [layer.has_delta_net for layer in shape.layers],
    }
    return {name: values[name] for name in names}


def assert_read_alike(config: dict[str, Any]) -> None:
    expected = transformers_shape(config)
    assert shape_values(read_config(config, "test"), expected) == expected


@functools.cache
def class_fields(name: str) -> dict[str, Any]:
    import transformers

    config_class = getattr(transformers, name).config_class
    return {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(config_class)
    }


@pytest.mark.parametrize("name", NAMES)
def test_default_values_equal_transformers_class(name):
    architecture, fields = BY_NAME[name], class_fields(name)
    entries = {entry.key: entry.default for entry in architecture.shape_entries}
    expected = {**architecture.supported, **entries, "eos_token_id": architecture.eos_token_id}
    if name == "Glm4ForCausalLM":
        expected["eos_token_id"] = None  # the class replaces null
    assert {key: fields[key] for key in expected if key in fields} == {
        key: value for key, value in expected.items() if key in fields
    }
    # Attributes that the models read although their configuration classes do not declare them.
    undeclared = {key for key in expected if key not in fields}
    reads_head_dim = ("Qwen2", "Qwen3Moe", "Glm4Moe", "SmolLM3", "Granite", "Phi3", "Olmo")
    expected_undeclared = {"head_dim"} if name.startswith(reads_head_dim) else set()
    if name.startswith("Olmoe"):
        expected_undeclared.add("sliding_window")
    assert undeclared == expected_undeclared


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_the_transformers_class_is_known(name):
    import transformers

    architecture = BY_NAME[name]
    config_class = getattr(transformers, name).config_class
    assert set(class_fields(name)) - architecture.known_entries == set()
    assert dict(architecture.aliases) == {
        alias: key
        for alias, key in {
            **config_class.attribute_map,
            **({"num_local_experts": "num_experts"} if name.startswith("Qwen3Moe") else {}),
        }.items()
        if (alias, name) != ("num_experts", "Qwen3MoeForCausalLM")
    }
    if architecture.rope is not None:
        rope = architecture.rope
        theta = rope.theta
        if name.startswith("Gemma3"):
            theta = {"global": rope.theta, "local": rope.local_theta}
        assert config_class.default_theta == theta


def test_generation_entries_equal_transformers():
    from transformers import GenerationConfig

    assert set(GENERATION_ENTRIES) == set(GenerationConfig._get_default_generation_params())


@pytest.mark.promise("config-defaults-equal-transformers")
@pytest.mark.parametrize(("name", "key"), ENTRIES)
def test_missing_entry_has_the_transformers_default(name, key):
    config = full(name)
    assert_read_alike(config)
    config.pop(key, None)
    if key == "num_attention_heads" and name == "GPTNeoXForCausalLM":
        config["hidden_size"] = 512  # divisible by the class's 64 heads
    if key == "n_head":
        config["n_embd"] = 96  # divisible by the class's 12 heads
    if key == "linear_num_key_heads":
        config["linear_num_value_heads"] = 32  # divisible by the class's 16 key heads
    if key in ("num_key_value_heads", "head_dim"):
        config |= {"num_attention_heads": 32, "hidden_size": 256}
    if name == "DeepseekV3ForCausalLM" and key == "num_key_value_heads":
        config["num_attention_heads"] = 128  # the class's number of key-value heads
    if (name, key) == ("DeepseekV3ForCausalLM", "topk_group"):
        config["n_group"] = 8  # the default are 4 groups of a token
    if (name, key) == ("DeepseekV2ForCausalLM", "num_experts_per_tok"):
        with pytest.raises(ConfigError, match="missing: num_experts_per_tok"):
            read_config(config, "test")  # the class has null, with which no model computes
        return
    if key == "v_head_dim":
        config["qk_nope_head_dim"] = 128  # values must not be longer than keys
    if BY_NAME[name].latent_entries and key == "num_attention_heads":
        config["num_key_value_heads"] = None  # as many as attention heads
    assert_read_alike(config)


# Entries that the class accepts as null, although no such model has been published, and most of
# them cannot be computed.
NULL_WITHOUT_MODEL = {
    ("DeepseekV2ForCausalLM", "num_experts_per_tok"),
    *(
        ("DeepseekV3ForCausalLM", key)
        for key in ("v_head_dim", "num_experts_per_tok", "norm_topk_prob", "n_group", "topk_group")
    ),
}


@pytest.mark.parametrize(("name", "key"), ENTRIES)
def test_null_entry_is_read_or_refused_as_transformers_does(name, key):
    config = full(name) | {key: None}
    entry = next((entry for entry in BY_NAME[name].shape_entries if entry.key == key), None)
    if entry is None or entry.nullable:
        assert_read_alike(config)
        return
    with pytest.raises(ConfigError, match=f"missing: {key}"):
        read_config(config, "test")
    if (name, key) in NULL_WITHOUT_MODEL:
        return
    with pytest.raises(Exception, match=key):
        transformers_config(config)


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("DeepseekV2ForCausalLM", {"first_k_dense_replace": 2}),
        ("DeepseekV3ForCausalLM", {"first_k_dense_replace": 5}),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0, 1]}),
    ],
)
def test_model_with_dense_layers_only_has_no_experts(name, entries):
    shape = read_config(full(name) | entries, "test")
    assert shape.experts is None and not shape.expert_layers
    assert read_config(hugging_face_config(shape), "test") == shape


def test_groups_of_deepseek_v2_need_their_method():
    config = full("DeepseekV2ForCausalLM")
    assert read_config(config, "test").experts.groups == 2
    assert read_config(config | {"topk_method": "greedy"}, "test").experts.groups == 1
    assert read_config(config | {"n_group": None, "topk_group": None}, "test").experts.groups == 1


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"rope_parameters": None},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0}},
        {"theta": 777.0},
        {"theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"theta": 777.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=str,
)
def test_rotary_entries_of_both_forms_are_read_alike(name, entries):
    config = full(name) | entries
    if "theta" in config:
        config[BY_NAME[name].rope.theta_key] = config.pop("theta")
    if name.startswith("Phi3") and "linear" in str(entries):
        with pytest.raises(ConfigError, match="rope scaling 'linear' is not supported"):
            read_config(config, "test")
        return
    assert_read_alike(config)
    scaling = read_config(config, "test").layers[-1].rope.scaling
    is_linear = scaling is not None and scaling.kind == "linear"
    kind = transformers_config(config).rope_parameters["rope_type"]
    assert is_linear == (kind == "linear")


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"rope_parameters": None},
        {"rope_theta": 500000.0},
        {"rope_theta": 777.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 777.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 6.0},
            }
        },
    ],
    ids=str,
)
def test_rotary_entries_of_both_types_of_layers_are_read_alike(name, entries):
    config = full(name) | {"num_hidden_layers": 12} | entries
    assert_read_alike(config)
    shape = read_config(config, "test")
    scaled = [layer.rope and layer.rope.scaling is not None for layer in shape.layers]
    assert any(scaled) == ("linear" in str(entries))
    assert not all(scaled)
    assert len(set(shape.layers)) == 2


@pytest.mark.parametrize("local", [{}, {"rope_local_base_freq": 300.0}])
def test_gemma3_local_base_outside_of_rope_parameters_is_read(local):
    config = full("Gemma3ForCausalLM") | {"rope_theta": 777.0} | local
    assert_read_alike(config)


@pytest.mark.parametrize(
    "entries", [{"rotary_pct": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}, {}]
)
def test_gpt_neox_rotary_fraction_equals_transformers(entries):
    config = full("GPTNeoXForCausalLM") | entries
    assert_read_alike(config)
    assert read_config(config, "test").layers[0].rope.fraction == (0.5 if entries else 0.25)


@pytest.mark.parametrize("entries", [{"rotary_dim": 8}, {"partial_rotary_factor": 0.5}, {}])
def test_minimax_rotary_dim_equals_transformers(entries):
    config = full("MiniMaxM2ForCausalLM") | entries
    assert_read_alike(config)
    assert read_config(config, "test").layers[0].rope.fraction == (0.5 if entries else 1.0)


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        *(
            (name, entries)
            for name in ("Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM")
            for entries in (
                {},
                {"mlp_only_layers": None},
                {"mlp_only_layers": [1, 4]},
                {"decoder_sparse_step": 2},
                {"decoder_sparse_step": 3, "mlp_only_layers": [5]},
            )
        ),
        *(
            ("Glm4MoeForCausalLM", entries)
            for entries in ({}, {"first_k_dense_replace": 0}, {"first_k_dense_replace": 3})
        ),
    ],
    ids=str,
)
def test_layers_with_experts_equal_transformers(name, entries):
    import torch
    import transformers

    config = CONFIGS[name] | {"architectures": [name], "num_hidden_layers": 6} | entries
    with torch.device("meta"):
        model = getattr(transformers, name)(transformers_config(config))
    expected = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
    shape = read_config(config, "test")
    assert [layer.has_experts for layer in shape.layers] == expected
    assert read_config(hugging_face_config(shape), "test") == shape


def test_gpt_neox_rotary_fraction_defaults_to_a_quarter():
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = full("GPTNeoXForCausalLM") | {"rope_parameters": rope}
    assert read_config(config, "test").layers[0].rope.fraction == 0.25


@pytest.mark.parametrize("outside", [{}, {"original_max_position_embeddings": 8}])
@pytest.mark.parametrize("inside", [True, False])
def test_llama3_original_positions_equal_transformers(outside, inside):
    import torch
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {key: value for key, value in LLAMA3.items() if inside or not key.startswith("orig")}
    config = full("LlamaForCausalLM") | {"rope_parameters": rope, **outside}
    torch.testing.assert_close(
        torch.tensor(frequencies(read_config(config, "test"))),
        LlamaRotaryEmbedding(transformers_config(config)).inv_freq,
    )


def test_mixtral_without_eps_and_theta_has_class_defaults():
    shape = read_config(SIZES | {"architectures": ["MixtralForCausalLM"]}, "test")
    assert (shape.norm_epsilon, shape.layers[0].rope.theta) == (1e-5, 1e6)


def test_mistral_sliding_window_defaults_to_4096():
    config = SIZES | {"architectures": ["MistralForCausalLM"]}
    assert windows(config) == [4096, 4096]
    assert windows(config | {"sliding_window": None}) == [None, None]


def windows(config: dict[str, Any]) -> list[int | None]:
    return [layer.sliding_window for layer in read_config(config, "test").layers]


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 7},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": False, "max_window_layers": 0},
    ],
    ids=str,
)
def test_windows_of_layers_equal_transformers(name, entries):
    config = CONFIGS[name] | {"architectures": [name]} | entries
    if BY_NAME[name].window == "typed" and config.get("sliding_window", 1) is None:
        with pytest.raises(ConfigError, match=r"sliding_window=None: must be an integer > 0$"):
            read_config(config, "test")
        return
    assert_read_alike(config)
    assert_read_alike({"sliding_window": 5} | config)


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_layer_types_choose_layers_with_windows(name):
    config = CONFIGS[name] | {"architectures": [name], "use_sliding_window": True}
    config |= {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    assert windows(config) == [6, None]
    assert_read_alike(config)


HYBRIDS = [name for name in NAMES if BY_NAME[name].delta_net_entries]


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, [True, False] * 3),
        ({"full_attention_interval": 3}, [True, True, False] * 2),
        ({"full_attention_interval": None, "layer_types": ["linear_attention"] * 6}, [True] * 6),
        (
            {"layer_types": ["full_attention"] * 2 + ["linear_attention"] * 4},
            [False] * 2 + [True] * 4,
        ),
    ],
    ids=str,
)
def test_layers_with_delta_nets_equal_transformers(name, entries, expected):
    config = CONFIGS[name] | {"architectures": [name], "num_hidden_layers": 6} | entries
    shape = read_config(config, "test")
    assert [layer.has_delta_net for layer in shape.layers] == expected
    assert_read_alike(config)
    assert read_config(hugging_face_config(shape), "test") == shape


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types=.*: must be a list of"),
        ({"layer_types": ["full_attention"]}, "for 2 layers"),
        ({"full_attention_interval": 0}, "full_attention_interval=0: must be an integer > 0"),
        ({"linear_num_value_heads": 3}, "must be a multiple of linear_num_key_heads=2"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim=0: must be an integer > 0"),
    ],
    ids=str,
)
def test_wrong_entries_of_delta_nets_are_refused(entries, message):
    name = "Qwen3_5ForCausalLM"
    with pytest.raises(ConfigError, match=message):
        read_config(CONFIGS[name] | {"architectures": [name]} | entries, "test")


LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"]}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.promise("config-defaults-equal-transformers")
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "Llama",
            {"rope_parameters": DEFAULT, "rope_scaling": LINEAR},
            ["rope_scaling={", "rope_parameters={"],
        ),
        (
            "Llama",
            {"rope_parameters": DEFAULT, "rope_theta": 5e5},
            ["rope_theta=500000.0", "10000.0"],
        ),
        ("GPTNeoX", {"rope_theta": 5e5}, ["rope_theta=500000.0 contradicts"]),
        ("GPTNeoX", {"partial_rotary_factor": 1.0}, ["partial_rotary_factor=1.0 contradicts"]),
        ("Llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        ("Llama", {"head_dim": 7}, ["head_dim=7: must be even"]),
        ("Llama", {"rope_parameters": {"full_attention": DEFAULT}}, ["full_attention"]),
        ("Llama", {"rope_scaling": "linear"}, ["rope_scaling='linear'"]),
        ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": None}}, ["factor=None"]),
        *(
            ("Llama", {form: {"rope_type": kind, "factor": 4.0}}, [f"rope scaling '{kind}'"])
            for kind in ("longrope", "su", "mrope", "proportional")
            for form in ("rope_parameters", "rope_scaling")
        ),
        (
            "Mistral",
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
            ["layer_types="],
        ),
        ("Mistral", {"layer_types": ["full_attention"] * 2, "sliding_window": 8}, ["layer_types="]),
        ("Llama", {"layer_types": ["sliding_attention"] * 2}, ["layer_types="]),
        ("Llama", {"layer_types": ["full_attention"]}, ["layer_types="]),
        ("Qwen2", {"use_sliding_window": "yes"}, ["use_sliding_window='yes'"]),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 1.5},
            ["sliding_window=1.5"],
        ),
        (
            "Qwen2",
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
            ["layer_types="],
        ),
        ("Qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types="]),
        (
            "Llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1}},
            ["beta_fast=1: must be above beta_slow=1"],
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": 1}},
            ["truncate=1"],
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": -1}},
            ["attention_factor=-1"],
        ),
        *(
            (name, {"is_causal": False}, ["is_causal=False"])
            for name in ("Llama", "Qwen2", "GPT2LMHead", "GPTNeoX")
        ),
        ("Llama", {"is_causal": None}, ["is_causal=None"]),
        ("Llama", {"mlp_bias": 1}, ["mlp_bias=1: must be true or false"]),
        ("Qwen3", {"attention_bias": None}, ["missing: attention_bias"]),
        ("Mixtral", {"router_jitter_noise": 0.1}, ["router_jitter_noise=0.1"]),
        ("Qwen3Moe", {"mlp_only_layers": ["0"]}, ["mlp_only_layers=['0']"]),
        ("Qwen3Moe", {"decoder_sparse_step": 0}, ["decoder_sparse_step=0"]),
        ("Qwen2Moe", {"use_sliding_window": True}, ["use_sliding_window=True"]),
        ("Glm4Moe", {"first_k_dense_replace": -1}, ["first_k_dense_replace=-1"]),
        ("DeepseekV2", {"topk_method": "noaux_tc"}, ["topk_method='noaux_tc' is not supported"]),
        ("DeepseekV2", {"norm_topk_prob": True}, ["norm_topk_prob=True is not supported"]),
        ("Glm4Moe", {"n_group": 5}, ["32", "multiple of the number of groups, 5"]),
        ("Glm4Moe", {"topk_group": 3}, ["3 groups of experts per token"]),
        ("Glm4Moe", {"num_experts_per_tok": 17}, ["17 experts per token", "16 experts"]),
        ("Glm4Moe", {"n_group": 32}, ["32 groups of 1 experts are not supported"]),
        ("MiniMaxM2", {"rotary_dim": 0}, ["rotary_dim=0"]),
        ("MiniMaxM2", {"rotary_dim": 4, "partial_rotary_factor": 1.0}, ["rotary_dim=4"]),
        ("Olmoe", {"clip_qkv": 8.0}, ["clip_qkv=8.0"]),
        (
            "GPT2LMHead",
            {"scale_attn_by_inverse_layer_idx": True},
            ["scale_attn_by_inverse_layer_idx"],
        ),
        ("GPT2LMHead", {"head_dim": 8}, ["head_dim=8"]),
        ("GPT2LMHead", {"hidden_size": 32}, ["hidden_size=32 contradicts n_embd=16"]),
        ("Mixtral", {"num_experts": 8}, ["num_experts=8 contradicts num_local_experts=4"]),
        ("Llama", {"per_layer_config": {"0": {"hidden_act": "gelu"}}}, ["per_layer_config"]),
        ("Llama", {"is_encoder_decoder": True}, ["is_encoder_decoder=True"]),
        ("Llama", {"model_type": "qwen2"}, ["model_type='qwen2' contradicts"]),
        (
            "Llama",
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            ["quantization_config", "'gptq'"],
        ),
        (
            "Llama",
            {"compression_config": {"quant_method": "compressed-tensors"}},
            ["compressed-tensors"],
        ),
        (
            "Llama",
            {"eos_token_id": [2, 32007]},
            ["eos_token_id=[2, 32007]", "less than vocab_size=32"],
        ),
        ("Llama", {"eos_token_id": -1}, ["eos_token_id=-1"]),
        ("Llama", {"eos_token_id": "</s>"}, ["eos_token_id='</s>'"]),
        ("Llama", {"pad_token_id": 32}, ["pad_token_id=32"]),
        ("Llama", {"pad_token_id": -2}, ["pad_token_id=-2"]),
        ("Llama", {"attention_dropout": "0.1"}, ["attention_dropout='0.1'"]),
        ("Llama", {"tie_word_embeddings": "false"}, ["tie_word_embeddings='false'"]),
    ],
    ids=str,
)
def test_contradictory_or_unsupported_entry_is_refused(name, change, words):
    architecture = "GPT2LMHeadModel" if name.startswith("GPT2") else f"{name}ForCausalLM"
    config = CONFIGS[architecture] | {"architectures": [architecture]}
    if name == "Mixtral":
        config = {key: value for key, value in config.items() if key != "num_experts"}
    read_config(config, "FILE")
    with pytest.raises(ConfigError, match=r"^FILE: ") as caught:
        read_config(config | change, "FILE")
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Llama", {"rope_parameters": DEFAULT, "rope_theta": 10000.0}),
        ("Llama", {"rope_parameters": DEFAULT, "rope_scaling": DEFAULT}),
        ("Llama", {"rope_parameters": DEFAULT, "rope_scaling": None}),
        ("Llama", {"layer_types": ["full_attention"] * 2}),
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": None}),
        ("Qwen2", {"layer_types": ["full_attention"] * 2, "use_sliding_window": True}),
        ("Llama", {"pad_token_id": -1}),
        ("Llama", {"pad_token_id": None}),
        ("Llama", {"pretraining_tp": 2, "use_cache": False, "torch_dtype": "float16"}),
        ("Llama", {"quantization_config": None}),
    ],
    ids=str,
)
def test_ineffective_entry_does_not_change_shape(name, change):
    config = CONFIGS[f"{name}ForCausalLM"] | {"architectures": [f"{name}ForCausalLM"]}
    assert read_config(config | change, "test") == read_config(config, "test")
    assert config_notes(config | change) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("named", [{}, {"architectures": None}, {"architectures": []}], ids=str)
def test_missing_architecture_follows_from_model_type(name, named, tmp_path):
    config = {**full(name), "model_type": BY_NAME[name].model_type}
    without = {key: value for key, value in config.items() if key != "architectures"} | named
    assert read_config(without, "test") == read_config(config, "test")
    assert read_described_config(without, "test") == read_config(config, "test")
    assert config_notes(without) == config_notes(config)

    (tmp_path / "config.json").write_text(json.dumps(without))
    assert directory_config(tmp_path, "model.path")["architectures"] == [name]
    assert derive_model_config(tmp_path, "vocabulary", 1)["architectures"] == [name]


def test_config_without_architecture_and_model_type_is_refused():
    with pytest.raises(ConfigError, match="architecture <none> is not supported"):
        read_config({**CONFIGS["LlamaForCausalLM"], "architectures": None}, "test")


def test_pad_token_id_of_minus_one_is_read_as_zero():
    assert read_config(LLAMA | {"pad_token_id": -1}, "test").pad_token_id == 0


def test_entries_unknown_to_transformers_are_listed():
    config = LLAMA | {"logit_scale": 2.0, "n_ctx": 8, "rope_scaling": LINEAR | {"beta_fast": 2}}
    read_config(config, "test")
    assert config_notes(config) == [
        "config.json: ignored entries that transformers' LlamaConfig does not know: logit_scale,"
        " n_ctx, rope_scaling.beta_fast"
    ]


def test_ignored_dropout_is_reported():
    config = LLAMA | {"attention_dropout": 0.1}
    assert config_notes(config) == [
        "config.json: models train without dropout; ignored: attention_dropout=0.1"
    ]


def test_described_model_without_a_size_is_refused():
    with pytest.raises(ConfigError, match=r"entries of config\.json are missing: hidden_size"):
        read_described_config(
            {key: value for key, value in LLAMA.items() if key != "hidden_size"}, "model.config"
        )


@pytest.mark.parametrize("name", NAMES)
def test_written_configuration_is_read_alike_by_transformers(name, caplog):
    written = hugging_face_config(read_config(full(name), "test"))
    assert_read_alike(written)
    assert config_notes(written) == []
    assert not [record for record in caplog.records if "rope" in record.message.lower()]


def test_supported_and_ineffective_entries_are_disjoint():
    assert not set(COMMON_SUPPORTED) & set(COMMON_WITHOUT_EFFECT)
    assert all(isinstance(architecture, Architecture) for architecture in ARCHITECTURES)


@pytest.mark.parametrize(
    ("own", "generated", "expected"),
    [
        ({}, None, (2,)),
        ({}, {"eos_token_id": [5]}, (5,)),
        ({}, {}, (2,)),
        ({"eos_token_id": 3}, {"eos_token_id": [5]}, (3, 5)),
        ({"eos_token_id": None}, {"eos_token_id": 5}, (5,)),
    ],
)
def test_default_eos_id_applies_only_if_none_is_given(own, generated, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | own))
    if generated is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generated))
    assert directory_shape(tmp_path, "model.path").eos_token_ids == expected
