"""Small models and layouts for resharding tests, and a whole set of weights to cut slices from."""

from __future__ import annotations

import torch
from torch import Tensor

from aligner.config.model_shape import ModelShape
from aligner.config.weights import Slice, TensorSpec
from aligner.resharding.transport import slice_shape


def tiny_shape(layers: int = 4, tied: bool = True, kv_heads: int = 4) -> ModelShape:
    return ModelShape(layers, 16, 4, kv_heads, 4, 24, 32, 64, 1e-5, 10000.0, tied, (), 0)


def whole_weights(table: tuple[TensorSpec, ...], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in table}


def cut(whole: Tensor, piece: Slice) -> Tensor:
    return whole if piece.axis is None else whole.narrow(piece.axis, piece.start, piece.stop - piece.start)


def empty_views(table: tuple[TensorSpec, ...], slices: dict[str, Slice]) -> dict[str, Tensor]:
    """Views full of NaN: what is not written shows."""
    return {spec.name: torch.full(slice_shape(spec, slices[spec.name]), float("nan")) for spec in table}
