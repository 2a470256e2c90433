"""Rotary positions (Su et al. 2021, "RoFormer")."""

import torch
from torch import Tensor


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the first dimensions of each head, pair i being dimensions i and i + rotated / 2, as
    Llama has them.

    x [N, heads, head dim] of any layout, cosine and sine of the angles [N, 1, rotated / 2], to the
    same shape.
    """
    half = cosine.shape[-1]
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    turned[..., 2 * half :] = x[..., 2 * half :]
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.mul(first, cosine, out=turned[..., :half]).sub_(second * sine)
    torch.mul(second, cosine, out=turned[..., half : 2 * half]).add_(first * sine)
    return turned
