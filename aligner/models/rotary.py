"""Rotary position embeddings (Su et al. 2021, "RoFormer")."""

import torch
from torch import Tensor


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the first `rotated` dimensions of each head by the angles of the token's position.

    Pair i consists of the dimensions i and i + rotated / 2, as in Llama. The other dimensions are
    copied.

    Args:
        x: Queries or keys [N, heads, head dim] with any memory layout.
        cosine: Cosines of the angles [N, 1, rotated / 2].
        sine: Sines of the angles [N, 1, rotated / 2].

    Returns:
        A new tensor with the shape of `x`.
    """
    half = cosine.shape[-1]
    rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotated[..., 2 * half :] = x[..., 2 * half :]
    first = x[..., :half]
    second = x[..., half : 2 * half]
    # (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
    torch.mul(first, cosine, out=rotated[..., :half]).sub_(second * sine)
    torch.mul(second, cosine, out=rotated[..., half : 2 * half]).add_(first * sine)
    return rotated
