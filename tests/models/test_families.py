"""Names and shapes of weights, and rotary frequencies, equal those of transformers; unsupported
configurations are refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from aligner.errors import ConfigError
from aligner.models.architectures import ARCHITECTURES
from aligner.models.hugging_face import hugging_face_config, read_config
from aligner.models.shape import ModelShape, compute_inverse_frequencies
from aligner.models.weight_slices import weight_table

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}
GLM_EXPERTS = {
    "n_routed_experts": 32,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
HYBRID = {
    "head_dim": 8,
    # the layer before the last one has a delta net, the last one has attention
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
CONFIGS = {
    "LlamaForCausalLM": SIZES,
    "MistralForCausalLM": SIZES,
    "Qwen2ForCausalLM": SIZES,
    "Qwen3ForCausalLM": SIZES | {"head_dim": 8},
    "MixtralForCausalLM": SIZES | EXPERTS,
    "Qwen3MoeForCausalLM": SIZES | EXPERTS | {"head_dim": 8},
    "Qwen2MoeForCausalLM": SIZES | EXPERTS | {"shared_expert_intermediate_size": 20},
    "Glm4MoeForCausalLM": SIZES | GLM_EXPERTS | {"head_dim": 8, "use_qk_norm": True},
    "MiniMaxM2ForCausalLM": SIZES | EXPERTS | {"head_dim": 8},
    "OlmoeForCausalLM": SIZES | EXPERTS,
    "SmolLM3ForCausalLM": SIZES,
    "GraniteForCausalLM": SIZES,
    "Phi3ForCausalLM": SIZES,
    "Olmo2ForCausalLM": SIZES,
    "Olmo3ForCausalLM": SIZES,
    "Gemma2ForCausalLM": SIZES | {"head_dim": 8},
    "Gemma3ForCausalLM": SIZES | {"head_dim": 8},
    "Glm4ForCausalLM": SIZES | {"head_dim": 8},
    "SeedOssForCausalLM": SIZES | {"head_dim": 8},
    "DeepseekV3ForCausalLM": SIZES | LATENT | GLM_EXPERTS,
    "DeepseekV2ForCausalLM": SIZES | LATENT | GLM_EXPERTS | {"topk_method": "group_limited_greedy"},
    "Qwen3NextForCausalLM": SIZES | HYBRID | EXPERTS,
    "Qwen3_5ForCausalLM": SIZES | HYBRID,
    "Qwen3_5MoeForCausalLM": SIZES | HYBRID | EXPERTS,
    "GptOssForCausalLM": SIZES | EXPERTS | {"head_dim": 8},
    "GPTNeoXForCausalLM": SIZES,
    "GPT2LMHeadModel": {
        "n_layer": 2,
        "n_embd": 16,
        "n_head": 4,
        "vocab_size": 32,
        "n_positions": 64,
    },
}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_weight_table_equals_saved_transformers_model(architecture, tmp_path):
    import transformers
    from safetensors import safe_open

    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**CONFIGS[architecture], eos_token_id=1, pad_token_id=0)
    model_class(config).save_pretrained(tmp_path)
    shape = read_config(json.loads((tmp_path / "config.json").read_text()), "test")
    with safe_open(str(tmp_path / "model.safetensors"), framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {
        spec.stored_range.name: spec.stored_range.shape for spec in weight_table(shape)
    } == saved


def frequencies(shape: ModelShape) -> list[float]:
    """Return the rotary frequencies of the first layer."""
    rope = shape.layers[0].rope
    assert rope is not None
    return compute_inverse_frequencies(rope, shape.rotary_dim)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        LLAMA3,
        YARN,
        # the entries of Qwen3 and of gpt-oss, and those of DeepSeek-V3
        YARN | {"original_max_position_embeddings": 32768, "rope_theta": 1e6},
        YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "rope_theta": 150000.0},
        YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
        YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": None},
        YARN | {"attention_factor": 1.5, "beta_fast": 8, "beta_slow": 2},
        YARN | {"factor": 1.0},
    ],
    ids=str,
)
def test_rotary_frequencies_equal_transformers(rope):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**(SIZES | {"hidden_size": 256}), rope_parameters=rope)
    shape = read_config(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, "test")
    expected = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(torch.tensor(frequencies(shape)), expected.inv_freq)
    assert shape.layers[0].rope is not None
    assert shape.layers[0].rope.attention_factor == pytest.approx(expected.attention_scaling)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        YARN,
        YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
        YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.5},
        YARN | {"factor": 1.0, "mscale_all_dim": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("version", ["V2", "V3"])
def test_latent_attention_scales_equal_transformers(version, rope):
    import transformers
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    name = f"Deepseek{version}"
    sizes = SIZES | LATENT | GLM_EXPERTS
    config = getattr(transformers, f"{name}Config")(**sizes, rope_parameters=rope)
    module = {"V2": v2, "V3": v3}[version]
    architecture = {"architectures": [f"{name}ForCausalLM"]}
    shape = read_config(config.to_dict() | architecture, "test")
    attention = getattr(module, f"{name}Attention")(config, 0)
    assert shape.softmax_scale == pytest.approx(attention.scaling, rel=1e-12)
    rotary = getattr(module, f"{name}RotaryEmbedding")(config)
    torch.testing.assert_close(torch.tensor(frequencies(shape)), rotary.inv_freq)
    assert shape.layers[0].rope is not None
    assert shape.layers[0].rope.attention_factor == pytest.approx(rotary.attention_scaling)
    assert read_config(hugging_face_config(shape), "test") == shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 6}, "head_dim=6 is not supported; supported: 4, which follows from"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported; supported: the"),
        ({"v_head_dim": 11}, "v_head_dim=11: must be at most qk_nope_head_dim + qk_rope_head_dim"),
        ({"rope_interleave": 1}, "rope_interleave=1: must be true or false"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
            "mscale_all_dim=1.0 with rope scaling 'linear' is not supported; supported: yarn",
        ),
    ],
)
def test_unsupported_latent_attention_is_refused(change, message):
    config = SIZES | LATENT | {"architectures": ["DeepseekV3ForCausalLM"]} | change
    with pytest.raises(ConfigError, match="origin: ") as caught:
        read_config(config, "origin")
    assert message in str(caught.value)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("more", [{}, {"factor": 4.0}, {"attention_factor": 1.25}], ids=str)
@pytest.mark.parametrize("outer", [{}, {"original_max_position_embeddings": 16}], ids=str)
def test_longrope_equals_transformers_within_the_original_context(name, more, outer):
    """Phi-3 has other names for this scaling, and a default of 4096 original positions."""
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    sizes = SIZES | {"hidden_size": 32, "max_position_embeddings": 8192}
    config = sizes | {"rope_parameters": LONGROPE | {"rope_type": name} | more} | outer
    shape = read_config(copy.deepcopy(config) | {"architectures": ["Phi3ForCausalLM"]}, "test")
    rotary = Phi3RotaryEmbedding(Phi3Config(**copy.deepcopy(config)))
    assert shape.layers[0].rope is not None
    torch.testing.assert_close(torch.tensor(frequencies(shape)), rotary.inv_freq)
    assert shape.layers[0].rope.attention_factor == pytest.approx(rotary.attention_scaling)
    assert shape.max_positions == outer.get("original_max_position_embeddings", 4096)


@pytest.mark.parametrize("factors", [[1.0], [1.0] * 5, [1.0, 2.0, 0.0, 1.0], None, ["1"] * 4])
def test_longrope_with_wrong_factors_is_refused(factors):
    config = SIZES | {"hidden_size": 32, "architectures": ["Phi3ForCausalLM"]}
    rope = LONGROPE | {"short_factor": factors}
    with pytest.raises(ConfigError, match="short_factor: must be a list of 4 numbers > 0"):
        read_config(config | {"rope_parameters": rope}, "test")


def test_old_rope_entries_are_read_like_new_ones():
    old = SIZES | {
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 500.0,
        "rope_scaling": LLAMA3 | {"rope_theta": 500.0},
    }
    new = SIZES | {"architectures": ["LlamaForCausalLM"], "rope_parameters": LLAMA3}
    assert read_config(old, "test") == read_config(new, "test")
    pythia = SIZES | {"architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu"}
    for entries, fraction in (({"rotary_pct": 0.5}, 0.5), ({}, 0.25)):
        rope = read_config(pythia | entries, "test").layers[0].rope
        assert rope is not None and rope.fraction == fraction


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": "LlamaForCausalLM"},
            "architectures='LlamaForCausalLM': must be a list of names",
        ),
        ({"architectures": [["LlamaForCausalLM"]]}, "must be a list of names"),
        (
            {"architectures": ["BertForMaskedLM"]},
            "BertForMaskedLM is not supported; supported: LlamaForCausalLM, Mistral",
        ),
        ({"is_causal": False}, "is_causal=False is not supported; supported: True"),
        (
            {"rope_parameters": {"rope_type": "mrope"}},
            "rope scaling 'mrope' is not supported; supported: default, linear, dynamic, llama3,"
            " yarn",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3"}},
            "rope scaling llama3: required entries are missing: factor, low_freq_factor",
        ),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
        ({"hidden_size": None}, "required entries of config.json are missing: hidden_size"),
    ],
)
def test_unsupported_config_is_refused_with_entry_name(change, message):
    config = SIZES | {"architectures": ["LlamaForCausalLM"]} | change
    with pytest.raises(ConfigError, match="origin: ") as caught:
        read_config(config, "origin")
    assert message in str(caught.value)


def test_kimi_k2_is_read_as_deepseek_v3():
    config = SIZES | LATENT | GLM_EXPERTS | {"architectures": ["DeepseekV3ForCausalLM"]}
    expected = read_config(config, "test")
    assert read_config(config | {"model_type": "kimi_k2"}, "test") == expected
    with pytest.raises(ConfigError, match="model_type='kimi_linear' contradicts architectures="):
        read_config(config | {"model_type": "kimi_linear"}, "test")


@pytest.mark.parametrize("content", [[], "llama", 3, None])
def test_config_that_is_not_an_object_is_refused(content):
    with pytest.raises(
        ConfigError,
        match=r"^here: config\.json must be a JSON object, got (list|str|int|NoneType)$",
    ):
        read_config(content, "here")


def test_each_family_has_causal_and_scalar_architectures():
    assert len(ARCHITECTURES) == len(CONFIGS)
