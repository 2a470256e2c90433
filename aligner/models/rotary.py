"""Rotary position embeddings (Su et al. 2021, "RoFormer")."""

import torch
from torch import Tensor

from aligner.models.shape import Rope


def compute_rotation(angles: Tensor, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of angles, times the attention factor, for `rotate`.

    Args:
        angles: Angles in radians, float32 [N, 1, rotated / 2].
        rope: Rotary positions.
        dtype: Dtype of queries and keys.
    """
    cosine, sine = angles.cos(), angles.sin()
    if rope.attention_factor != 1:
        cosine, sine = cosine * rope.attention_factor, sine * rope.attention_factor
    return cosine.to(dtype), sine.to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, is_interleaved: bool = False) -> Tensor:
    """Rotate the first `rotated` dimensions of each head by the angles of the token's position.

    Pair i consists of the dimensions i and i + rotated / 2, as in Llama, or, if interleaved, of the
    dimensions 2i and 2i + 1. The other dimensions are copied.

    Args:
        x: Queries or keys [N, heads, head dim] with any memory layout.
        cosine: Cosines of the angles [N, 1, rotated / 2].
        sine: Sines of the angles [N, 1, rotated / 2].
        is_interleaved: Whether pairs are adjacent dimensions.

    Returns:
        A new tensor with the shape of `x`.
    """
    half = cosine.shape[-1]
    rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotated[..., 2 * half :] = x[..., 2 * half :]
    firsts, seconds = slice(half), slice(half, 2 * half)
    if is_interleaved:
        firsts, seconds = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    first = x[..., firsts]
    second = x[..., seconds]
    # (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
    torch.mul(first, cosine, out=rotated[..., firsts]).sub_(second * sine)
    torch.mul(second, cosine, out=rotated[..., seconds]).add_(first * sine)
    return rotated
