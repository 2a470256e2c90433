"""Losses, each a sum over masked tokens divided by a denominator.

Given no denominator a loss is the mean over its own mask. A caller that cuts a batch into parts passes the whole batch's
count, and then the parts' losses, statistics and gradients add up to the whole's, however it was cut. Statistics follow
the same rule; the one whose name ends in `_max` is a maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor

Stats = dict[str, Tensor]


def _masked_total(values: Tensor, mask: Tensor, denominator: float | Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum() / denominator


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    denominator: float | None = None,
) -> tuple[Tensor, Stats]:
    """PPO's clipped surrogate, -min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A), r = exp(logprobs - old_logprobs).

    All [B, T] (Schulman et al. 2017, equation 7). Statistics: `loss`, `clip_fraction` (tokens whose clipped term is the
    smaller), `approx_kl` (k3 of old against new) and `ratio_max`.
    """
    mask = mask.bool()
    count = mask.sum().clamp(min=1) if denominator is None else denominator
    # Outside the mask the ratio is set to 1 before anything is multiplied, so that no NaN or infinity gets out.
    difference = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = difference.exp()
    surrogate = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = _masked_total(-torch.minimum(surrogate, clipped), mask, count)
    with torch.no_grad():
        stats = {
            "loss": loss.detach(),
            "clip_fraction": _masked_total((clipped < surrogate).float(), mask, count),
            "approx_kl": _masked_total(torch.expm1(difference) - difference, mask, count),
            "ratio_max": torch.where(mask, ratio, 0.0).amax(),
        }
    return loss, stats


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float,
    denominator: float | None = None,
) -> tuple[Tensor, Stats]:
    """Clipped value loss, ½·max((V - R)², (clip(V, V_old ± clip) - R)²), all [B, T].

    Huang et al. 2023, "The N Implementation Details of RLHF with PPO", detail 12. Statistics: `loss` and `clip_fraction`
    (tokens whose clipped term is the larger).
    """
    mask = mask.bool()
    count = mask.sum().clamp(min=1) if denominator is None else denominator
    values = torch.where(mask, values, 0.0)
    old_values = torch.where(mask, old_values, 0.0)
    returns = torch.where(mask, returns, 0.0)
    clipped = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    loss = 0.5 * _masked_total(torch.maximum(plain_error, clipped_error), mask, count)
    with torch.no_grad():
        stats = {"loss": loss.detach(), "clip_fraction": _masked_total((clipped_error > plain_error).float(), mask, count)}
    return loss, stats
