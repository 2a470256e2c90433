"""Losses of tokens, each a sum over masked tokens divided by a denominator; those of pairs are in
`preference_losses`.

Given no denominator a loss is the mean over its own mask. A caller that cuts a batch into parts
passes the whole batch's count, and then the parts' losses, statistics and gradients add up to the
whole's, however it was cut by rows. Statistics follow the same rule; the one whose name ends in
`_max` is a maximum. Where a loss takes `weights` [B, T], they multiply each token's terms, in the
loss and in those sums: 1 / the row's tokens, with the number of rows as denominator, makes the mean
of the rows' means. What stands outside a mask reaches no loss, statistic or gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from aligner.algorithms.preference_losses import pair_loss
from aligner.data.types import Experience, ScoredSamples, Stats
from aligner.schema import AlgorithmConfig

_LARGEST_LOG_RATIO = 20.0
"""A ratio is at most exp of this: the product of a long response's ratios must not overflow, whose
gradient is NaN."""


def total_over(
    mask: Tensor, weights: Tensor | None, denominator: float | None
) -> Callable[[Tensor], Tensor]:
    """The sum of terms [B, T] over a bool mask, times `weights` [B, T], over the denominator: the
    mask's count where None."""
    count = mask.sum().clamp(min=1) if denominator is None else denominator
    inside = None if weights is None else torch.where(mask, weights, 0.0)

    def total(terms: Tensor) -> Tensor:
        chosen = torch.where(mask, terms, 0.0)
        return (chosen if inside is None else chosen * inside).sum() / count

    return total


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_level: str = "token",
    proximal_logprobs: Tensor | None = None,
    behavior_weight_cap: float | None = None,
    behavior_level: str = "token",
    above_behavior_cap: str = "drop",
    weights: Tensor | None = None,
    denominator: float | None = None,
) -> tuple[Tensor, Stats]:
    """PPO's clipped surrogate, -min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A), r = exp(logprobs
    - old_logprobs).

    All [B, T] (Schulman et al. 2017, equation 7). Statistics: `loss`, `clip_fraction` (tokens whose
    clipped term is the smaller), `approx_kl` (k3 of old against new, token by token) and
    `ratio_max`.

    `ratio_level` says whose ratio r is: each token's own, or one for all tokens of a row, which
    then must be whole: the geometric mean of theirs (sequence: GSPO; Zheng et al. 2025, "Group
    Sequence Policy Optimization", equation 7) or their product (sequence_product: proximal RLOO;
    Noukhovitch et al. 2024, "Asynchronous RLHF"). With `dual_clip` c, where A < 0 the loss is at
    most -c·A (Ye et al. 2020, "Mastering Complex Control in MOBA Games", equation 5), and the
    statistic `dual_clip_fraction` tells how often it would have been more.

    With `proximal_logprobs` the policy that r is taken against and the one that drew the tokens are
    two (decoupled objective: Hilton et al. 2022, "Batch size-invariance for policy optimization"):
    `old_logprobs` are those of the behavior policy, r = exp(logprobs - proximal_logprobs), and a
    token's term is multiplied by `behavior_weights(proximal_logprobs, old_logprobs, …)`, without a
    gradient. `approx_kl` is then that of the proximal policy, and two more statistics say of the
    tokens: `importance_mean`, their mean weight, and `importance_truncated`, the share whose weight
    was above the cap. How far the behavior policy is from the proximal one no update changes. Under
    `behavior_level="sequence"` a row must be whole. Raises ValueError for a cap without
    `proximal_logprobs`, a `dual_clip` below 1, and unknown names.
    """
    if behavior_weight_cap is not None and proximal_logprobs is None:
        raise ValueError(f"behavior_weight_cap={behavior_weight_cap}: requires proximal_logprobs")
    mask = mask.bool()
    total = total_over(mask, weights, denominator)
    difference = _difference(
        logprobs, old_logprobs if proximal_logprobs is None else proximal_logprobs, mask
    )
    advantages = torch.where(mask, advantages, 0.0)
    ratio = _ratio(difference, mask, ratio_level)
    surrogate = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    terms, stats = -torch.minimum(surrogate, clipped), {}
    if dual_clip is not None:
        terms, bounded = _dual_clipped(terms, advantages, dual_clip)
        stats["dual_clip_fraction"] = total(bounded)
    if proximal_logprobs is not None:
        importance, above = behavior_weights(
            proximal_logprobs,
            old_logprobs,
            mask,
            behavior_weight_cap,
            behavior_level,
            above_behavior_cap,
        )
        terms = importance * terms
        stats["importance_mean"] = total(importance)
        stats["importance_truncated"] = total(above)
    loss = total(terms)
    return loss, _ratio_stats(loss, difference, ratio, clipped < surrogate, mask, total) | stats


@torch.no_grad()
def behavior_weights(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    cap: float | None,
    level: str,
    above_cap: str = "drop",
) -> tuple[Tensor, Tensor]:
    """Importance weights, proximal probability / behavior probability, and which of them were above
    the cap.

    All [B, T]; bool the second. The ratio is each token's own (Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training"), or the whole response's, exp of the sum
    over the row's mask, for each of its tokens (Liu et al. 2025, "When Speed Kills Stability"). A
    ratio above the cap becomes 0, so that the token drops out of the loss (Fu et al. 2025,
    "AReaL"), or the cap (truncate). No cap where None. Outside the mask a token's own weight is 1.
    """
    levels = {"token": "token", "sequence": "sequence_product"}
    if level not in levels:
        raise ValueError(f"unknown level of behavior weights {level!r}; allowed: token, sequence")
    if above_cap not in ("drop", "truncate"):
        raise ValueError(
            f"unknown treatment of weights above the cap {above_cap!r}; allowed: drop, truncate"
        )
    mask = mask.bool()
    weights = _ratio(_difference(proximal_logprobs, behavior_logprobs, mask), mask, levels[level])
    if cap is None:
        return weights, torch.zeros_like(mask)
    above = weights > cap
    return torch.where(above, cap if above_cap == "truncate" else 0.0, weights), above


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    weights: Tensor | None = None,
    denominator: float | None = None,
) -> tuple[Tensor, Stats]:
    """-w·A·logprobs, w = clip(exp(logprobs - old_logprobs), 1 - clip_low, 1 + clip_high) without a
    gradient; all [B, T].

    No token loses its gradient to the clip (Chen et al. 2025, "MiniMax-M1", equation 4). Statistics
    as those of `policy_loss`; `clip_fraction` are the tokens whose weight was clipped.
    """
    mask = mask.bool()
    total = total_over(mask, weights, denominator)
    difference = _difference(logprobs, old_logprobs, mask).detach()
    ratio = _ratio(difference, mask, "token")
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    terms = -clipped * torch.where(mask, advantages, 0.0) * torch.where(mask, logprobs, 0.0)
    loss = total(terms)
    return loss, _ratio_stats(loss, difference, ratio, clipped != ratio, mask, total)


def reinforce_loss(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    weights: Tensor | None = None,
    denominator: float | None = None,
) -> tuple[Tensor, Stats]:
    """The policy gradient's -A·logprobs, all [B, T], of tokens that the policy itself has drawn
    (Williams 1992).

    Statistics: `loss`.
    """
    mask = mask.bool()
    terms = -torch.where(mask, advantages, 0.0) * torch.where(mask, logprobs, 0.0)
    loss = total_over(mask, weights, denominator)(terms)
    return loss, {"loss": loss.detach()}


def contrastive_policy_gradient_loss(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    scores: Tensor,
    mask: Tensor,
    *,
    group_size: int,
    kl_coefficient: float,
    importance: Tensor | None = None,
    denominator: float | None = None,
) -> tuple[Tensor, Stats]:
    """-Σ_i (R_i - mean of the other R_j)·logp_i over a group's rows, R_i = score_i -
    kl_coefficient·(logp_i - reference_i).

    logp and reference are sums over a row's mask, and R has no gradient. For a pair the gradient is
    that of -(Δscore - ½·kl_coefficient·Δ)·Δ, Δ the difference of the two rows' logp - reference
    (Flet-Berliac et al. 2024, "Contrastive Policy Gradient"), whose optimum is the same whoever
    drew the rows; how fast it is reached is not, so that `importance` [B] may weigh each row's
    term. The rows of a group are next to each other; one without a masked token counts for nothing
    in it, nor does one that is left alone.

    Log-probs and mask [B, T], scores [B]; the denominator is the number of rows where None.
    Statistics: `loss`, and `reference_kl`, logp - reference a row. Raises ValueError for a group
    without others, or that B is no multiple of.
    """
    if group_size < 2 or len(scores) % group_size:
        raise ValueError(
            f"group_size={group_size}: must be >= 2 and must divide the number of rows,"
            f" {len(scores)}"
        )
    mask = mask.bool()
    count = float(max(len(scores), 1)) if denominator is None else denominator
    answers = torch.where(mask, logprobs, 0.0).sum(-1)
    with torch.no_grad():
        present = mask.any(-1)
        kl = _difference(logprobs, reference_logprobs, mask).sum(-1)
        regularized = torch.where(present, scores - kl_coefficient * kl, 0.0).view(-1, group_size)
        others = present.view(-1, group_size).sum(1, keepdim=True) - 1
        baseline = (regularized.sum(1, keepdim=True) - regularized) / others.clamp(min=1)
        advantages = torch.where(others > 0, regularized - baseline, 0.0).flatten()
    terms = advantages * answers if importance is None else importance * advantages * answers
    loss = -terms.sum() / count
    return loss, {"loss": loss.detach(), "reference_kl": kl.sum() / count}


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float,
    denominator: float | None = None,
) -> tuple[Tensor, Stats]:
    """Clipped value loss, ½·max((V - R)², (clip(V, V_old ± clip) - R)²), all [B, T].

    Huang et al. 2023, "The N Implementation Details of RLHF with PPO", detail 12. Statistics:
    `loss` and `clip_fraction` (tokens whose clipped term is the larger).
    """
    mask = mask.bool()
    total = total_over(mask, None, denominator)
    values = torch.where(mask, values, 0.0)
    old_values = torch.where(mask, old_values, 0.0)
    returns = torch.where(mask, returns, 0.0)
    clipped = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    loss = 0.5 * total(torch.maximum(plain_error, clipped_error))
    return loss, {"loss": loss.detach(), "clip_fraction": total(clipped_error > plain_error)}


def cross_entropy_loss(
    logprobs: Tensor, mask: Tensor, denominator: float | None = None, weights: Tensor | None = None
) -> Tensor:
    """-logprobs of the tokens to be imitated; log-probs and mask [B, T], to a scalar."""
    return -total_over(mask.bool(), weights, denominator)(logprobs)


def token_label_loss(
    values: Tensor, labels: Tensor, mask: Tensor, denominator: float | None = None
) -> Tensor:
    """Binary cross entropy of σ(values) against labels within 0 and 1, on the labeled tokens; all
    [B, T], to a scalar.

    A process reward model's (Lightman et al. 2023, "Let's Verify Step by Step").
    """
    mask = mask.bool()
    values = torch.where(mask, values, 0.0)
    errors = binary_cross_entropy_with_logits(
        values, torch.where(mask, labels, 0.0).to(values.dtype), reduction="none"
    )
    return total_over(mask, None, denominator)(errors)


def _difference(logprobs: Tensor, anchor: Tensor, mask: Tensor) -> Tensor:
    """logprobs - anchor, 0 outside the mask: chosen before anything is multiplied, so that no NaN
    or infinity gets out."""
    return torch.where(mask, logprobs - anchor, 0.0)


def _ratio(difference: Tensor, mask: Tensor, level: str) -> Tensor:
    """exp of the log-probs' difference, which is 0 outside the mask, at a level; [B, T]."""
    if level not in ("token", "sequence", "sequence_product"):
        raise ValueError(
            f"unknown ratio_level {level!r}; allowed: token, sequence, sequence_product"
        )
    if level != "token":
        total = difference.sum(-1, keepdim=True)
        if level == "sequence":
            total = total / mask.sum(-1, keepdim=True).clamp(min=1)
        difference = total.expand_as(difference)
    return difference.clamp(max=_LARGEST_LOG_RATIO).exp()


def _dual_clipped(terms: Tensor, advantages: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """The terms, at most -bound·A where A < 0, and which of them were more."""
    if bound < 1:
        raise ValueError(
            f"dual_clip={bound}: must be >= 1, because dual clipping bounds the loss of tokens"
            " whose importance ratio is > 1"
        )
    bounded = (advantages < 0) & (terms > -bound * advantages)
    return torch.where(bounded, -bound * advantages, terms), bounded


def _k3(difference: Tensor) -> Tensor:
    """KL(anchor ‖ policy) from samples of the anchor, difference being policy - anchor (Schulman
    2020)."""
    return torch.expm1(difference) - difference


@torch.no_grad()
def _ratio_stats(
    loss: Tensor,
    difference: Tensor,
    ratio: Tensor,
    clipped: Tensor,
    mask: Tensor,
    total: Callable[[Tensor], Tensor],
) -> Stats:
    return {
        "loss": loss.detach(),
        "clip_fraction": total(clipped),
        "approx_kl": total(_k3(difference)),
        "ratio_max": torch.where(mask, ratio, 0.0).amax(),
    }


@dataclass(frozen=True)
class LossContext:
    """What a loss of some rows needs to know of the minibatch that they are a part of."""

    settings: AlgorithmConfig
    """The configuration's `algorithm`."""
    kl_coefficient: float
    """As it is now. A penalty in the loss is added to what a loss gives, as is an entropy bonus."""
    denominator: float
    """Response tokens of the minibatch; its rows where the loss compares rows."""
    weights: Tensor | None
    """float32 [B, S-1]: each token's, by `algorithm.aggregation`; all are 1 where None."""

    @property
    def sums(self) -> dict[str, Any]:
        """How the token losses of `aligner.algorithms.policy_losses` are to add up."""
        return {"weights": self.weights, "denominator": self.denominator}

    def total(self, terms: Tensor, mask: Tensor) -> Tensor:
        """The rows' part of the minibatch's mean: terms [B, S-1] over the mask, weighted, over the
        denominator."""
        return total_over(mask, self.weights, self.denominator)(terms)


OnlineLoss = Callable[[Tensor, Experience, LossContext], tuple[Tensor, Stats]]
"""From log-probs [B, S-1] (differentiable, 0 outside the mask), their rows and the context to the
loss and its statistics.

The rows are some of a minibatch's, and what is returned are sums over them that `LossContext.total`
makes: added up over all parts they are the minibatch's, however it was cut. A statistic whose name
ends in _max is a maximum.
"""


def importance_weights(rows: Experience, context: LossContext) -> tuple[Tensor | None, Stats]:
    """How much likelier the trainer is to draw each token, before the update, than the engine was,
    truncated; [B, S-1].

    None where `algorithm.truncated_importance` asks for none. The statistics are those of
    `policy_loss`.
    """
    settings = context.settings
    if settings.truncated_importance == "none":
        return None, {}
    weights, above = behavior_weights(
        rows.old_logprobs,
        rows.engine_logprobs,
        rows.mask,
        settings.truncated_importance_cap,
        settings.truncated_importance,
        settings.above_importance_cap,
    )
    stats = {"importance_mean": weights, "importance_truncated": above}
    return weights, {name: context.total(of_tokens, rows.mask) for name, of_tokens in stats.items()}


def ratio_denominator(rows: ScoredSamples, settings: AlgorithmConfig) -> Tensor:
    """Log-probs [B, S-1] that the policy's ratio is taken against.

    Those of the policy that drew the tokens make the ratio the importance weight itself
    (Noukhovitch et al. 2024, "Asynchronous RLHF", proximal RLOO); those before the update leave the
    age to `algorithm.truncated_importance`.
    """
    return rows.engine_logprobs if settings.ratio_against == "sampler" else rows.old_logprobs


def clipped_surrogate(
    logprobs: Tensor, rows: Experience, context: LossContext
) -> tuple[Tensor, Stats]:
    """PPO's surrogate, by the ratio against `algorithm.ratio_against`.

    With truncated importance sampling the samples are the engine's, and the trainer's log-probs
    before the update are the proximal ones.
    """
    settings, trainer = context.settings, rows.old_logprobs
    corrected = settings.truncated_importance != "none"
    return policy_loss(
        logprobs,
        rows.engine_logprobs if corrected else ratio_denominator(rows, settings),
        rows.advantages,
        rows.mask,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        ratio_level=settings.ratio_level,
        proximal_logprobs=trainer if corrected else None,
        behavior_weight_cap=settings.truncated_importance_cap if corrected else None,
        behavior_level="sequence" if settings.truncated_importance == "sequence" else "token",
        above_behavior_cap=settings.above_importance_cap,
        **context.sums,
    )


def clipped_importance(
    logprobs: Tensor, rows: Experience, context: LossContext
) -> tuple[Tensor, Stats]:
    """CISPO."""
    settings = context.settings
    advantages, importance = _weighed(rows.advantages, rows, context)
    inputs = logprobs, ratio_denominator(rows, settings), advantages, rows.mask
    loss, stats = cispo_loss(
        *inputs, clip_low=settings.clip_low, clip_high=settings.clip_high, **context.sums
    )
    return loss, stats | importance


def policy_gradient(
    logprobs: Tensor, rows: Experience, context: LossContext
) -> tuple[Tensor, Stats]:
    """REINFORCE's loss: no ratio, so samples count as the policy's own but for their weights' age
    at the step's beginning."""
    advantages, importance = _weighed(rows.advantages, rows, context)
    loss, stats = reinforce_loss(logprobs, advantages, rows.mask, **context.sums)
    return loss, stats | importance


def _weighed(advantages: Tensor, rows: Experience, context: LossContext) -> tuple[Tensor, Stats]:
    """Advantages times the importance weights, for losses in which they are a factor; and the
    weights' statistics."""
    weights, stats = importance_weights(rows, context)
    return advantages if weights is None else weights * advantages, stats


def contrastive(logprobs: Tensor, rows: Experience, context: LossContext) -> tuple[Tensor, Stats]:
    """CoPG. Without a KL penalty in the reward a response's rewards add up to its score.

    With truncated importance sampling a response's term counts by its weight. The context's
    denominator counts rows.
    """
    weights, importance = _importance_of_draws(rows, context, 1)
    loss, stats = contrastive_policy_gradient_loss(
        logprobs,
        rows.reference_logprobs,
        rows.rewards.sum(1),
        rows.mask,
        group_size=rows.samples_per_prompt,
        kl_coefficient=context.kl_coefficient,
        importance=weights,
        denominator=context.denominator,
    )
    return loss, stats | importance


def preference(logprobs: Tensor, rows: Experience, context: LossContext) -> tuple[Tensor, Stats]:
    """DPO on pairs of rows, the better one first (Guo et al. 2024, "Direct Language Model Alignment
    from Online AI Feedback").

    With truncated importance sampling a pair counts by the product of its two responses' ratios.
    The context's denominator counts rows.
    """
    weights, importance = _importance_of_draws(rows, context, 2)
    settings, pairs = context.settings.preference, context.denominator / 2
    better, worse = rows.scores.view(-1, 2).unbind(1)
    loss, stats = pair_loss(
        logprobs, rows.reference_logprobs, rows.mask, settings, pairs, weights, better - worse
    )
    return loss, stats | importance


def _importance_of_draws(
    rows: Experience, context: LossContext, each: int
) -> tuple[Tensor | None, Stats]:
    """How much likelier the trainer is to draw every `each` rows together, before the update, than
    the engine was; [B / each].

    None where no truncated importance is asked for. The context's denominator counts rows.
    """
    settings, draws = context.settings, context.denominator / each
    if settings.truncated_importance == "none":
        return None, {}

    def together(of_tokens: Tensor) -> Tensor:
        return of_tokens.reshape(-1, each * of_tokens.shape[1])

    weights, above = behavior_weights(
        together(rows.old_logprobs),
        together(rows.engine_logprobs),
        together(rows.mask),
        settings.truncated_importance_cap,
        "sequence",
        settings.above_importance_cap,
    )
    weights = weights[:, 0]  # a draw's, for each of its tokens
    return weights, {
        "importance_mean": weights.sum() / draws,
        "importance_truncated": above[:, 0].sum() / draws,
    }


def imitation(logprobs: Tensor, rows: Experience, context: LossContext) -> tuple[Tensor, Stats]:
    """Cross entropy of the chosen samples: best-of-n fine-tuning. What is imitated may be weighed
    by its importance, too."""
    weights, stats = importance_weights(rows, context)
    inputs = logprobs if weights is None else weights * logprobs, rows.mask
    loss = cross_entropy_loss(*inputs, **context.sums)
    return loss, stats | {"loss": loss.detach()}


LOSSES: Mapping[str, OnlineLoss] = {
    "clip": clipped_surrogate,
    "cispo": clipped_importance,
    "reinforce": policy_gradient,
    "copg": contrastive,
    "dpo": preference,
    "cross_entropy": imitation,
}
