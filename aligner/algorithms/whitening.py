"""Means and whitening over masked tensors."""

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the values where `mask` is true; over everything, or along `dim`. 0 where nothing is
    chosen."""
    chosen = torch.where(mask.bool(), values, 0.0)
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    total = chosen.sum() if dim is None else chosen.sum(dim)
    return total / count.clamp(min=1)


def masked_whiten(
    values: Tensor, mask: Tensor, shift_mean: bool = True, dim: int | None = None
) -> Tensor:
    """Values scaled to variance 1 over the mask, and to mean 0 unless `shift_mean` is false; 0
    outside the mask.

    Over everything, or along `dim`. Population variance, 1/√(variance + 1e-8) (Huang et al. 2023,
    "The N Implementation Details of RLHF with PPO", detail 11). Values that are all equal have
    exactly no deviation from their mean.
    """

    def mean_of(tensor: Tensor) -> Tensor:
        mean = masked_mean(tensor, mask, dim)
        return mean if dim is None else mean.unsqueeze(dim)

    def largest_of(tensor: Tensor) -> Tensor:
        inside = torch.where(mask.bool(), tensor, -torch.inf)
        return inside.max() if dim is None else inside.amax(dim, keepdim=True)

    mean = mean_of(values)
    # The mean of equal values is rounded, and what is left of them would be blown up.
    centered = torch.where(largest_of(values) == -largest_of(-values), 0.0, values - mean)
    variance = mean_of(centered.square())
    whitened = centered * torch.rsqrt(variance + 1e-8)
    return torch.where(mask.bool(), whitened if shift_mean else whitened + mean, 0.0)
