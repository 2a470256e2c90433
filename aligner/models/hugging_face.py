"""A shape as the entries of a Hugging Face `config.json`: what `families.read_config` reads, the other way round."""

from __future__ import annotations

import dataclasses
from typing import Any

from aligner.models.shape import ModelShape
from aligner.models.weight_slices import Head

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new"}

_MODEL_TYPES = {
    "Llama": "llama",
    "Mistral": "mistral",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Mixtral": "mixtral",
    "Qwen3Moe": "qwen3_moe",
    "GPTNeoX": "gpt_neox",
    "GPT2": "gpt2",
}


def hugging_face_config(shape: ModelShape, head: Head = "vocabulary") -> dict[str, Any]:
    """The configuration that `families.read_config` reads this shape from, with a language model's or a scalar head."""
    name = _reader_name(shape)
    causal = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    entries = _gpt2(shape) if name == "GPT2" else _rotary(shape) | _more(name, shape)
    return {
        "architectures": [causal if head == "vocabulary" else f"{name}ForSequenceClassification"],
        "model_type": _MODEL_TYPES[name],
        **entries,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_embeddings,
        "eos_token_id": list(shape.eos_token_ids),
        "pad_token_id": shape.pad_token_id,
        **({} if head == "vocabulary" else {"num_labels": 1}),
    }


def _reader_name(shape: ModelShape) -> str:
    names = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "gpt_neox": "GPTNeoX", "gpt2": "GPT2"}
    if shape.family in names:
        return names[shape.family]
    if shape.qk_norm:
        return "Qwen3"
    if shape.qkv_bias:
        return "Qwen2"
    return "Llama" if shape.sliding_window is None else "Mistral"


def _gpt2(shape: ModelShape) -> dict[str, Any]:
    return {
        "n_layer": shape.num_layers,
        "n_embd": shape.hidden_size,
        "n_head": shape.num_heads,
        "n_inner": shape.ffn_hidden_size,
        "n_positions": shape.max_positions,
        "layer_norm_epsilon": shape.norm_epsilon,
        "activation_function": _ACTIVATIONS[shape.activation],
    }


def _rotary(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_hidden_size,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": _ACTIVATIONS[shape.activation],
        "rope_parameters": _rope(shape),
    }


def _rope(shape: ModelShape) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": shape.rope_theta, "partial_rotary_factor": shape.rotary_fraction}
    scaling = shape.rope_scaling
    if scaling is None:
        return rope | {"rope_type": "default"}
    if scaling.kind == "linear":
        return rope | {"rope_type": "linear", "factor": scaling.factor}
    names = {
        "factor": "factor",
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
        "original_positions": "original_max_position_embeddings",
    }
    values = dataclasses.asdict(scaling)
    return rope | {"rope_type": scaling.kind, **{theirs: values[ours] for ours, theirs in names.items()}}


def _more(name: str, shape: ModelShape) -> dict[str, Any]:
    """What is a family's own."""
    if name == "GPTNeoX":
        return {"layer_norm_eps": shape.norm_epsilon, "use_parallel_residual": shape.parallel_residual}
    entries: dict[str, Any] = {"rms_norm_eps": shape.norm_epsilon}
    if name in ("Mistral", "Mixtral"):
        entries["sliding_window"] = shape.sliding_window
    if name == "Mixtral":
        entries |= {"num_local_experts": shape.num_experts, "num_experts_per_tok": shape.experts_per_token}
    if name == "Qwen3Moe":
        entries |= {
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.ffn_hidden_size,
            "norm_topk_prob": shape.normalize_expert_weights,
        }
    return entries
