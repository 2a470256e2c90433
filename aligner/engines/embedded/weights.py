"""The embedded engine's storage of weights: fused matrices, seen from outside as Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aligner.config.model_shape import ModelShape
from aligner.config.schema import EngineParallel
from aligner.config.weights import engine_slices, weight_table
from aligner.data.weight_files import read_slices
from aligner.errors import ConfigError


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer's share of a tensor-parallel rank; q, k, v and gate, up lie below one another."""

    attention_norm: Tensor
    """[hidden]"""
    qkv: Tensor
    """[(heads + 2 * KV heads) * head dim, hidden]"""
    attention_out: Tensor
    """[hidden, heads * head dim]"""
    mlp_norm: Tensor
    """[hidden]"""
    gate_up: Tensor
    """[2 * ffn, hidden]"""
    mlp_out: Tensor
    """[hidden, ffn]"""
    qkv_bias: Tensor | None = None
    """[(heads + 2 * KV heads) * head dim], where the model has one"""
    query_norm: Tensor | None = None
    """[head dim], where the model normalizes queries and keys"""
    key_norm: Tensor | None = None
    """[head dim]"""


@dataclass(frozen=True)
class EngineWeights:
    """One tensor-parallel rank's share of the model."""

    embedding: Tensor
    """[vocabulary share, hidden]"""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    """[hidden]"""
    head: Tensor
    """[vocabulary share, hidden]; the embedding itself when tied"""
    views: Mapping[str, Tensor]
    """Every tensor of the weight table by its Hugging Face name, as this rank's slice of the storage above."""


def check_divisible(shape: ModelShape, tensor: int) -> None:
    """Raise ConfigError when the model can not be cut into `tensor` even parts."""
    counts = {
        "attention heads": shape.num_heads,
        "KV heads": shape.num_kv_heads,
        "FFN columns": shape.ffn_hidden_size,
        "vocabulary entries": shape.vocab_size,
    }
    for what, count in counts.items():
        if count % tensor:
            raise ConfigError(f"engine.parallel.tensor={tensor}: {count} {what} do not divide by {tensor}")


def allocate(shape: ModelShape, tensor: int, device: torch.device, dtype: torch.dtype) -> EngineWeights:
    """Uninitialised storage for one of `tensor` tensor-parallel ranks."""

    def empty(*size: int) -> Tensor:
        return torch.empty(*size, device=device, dtype=dtype)

    hidden, vocab, ffn = shape.hidden_size, shape.vocab_size // tensor, shape.ffn_hidden_size // tensor
    q_rows, kv_rows = (heads * shape.head_dim // tensor for heads in (shape.num_heads, shape.num_kv_heads))
    views: dict[str, Tensor] = {}
    layers = []
    for index in range(shape.num_layers):
        layer = LayerWeights(
            attention_norm=empty(hidden),
            qkv=empty(q_rows + 2 * kv_rows, hidden),
            attention_out=empty(hidden, q_rows),
            mlp_norm=empty(hidden),
            gate_up=empty(2 * ffn, hidden),
            mlp_out=empty(hidden, ffn),
            qkv_bias=empty(q_rows + 2 * kv_rows) if shape.qkv_bias else None,
            query_norm=empty(shape.head_dim) if shape.qk_norm else None,
            key_norm=empty(shape.head_dim) if shape.qk_norm else None,
        )
        layers.append(layer)
        q, k, v = layer.qkv.split((q_rows, kv_rows, kv_rows))
        gate, up = layer.gate_up.split(ffn)
        parts = {
            "input_layernorm.weight": layer.attention_norm,
            "self_attn.q_proj.weight": q,
            "self_attn.k_proj.weight": k,
            "self_attn.v_proj.weight": v,
            "self_attn.o_proj.weight": layer.attention_out,
            "post_attention_layernorm.weight": layer.mlp_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": layer.mlp_out,
        }
        if layer.qkv_bias is not None:
            biases = layer.qkv_bias.split((q_rows, kv_rows, kv_rows))
            parts |= {f"self_attn.{at}_proj.bias": view for at, view in zip("qkv", biases, strict=True)}
        if layer.query_norm is not None and layer.key_norm is not None:
            parts |= {"self_attn.q_norm.weight": layer.query_norm, "self_attn.k_norm.weight": layer.key_norm}
        views |= {f"model.layers.{index}.{name}": view for name, view in parts.items()}
    embedding, final_norm = empty(vocab, hidden), empty(hidden)
    head = embedding if shape.tied_embeddings else empty(vocab, hidden)
    views |= {"model.embed_tokens.weight": embedding, "model.norm.weight": final_norm}
    if not shape.tied_embeddings:
        views["lm_head.weight"] = head
    return EngineWeights(embedding, tuple(layers), final_norm, head, views)


def load_safetensors(
    directory: Path, shape: ModelShape, layout: EngineParallel, rank: int, views: Mapping[str, Tensor]
) -> None:
    """Read one rank's slices of a Hugging Face directory into `views`; nothing else is read from the disk.

    Raises ConfigError naming the directory and every tensor that is missing or of another shape.
    """
    table = weight_table(shape)
    for name, tensor in read_slices(directory, table, engine_slices(table, layout, rank)):
        views[name].copy_(tensor)
