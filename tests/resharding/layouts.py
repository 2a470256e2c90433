"""Small models of every family, their whole weights, and slices of these weights."""

from __future__ import annotations

import torch
from torch import Tensor

from aligner.models.shape import Experts, LayerShape, ModelShape, Rope
from aligner.models.weight_slices import Slice, TensorSpec

LAYERS = 4


def tiny_shape(
    family: str = "llama", tied: bool = True, qkv_bias: bool = False, kv_heads: int = 4
) -> ModelShape:
    """Return a shape with four layers and sizes divisible by 4; four experts for mixtures.

    Families that never share KV heads have four KV heads.
    """
    has_experts = family in ("mixtral", "qwen3_moe")
    return ModelShape(
        (LayerShape(Rope(10000.0), has_experts=has_experts),) * LAYERS,
        hidden_size=16,
        num_heads=4,
        num_kv_heads=4 if family in ("gpt2", "gpt_neox") else kv_heads,
        head_dim=4,
        ffn_hidden_size=24,
        vocab_size=32,
        max_positions=64,
        norm_epsilon=1e-5,
        tied_embeddings=tied,
        eos_token_ids=(),
        pad_token_id=0,
        family=family,
        qkv_bias=qkv_bias,
        experts=Experts(count=4, per_token=2, ffn_hidden_size=24) if has_experts else None,
    )


def whole_weights(table: tuple[TensorSpec, ...], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in table}


def cut(whole: Tensor, piece: Slice) -> Tensor:
    """Return a contiguous slice, as a rank holds it."""
    return (
        whole
        if piece.axis is None
        else whole.narrow(piece.axis, piece.start, piece.stop - piece.start)
    ).contiguous()
