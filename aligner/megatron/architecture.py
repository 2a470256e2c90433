"""A model's shape in megatron-core's terms: what its TransformerConfig and its GPTModel want to know."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from aligner.models.shape import ModelShape, inverse_frequencies

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


def architecture_settings(shape: ModelShape) -> dict[str, Any]:
    """The arguments of a TransformerConfig that the model's shape decides."""
    window = shape.sliding_window
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "normalization": {"rms": "RMSNorm", "layer": "LayerNorm"}[shape.normalization],
        "layernorm_epsilon": shape.norm_epsilon,
        "qk_layernorm": shape.qk_norm,
        "gated_linear_unit": shape.gated,
        "activation_func": _ACTIVATIONS[shape.activation],
        "add_bias_linear": shape.linear_bias,
        "add_qkv_bias": shape.qkv_bias,
        # Ours counts the token itself, megatron-core's the tokens before it and after it.
        "window_size": None if window is None else (window - 1, 0),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **(_expert_settings(shape) if shape.num_experts else {}),
    }


def _expert_settings(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.ffn_hidden_size,
        # A softmax over the chosen experts alone is one over all of them, scaled so that the chosen sum to one.
        "moe_router_pre_softmax": not shape.normalize_expert_weights,
        # The choice of experts is sensitive to rounding, so it is made in fp32 whatever the layers compute in.
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # Grouped products need transformer-engine and put all experts in one parameter: one module an expert instead.
        "moe_grouped_gemm": False,
    }


def gpt_arguments(shape: ModelShape) -> dict[str, Any]:
    """The arguments of a GPTModel that the model's shape decides, apart from its layers and head."""
    return {
        "vocab_size": shape.vocab_size,
        "max_sequence_length": shape.max_positions,
        "position_embedding_type": {"rotary": "rope", "learned": "learned_absolute"}[shape.position],
        "rotary_percent": shape.rotary_fraction,
    }


def set_rotary_frequencies(model: GPTModel, shape: ModelShape) -> None:
    """Give the model the frequencies that the engines use too, every scaling included; call before its first forward pass.

    They stay float32 whatever the model's type: positions of long contexts need the digits.
    """
    if shape.position == "rotary":
        model.rotary_pos_emb.inv_freq = torch.tensor(inverse_frequencies(shape), dtype=torch.float32)
