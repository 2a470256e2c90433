"""Losses, each a sum over masked tokens divided by a denominator.

Given no denominator a loss is the mean over its own mask. A caller that cuts a batch into parts passes the whole batch's
count, and then the parts' losses, statistics and gradients add up to the whole's, however it was cut. Statistics follow
the same rule; the one whose name ends in `_max` is a maximum.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Stats = dict[str, Tensor]
WeightLevel = Literal["token", "sequence"]


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
    proximal_logprobs: Tensor | None = None,
    behavior_weight_cap: float | None = None,
    behavior_level: WeightLevel = "token",
    denominator: float | None = None,
) -> tuple[Tensor, Stats]:
    """PPO's clipped surrogate, -min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A), r = exp(logprobs - old_logprobs).

    All [B, T] (Schulman et al. 2017, equation 7). Statistics: `loss`, `clip_fraction` (tokens whose clipped term is the
    smaller), `approx_kl` (k3 of old against new) and `ratio_max`.

    With `proximal_logprobs` the policy that r is taken against and the one that drew the tokens are two (decoupled
    objective: Hilton et al. 2022, "Batch size-invariance for policy optimization"): `old_logprobs` are those
    of the behavior policy, r = exp(logprobs - proximal_logprobs), and a token's term is multiplied by
    `behavior_weights(proximal_logprobs, old_logprobs, …)`, without a gradient. `approx_kl` is then that of the proximal
    policy, and two more statistics say of the tokens: `importance_mean`, their mean weight, and `importance_truncated`,
    the share whose weight the cap has cut. Under `behavior_level="sequence"` a row must be whole.
    Raises ValueError for a cap without `proximal_logprobs`.
    """
    if behavior_weight_cap is not None and proximal_logprobs is None:
        raise ValueError(f"behavior_weight_cap={behavior_weight_cap} has nothing to cap: give proximal_logprobs as well")
    mask = mask.bool()
    count = mask.sum().clamp(min=1) if denominator is None else denominator
    # Outside the mask the ratio is set to 1 before anything is multiplied, so that no NaN or infinity gets out.
    difference = torch.where(mask, logprobs - (old_logprobs if proximal_logprobs is None else proximal_logprobs), 0.0)
    ratio = difference.exp()
    surrogate = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    terms, importance = -torch.minimum(surrogate, clipped), {}
    if proximal_logprobs is not None:
        weights, truncated = behavior_weights(proximal_logprobs, old_logprobs, mask, behavior_weight_cap, behavior_level)
        terms = weights * terms
        importance = {
            "importance_mean": _masked_total(weights, mask, count),
            "importance_truncated": _masked_total(truncated.float(), mask, count),
        }
    loss = _masked_total(terms, mask, count)
    with torch.no_grad():
        stats = {
            "loss": loss.detach(),
            "clip_fraction": _masked_total((clipped < surrogate).float(), mask, count),
            "approx_kl": _masked_total(torch.expm1(difference) - difference, mask, count),
            "ratio_max": torch.where(mask, ratio, 0.0).amax(),
        }
    return loss, stats | importance


@torch.no_grad()
def behavior_weights(
    proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, cap: float | None, level: WeightLevel
) -> tuple[Tensor, Tensor]:
    """Truncated importance weights, min(proximal probability / behavior probability, cap), and which the cap has cut.

    All [B, T]; bool the second. The ratio is each token's own (Yao et al. 2025, "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training"), or the whole response's, exp of the sum over the row's mask, for each of its
    tokens (Liu et al. 2025, "When Speed Kills Stability"). No cap where None. Outside the mask a token's own weight is 1.
    """
    difference = torch.where(mask, proximal_logprobs - behavior_logprobs, 0.0)
    if level == "sequence":
        difference = difference.sum(-1, keepdim=True).expand_as(difference)
    weights = difference.exp()
    if cap is None:
        return weights, torch.zeros_like(mask)
    return weights.clamp(max=cap), weights > cap


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
