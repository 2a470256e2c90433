"""Rotary positions of the queries and keys of a packed micro-batch (Su et al. 2021, "RoFormer")."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from aligner.megatron.packing import PackedSequences
from aligner.models.rotary import compute_rotation, rotate
from aligner.models.shape import Rope, compute_inverse_frequencies


def apply_rotation(x: Tensor, rope: Rope, rotary_dim: int, packed: PackedSequences) -> Tensor:
    """Return queries or keys [T/C, heads, dim] with rotary positions.

    Args:
        x: Queries or keys, [T/C, heads, dim].
        rope: Rotary positions.
        rotary_dim: Number of dimensions of which `rope.fraction` is rotated.
        packed: Description of the packed micro-batch.
    """
    if rope not in packed.rotations:
        # Angles are computed in float32, since bf16 cannot represent the positions of long
        # contexts. The first layer of a micro-batch computes them for all layers.
        angles = packed.positions[:, None, None].float() * torch.tensor(
            compute_inverse_frequencies(rope, rotary_dim), device=x.device
        )
        packed.rotations[rope] = compute_rotation(angles, rope, x.dtype)
    rotated: Tensor = _Rotate.apply(x, *packed.rotations[rope], rope.is_interleaved)
    return rotated


class _Rotate(Function):
    """Autograd function of `rotate`, whose gradient is the inverse rotation."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, cosine: Tensor, sine: Tensor, is_interleaved: bool
    ) -> Tensor:
        """Return `rotate` of queries or keys [T/C, heads, dim]."""
        context.save_for_backward(cosine, sine)
        context.is_interleaved = is_interleaved
        return rotate(x, cosine, sine, is_interleaved=is_interleaved)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient rotated by the negative angles."""
        cosine, sine = context.saved_tensors
        rotated = rotate(gradient, cosine, -sine, is_interleaved=context.is_interleaved)
        return rotated, None, None, None
