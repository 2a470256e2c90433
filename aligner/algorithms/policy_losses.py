"""Losses of the policy, of critics and of reward models.

The file has three parts: the reduction of per-token terms to a scalar and the importance weights,
which several losses share; the built-in values of `algorithm.loss`, each with its formula followed
by the function that applies the formula to a minibatch; and the losses of value models and token
labels. `preference_losses` contains the losses of pairs of responses.

All per-token losses follow one rule. A loss is the sum of its terms over the mask, divided by a
denominator; without a denominator it is the mean over its own mask. A caller that splits a batch
into parts passes the count of the whole batch as the denominator. The losses, statistics and
gradients of the parts then add up to those of the whole batch, for every split by rows. Statistics
follow the same rule, except that a statistic whose name ends in `_max` is a maximum.

If a loss takes `weights` `[B, T]`, they multiply the terms of each token in the loss and in the
statistics. For example, weights of 1 / (tokens of the row) with the number of rows as the
denominator give the mean of the rows' means. Values outside a mask never reach a loss, a statistic
or a gradient, even if they are NaN or infinite.
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

# Upper bound of a log-ratio before exp. The product of the ratios of a long response could
# otherwise overflow to infinity, and the gradient of infinity is NaN.
_MAX_LOG_RATIO = 20.0


def build_reduction(
    mask: Tensor, weights: Tensor | None, denominator: float | None
) -> Callable[[Tensor], Tensor]:
    """Return the function that reduces per-token terms to Σ weights·terms / denominator.

    Args:
        mask: bool `[B, T]`. The sum covers only true entries.
        weights: Factors `[B, T]` of the terms; None means 1 for every token.
        denominator: None means the number of true entries of `mask`, at least 1.

    Returns:
        A function from terms `[B, T]` to a scalar.
    """
    count = mask.sum().clamp(min=1) if denominator is None else denominator
    masked_weights = None if weights is None else torch.where(mask, weights, 0.0)

    def reduce(terms: Tensor) -> Tensor:
        # torch.where instead of a product with the mask: NaN · 0 would be NaN.
        masked_terms = torch.where(mask, terms, 0.0)
        return (
            masked_terms if masked_weights is None else masked_terms * masked_weights
        ).sum() / count

    return reduce


@dataclass(frozen=True)
class LossContext:
    """What a loss of some rows knows about their minibatch: settings, weights, denominator."""

    settings: AlgorithmConfig
    """Section `algorithm` of the configuration."""
    kl_coefficient: float
    """Current weight of the KL penalty. `OnlineAlgorithm` adds a KL penalty in the loss, and an
    entropy bonus, to the returned loss."""
    denominator: float
    """Number of response tokens of the minibatch, or of its rows if the loss compares rows."""
    weights: Tensor | None
    """Weight of each token according to `algorithm.aggregation`, float32 `[B, S-1]`; None means 1
    for every token."""

    @property
    def reduction_arguments(self) -> dict[str, Any]:
        """Keyword arguments `weights` and `denominator` of the per-token losses of this module."""
        return {"weights": self.weights, "denominator": self.denominator}

    def total(self, terms: Tensor, mask: Tensor) -> Tensor:
        """Return the contribution of these rows to the minibatch's mean of `terms`, a scalar.

        Args:
            terms: Per-token terms `[B, S-1]`, which are multiplied by `weights`.
            mask: bool `[B, S-1]`. The sum, which is divided by `denominator`, covers true entries.
        """
        return build_reduction(mask, self.weights, self.denominator)(terms)


OnlineLoss = Callable[[Tensor, Experience, LossContext], tuple[Tensor, Stats]]
"""Function from log-probs, their rows and the context to a loss and its statistics.

The log-probs `[B, S-1]` are differentiable, and 0 outside the mask. The rows are a part of a
minibatch. The loss and the statistics are sums over these rows as `LossContext.total` computes
them, so that the results of all parts add up to the minibatch's results. A statistic whose name
ends in `_max` is a maximum.
"""


def ratio_denominator(rows: ScoredSamples, settings: AlgorithmConfig) -> Tensor:
    """Return the log-probs `[B, S-1]` in the denominator of the policy's importance ratio.

    With `algorithm.ratio_against=sampler` these are the log-probs of the engine, whose policy
    generated the tokens, and the ratio is itself the importance weight (Noukhovitch et al. 2024,
    "Asynchronous RLHF", proximal RLOO). Otherwise these are the trainer's log-probs before the
    update, and only `algorithm.truncated_importance` corrects for stale samples.
    """
    return rows.engine_logprobs if settings.ratio_against == "sampler" else rows.old_logprobs


@torch.no_grad()
def behavior_weights(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    cap: float | None,
    level: str,
    above_cap: str = "drop",
) -> tuple[Tensor, Tensor]:
    """Return the importance weights π_proximal / π_behavior, and which of them exceed the cap.

    Args:
        proximal_logprobs: Log-probs `[B, T]` of the proximal policy.
        behavior_logprobs: Log-probs `[B, T]` of the behavior policy, which generated the tokens.
        mask: bool `[B, T]`.
        cap: Largest weight; None means no cap.
        level: `token` for the ratio of each token (Yao et al. 2025, "Your Efficient RL Framework
            Secretly Brings You Off-Policy RL Training"); `sequence` for the ratio of the whole
            response, exp of the sum of the log-ratios over the row's mask, which every token of the
            row gets (Liu et al. 2025, "When Speed Kills Stability").
        above_cap: `drop` sets a weight above the cap to 0, so that the token drops out of the loss
            (Fu et al. 2025, "AReaL"); `truncate` sets the weight to the cap.

    Returns:
        The weights `[B, T]`, without a gradient, and a bool tensor `[B, T]` that is true where the
        ratio exceeds the cap. With `level="token"` the weight is 1 outside the mask.

    Raises:
        ValueError: `level` or `above_cap` is unknown.
    """
    levels = {"token": "token", "sequence": "sequence_product"}
    if level not in levels:
        raise ValueError(f"unknown level of behavior weights {level!r}; allowed: token, sequence")
    if above_cap not in ("drop", "truncate"):
        raise ValueError(
            f"unknown treatment of weights above the cap {above_cap!r}; allowed: drop, truncate"
        )

    mask = mask.bool()
    log_ratio = _masked_log_ratio(proximal_logprobs, behavior_logprobs, mask)
    weights = _importance_ratio(log_ratio, mask, levels[level])
    if cap is None:
        return weights, torch.zeros_like(mask)

    is_above_cap = weights > cap
    capped = torch.where(is_above_cap, cap if above_cap == "truncate" else 0.0, weights)
    return capped, is_above_cap


def importance_weights(rows: Experience, context: LossContext) -> tuple[Tensor | None, Stats]:
    """Return the truncated importance weights between trainer and engine, and their statistics.

    The weight of a token is the trainer's probability before the update divided by the engine's
    probability. See `behavior_weights`.

    Returns:
        Weights `[B, S-1]`, or None with `algorithm.truncated_importance=none`; and the statistics
        `importance_mean` and `importance_truncated` of `policy_loss`.
    """
    settings = context.settings
    if settings.truncated_importance == "none":
        return None, {}

    weights, is_truncated = behavior_weights(
        rows.old_logprobs,
        rows.engine_logprobs,
        rows.mask,
        settings.truncated_importance_cap,
        settings.truncated_importance,
        settings.above_importance_cap,
    )
    token_stats = {"importance_mean": weights, "importance_truncated": is_truncated}
    return weights, {name: context.total(terms, rows.mask) for name, terms in token_stats.items()}


def _weight_advantages(
    advantages: Tensor, rows: Experience, context: LossContext
) -> tuple[Tensor, Stats]:
    """Return advantages times importance weights, and the statistics of the weights.

    Losses that have the advantage as a factor use this function.
    """
    weights, stats = importance_weights(rows, context)
    return advantages if weights is None else weights * advantages, stats


def _joint_importance_weights(
    rows: Experience, context: LossContext, rows_per_unit: int
) -> tuple[Tensor | None, Stats]:
    """Return one importance weight for every unit of `rows_per_unit` consecutive rows.

    The weight of a unit is the product of the ratios of all its tokens: the trainer's probability
    of its responses, before the update, divided by the engine's probability. The denominator of the
    context must count rows.

    Returns:
        Weights `[B / rows_per_unit]`, or None with `algorithm.truncated_importance=none`; and their
        statistics, which are means over units.
    """
    settings = context.settings
    unit_count = context.denominator / rows_per_unit
    if settings.truncated_importance == "none":
        return None, {}

    def join_rows(token_values: Tensor) -> Tensor:
        return token_values.reshape(-1, rows_per_unit * token_values.shape[1])

    weights, is_truncated = behavior_weights(
        join_rows(rows.old_logprobs),
        join_rows(rows.engine_logprobs),
        join_rows(rows.mask),
        settings.truncated_importance_cap,
        "sequence",
        settings.above_importance_cap,
    )
    # Every token of a unit has the weight of the unit.
    weights = weights[:, 0]
    return weights, {
        "importance_mean": weights.sum() / unit_count,
        "importance_truncated": is_truncated[:, 0].sum() / unit_count,
    }


def _masked_log_ratio(logprobs: Tensor, anchor_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return logprobs - anchor_logprobs, and 0 outside the mask.

    The mask is applied before any product, so that no NaN or infinity outside it reaches a result.
    """
    return torch.where(mask, logprobs - anchor_logprobs, 0.0)


def _importance_ratio(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """Return the importance ratio of each token at a level, `[B, T]`.

    Args:
        log_ratio: Log-ratio of each token `[B, T]`, 0 outside the mask.
        mask: bool `[B, T]`.
        level: See `ratio_level` of `policy_loss`.
    """
    if level not in ("token", "sequence", "sequence_product"):
        raise ValueError(
            f"unknown ratio_level {level!r}; allowed: token, sequence, sequence_product"
        )
    if level != "token":
        row_log_ratio = log_ratio.sum(-1, keepdim=True)
        # The mean of the log-ratios gives the geometric mean of the ratios (GSPO, equation 7).
        if level == "sequence":
            row_log_ratio = row_log_ratio / mask.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = row_log_ratio.expand_as(log_ratio)
    return log_ratio.clamp(max=_MAX_LOG_RATIO).exp()


@torch.no_grad()
def _ratio_stats(
    loss: Tensor,
    log_ratio: Tensor,
    ratio: Tensor,
    is_clipped: Tensor,
    mask: Tensor,
    reduce: Callable[[Tensor], Tensor],
) -> Stats:
    """Return the statistics that `policy_loss` and `cispo_loss` share."""
    return {
        "loss": loss.detach(),
        "clip_fraction": reduce(is_clipped),
        "approx_kl": reduce(_k3_kl(log_ratio)),
        "ratio_max": torch.where(mask, ratio, 0.0).amax(),
    }


def _k3_kl(log_ratio: Tensor) -> Tensor:
    """Return Schulman's k3 estimate of KL(anchor ‖ policy) from samples of the anchor (2020).

    `log_ratio` is the policy's log-prob minus the anchor's log-prob.
    """
    return torch.expm1(log_ratio) - log_ratio


# algorithm.loss=clip: PPO, and with other ratio levels GSPO and proximal RLOO


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
    """Return PPO's clipped surrogate loss -min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A).

    Here r = exp(logprobs - old_logprobs) is the importance ratio and A the advantage (Schulman et
    al. 2017, equation 7).

    With `proximal_logprobs` the loss is the decoupled objective (Hilton et al. 2022, "Batch
    size-invariance for policy optimization"), which distinguishes the behavior policy, which
    generated the tokens, from the proximal policy, which limits the update. Then `old_logprobs`
    belong to the behavior policy, r = exp(logprobs - proximal_logprobs), and the term of each token
    is multiplied by `behavior_weights(proximal_logprobs, old_logprobs, …)`, which has no gradient.
    The distance between the behavior policy and the proximal policy does not depend on the update.

    Args:
        logprobs: Log-probs `[B, T]` of the policy, differentiable.
        old_logprobs: Log-probs `[B, T]` of the policy before the update, or of the behavior policy
            with `proximal_logprobs`.
        advantages: `[B, T]`.
        mask: `[B, T]`, true at the tokens that are trained on.
        clip_low: Largest decrease of the ratio below 1.
        clip_high: Largest increase of the ratio above 1.
        dual_clip: Bound c >= 1: where A < 0, the loss is at most -c·A (Ye et al. 2020, "Mastering
            Complex Control in MOBA Games", equation 5). None means no bound.
        ratio_level: `token` for a ratio of each token; `sequence` for the geometric mean of the
            ratios of a row (GSPO; Zheng et al. 2025, "Group Sequence Policy Optimization",
            equation 7); `sequence_product` for their product (proximal RLOO; Noukhovitch et al.
            2024, "Asynchronous RLHF"). For the last two, rows must be complete responses.
        proximal_logprobs: Log-probs `[B, T]` of the proximal policy; None means that the behavior
            policy is also the proximal policy.
        behavior_weight_cap: See `cap` of `behavior_weights`.
        behavior_level: See `level` of `behavior_weights`. With `sequence`, rows must be complete
            responses.
        above_behavior_cap: See `above_cap` of `behavior_weights`.
        weights: Weights `[B, T]` of the tokens' terms; None means 1.
        denominator: Divisor of the sums; None means the number of true entries of `mask`.

    Returns:
        The loss, a scalar, and these statistics:
            - `loss`
            - `clip_fraction`: share of tokens whose clipped term is the smaller one
            - `approx_kl`: k3 estimate of KL(old ‖ new), or of KL(proximal ‖ new), per token
            - `ratio_max`: largest ratio
            - `dual_clip_fraction`, with `dual_clip`: share of tokens whose loss was bounded
            - `importance_mean`, with `proximal_logprobs`: mean behavior weight of the tokens
            - `importance_truncated`, with `proximal_logprobs`: share of tokens whose ratio exceeded
              the cap

    Raises:
        ValueError: A cap is set without `proximal_logprobs`, `dual_clip` is below 1, or the name of
            a level or treatment is unknown.
    """
    if behavior_weight_cap is not None and proximal_logprobs is None:
        raise ValueError(f"behavior_weight_cap={behavior_weight_cap}: requires proximal_logprobs")

    mask = mask.bool()
    reduce = build_reduction(mask, weights, denominator)
    log_ratio = _masked_log_ratio(
        logprobs, old_logprobs if proximal_logprobs is None else proximal_logprobs, mask
    )
    advantages = torch.where(mask, advantages, 0.0)

    # Schulman et al. 2017, equation 7
    ratio = _importance_ratio(log_ratio, mask, ratio_level)
    surrogate = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    terms = -torch.minimum(surrogate, clipped)

    stats: Stats = {}
    if dual_clip is not None:
        terms, is_bounded = _apply_dual_clip(terms, advantages, dual_clip)
        stats["dual_clip_fraction"] = reduce(is_bounded)

    if proximal_logprobs is not None:
        importance, is_truncated = behavior_weights(
            proximal_logprobs,
            old_logprobs,
            mask,
            behavior_weight_cap,
            behavior_level,
            above_behavior_cap,
        )
        terms = importance * terms
        stats["importance_mean"] = reduce(importance)
        stats["importance_truncated"] = reduce(is_truncated)

    loss = reduce(terms)
    return loss, _ratio_stats(loss, log_ratio, ratio, clipped < surrogate, mask, reduce) | stats


def _apply_dual_clip(terms: Tensor, advantages: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Return the terms, bounded by -bound·A where A < 0, and a bool tensor of the bounded ones.

    Ye et al. 2020, "Mastering Complex Control in MOBA Games", equation 5. All tensors are `[B, T]`.
    """
    if bound < 1:
        raise ValueError(
            f"dual_clip={bound}: must be >= 1, because dual clipping bounds the loss of tokens"
            " whose importance ratio is > 1"
        )
    is_bounded = (advantages < 0) & (terms > -bound * advantages)
    return torch.where(is_bounded, -bound * advantages, terms), is_bounded


def clipped_surrogate(
    logprobs: Tensor, rows: Experience, context: LossContext
) -> tuple[Tensor, Stats]:
    """Return `policy_loss` of the rows; implements `algorithm.loss=clip`.

    The ratio is against `algorithm.ratio_against`. With truncated importance sampling the engine's
    policy is the behavior policy, and the trainer's policy before the update is the proximal one.
    """
    settings = context.settings
    trainer_logprobs = rows.old_logprobs
    is_corrected = settings.truncated_importance != "none"
    return policy_loss(
        logprobs,
        rows.engine_logprobs if is_corrected else ratio_denominator(rows, settings),
        rows.advantages,
        rows.mask,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        ratio_level=settings.ratio_level,
        proximal_logprobs=trainer_logprobs if is_corrected else None,
        behavior_weight_cap=settings.truncated_importance_cap if is_corrected else None,
        behavior_level="sequence" if settings.truncated_importance == "sequence" else "token",
        above_behavior_cap=settings.above_importance_cap,
        **context.reduction_arguments,
    )


# algorithm.loss=cispo: clipped importance weights without a gradient


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
    """Return CISPO's loss -w·A·logprobs with w = clip(r, 1 - clip_low, 1 + clip_high).

    The weight w, with r = exp(logprobs - old_logprobs), has no gradient, so clipping never removes
    the gradient of a token (Chen et al. 2025, "MiniMax-M1", equation 4).

    Args:
        logprobs: Log-probs `[B, T]` of the policy, differentiable.
        old_logprobs: Log-probs `[B, T]` in the denominator of the ratio.
        advantages: `[B, T]`.
        mask: `[B, T]`, true at the tokens that are trained on.
        clip_low: Largest decrease of the weight below 1.
        clip_high: Largest increase of the weight above 1.
        weights: Weights `[B, T]` of the tokens' terms; None means 1.
        denominator: Divisor of the sums; None means the number of true entries of `mask`.

    Returns:
        The loss, a scalar, and the statistics `loss`, `clip_fraction` (share of tokens whose weight
        was clipped), `approx_kl` and `ratio_max` of `policy_loss`.
    """
    mask = mask.bool()
    reduce = build_reduction(mask, weights, denominator)
    log_ratio = _masked_log_ratio(logprobs, old_logprobs, mask).detach()
    ratio = _importance_ratio(log_ratio, mask, "token")
    # Chen et al. 2025, equation 4: the clipped weight is a constant factor of the policy gradient.
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    terms = -clipped * torch.where(mask, advantages, 0.0) * torch.where(mask, logprobs, 0.0)
    loss = reduce(terms)
    return loss, _ratio_stats(loss, log_ratio, ratio, clipped != ratio, mask, reduce)


def cispo(logprobs: Tensor, rows: Experience, context: LossContext) -> tuple[Tensor, Stats]:
    """Return `cispo_loss` of the rows; implements `algorithm.loss=cispo`.

    With truncated importance sampling the importance weights multiply the advantages.
    """
    settings = context.settings
    advantages, importance_stats = _weight_advantages(rows.advantages, rows, context)
    inputs = logprobs, ratio_denominator(rows, settings), advantages, rows.mask
    loss, stats = cispo_loss(
        *inputs,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        **context.reduction_arguments,
    )
    return loss, stats | importance_stats


# algorithm.loss=reinforce: policy gradient without a ratio


def reinforce_loss(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    weights: Tensor | None = None,
    denominator: float | None = None,
) -> tuple[Tensor, Stats]:
    """Return the policy-gradient loss -A·logprobs of tokens that the policy itself generated.

    Williams 1992.

    Args:
        logprobs: Log-probs `[B, T]` of the policy, differentiable.
        advantages: `[B, T]`.
        mask: `[B, T]`, true at the tokens that are trained on.
        weights: Weights `[B, T]` of the tokens' terms; None means 1.
        denominator: Divisor of the sum; None means the number of true entries of `mask`.

    Returns:
        The loss, a scalar, and the statistic `loss`.
    """
    mask = mask.bool()
    terms = -torch.where(mask, advantages, 0.0) * torch.where(mask, logprobs, 0.0)
    loss = build_reduction(mask, weights, denominator)(terms)
    return loss, {"loss": loss.detach()}


def reinforce(logprobs: Tensor, rows: Experience, context: LossContext) -> tuple[Tensor, Stats]:
    """Return `reinforce_loss` of the rows; implements `algorithm.loss=reinforce`.

    The loss has no ratio, so it treats samples as on-policy. Truncated importance sampling corrects
    only for the staleness of the weights at the beginning of the step.
    """
    advantages, importance_stats = _weight_advantages(rows.advantages, rows, context)
    loss, stats = reinforce_loss(logprobs, advantages, rows.mask, **context.reduction_arguments)
    return loss, stats | importance_stats


# algorithm.loss=copg: contrastive policy gradient over the samples of a prompt


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
    """Return CoPG's loss -Σ_i (R_i - mean of the other R_j)·logp_i over the rows of each group.

    The regularized reward R_i = score_i - kl_coefficient·(logp_i - reference_i) has no gradient;
    logp_i and reference_i are sums over the mask of row i (Flet-Berliac et al. 2024, "Contrastive
    Policy Gradient").

    For a pair, the gradient equals that of -(Δscore - ½·kl_coefficient·Δ)·Δ, where Δ is the
    difference of the two rows' logp - reference. The optimum does not depend on the policy that
    generated the rows, but the speed of convergence does; `importance` can therefore weight the
    term of each row.

    A row without a true mask entry is ignored in its group. A row that remains alone in its group
    contributes nothing.

    Args:
        logprobs: Log-probs `[B, T]` of the policy, differentiable.
        reference_logprobs: Log-probs `[B, T]` of the reference model.
        scores: `[B]`.
        mask: `[B, T]`, true at the response tokens.
        group_size: Number of rows of each prompt; they are consecutive.
        kl_coefficient: Weight of the KL penalty.
        importance: Weights `[B]` of the rows' terms; None means 1.
        denominator: Divisor of the sums; None means the number of rows.

    Returns:
        The loss, a scalar, and the statistics `loss` and `reference_kl`, the mean of logp -
        reference per row.

    Raises:
        ValueError: `group_size` is below 2 or does not divide the number of rows.
    """
    if group_size < 2 or len(scores) % group_size:
        raise ValueError(
            f"group_size={group_size}: must be >= 2 and must divide the number of rows,"
            f" {len(scores)}"
        )

    mask = mask.bool()
    count = float(max(len(scores), 1)) if denominator is None else denominator
    response_logprobs = torch.where(mask, logprobs, 0.0).sum(-1)

    with torch.no_grad():
        has_tokens = mask.any(-1)
        # R_i = score_i - kl_coefficient · (logp_i - reference_i); 0 for rows without tokens, which
        # therefore do not contribute to the baseline's sum
        kl = _masked_log_ratio(logprobs, reference_logprobs, mask).sum(-1)
        regularized = torch.where(has_tokens, scores - kl_coefficient * kl, 0.0).view(
            -1, group_size
        )
        # leave-one-out baseline: the mean of the other rows' regularized rewards
        other_count = has_tokens.view(-1, group_size).sum(1, keepdim=True) - 1
        baseline = (regularized.sum(1, keepdim=True) - regularized) / other_count.clamp(min=1)
        advantages = torch.where(other_count > 0, regularized - baseline, 0.0).flatten()

    terms = (
        advantages * response_logprobs
        if importance is None
        else importance * advantages * response_logprobs
    )
    loss = -terms.sum() / count
    return loss, {"loss": loss.detach(), "reference_kl": kl.sum() / count}


def contrastive_policy_gradient(
    logprobs: Tensor, rows: Experience, context: LossContext
) -> tuple[Tensor, Stats]:
    """Return `contrastive_policy_gradient_loss` of the rows; implements `algorithm.loss=copg`.

    The score of a response is the sum of its rewards, because the rewards contain no KL penalty.
    With truncated importance sampling the term of a response is multiplied by the response's
    importance weight. The denominator of the context counts rows.
    """
    weights, importance_stats = _joint_importance_weights(rows, context, 1)
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
    return loss, stats | importance_stats


# algorithm.loss=dpo: preference loss of pairs of samples; `preference_losses` contains the formulas


def online_dpo(logprobs: Tensor, rows: Experience, context: LossContext) -> tuple[Tensor, Stats]:
    """Return the preference loss of pairs of consecutive rows; implements `algorithm.loss=dpo`.

    The better row of each pair comes first (Guo et al. 2024, "Direct Language Model Alignment from
    Online AI Feedback"). With truncated importance sampling the weight of a pair is the product of
    the importance ratios of its two responses. The denominator of the context counts rows.
    """
    weights, importance_stats = _joint_importance_weights(rows, context, 2)
    settings = context.settings.preference
    pair_count = context.denominator / 2
    chosen_scores, rejected_scores = rows.scores.view(-1, 2).unbind(1)
    loss, stats = pair_loss(
        logprobs,
        rows.reference_logprobs,
        rows.mask,
        settings,
        pair_count,
        weights,
        chosen_scores - rejected_scores,
    )
    return loss, stats | importance_stats


# algorithm.loss=cross_entropy: imitation of the selected samples


def cross_entropy_loss(
    logprobs: Tensor, mask: Tensor, denominator: float | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return the negative log-likelihood -logprobs of the tokens to imitate, a scalar.

    Args:
        logprobs: Log-probs `[B, T]` of the policy, differentiable.
        mask: `[B, T]`, true at the tokens to imitate.
        denominator: Divisor of the sum; None means the number of true entries of `mask`.
        weights: Weights `[B, T]` of the tokens' terms; None means 1.
    """
    return -build_reduction(mask.bool(), weights, denominator)(logprobs)


def imitation(logprobs: Tensor, rows: Experience, context: LossContext) -> tuple[Tensor, Stats]:
    """Return `cross_entropy_loss` of the samples; implements `algorithm.loss=cross_entropy`.

    With a selection of the best samples, this is the loss of best-of-n fine-tuning. With truncated
    importance sampling the importance weights multiply the log-probs.
    """
    weights, stats = importance_weights(rows, context)
    inputs = logprobs if weights is None else weights * logprobs, rows.mask
    loss = cross_entropy_loss(*inputs, **context.reduction_arguments)
    return loss, stats | {"loss": loss.detach()}


LOSSES: Mapping[str, OnlineLoss] = {
    "clip": clipped_surrogate,
    "cispo": cispo,
    "reinforce": reinforce,
    "copg": contrastive_policy_gradient,
    "dpo": online_dpo,
    "cross_entropy": imitation,
}
"""Built-in losses by their name in `algorithm.loss`."""


# Losses of critics and of reward models


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float,
    denominator: float | None = None,
) -> tuple[Tensor, Stats]:
    """Return the clipped value loss ½·max((V - R)², (clip(V, V_old ± clip) - R)²).

    Huang et al. 2023, "The N Implementation Details of RLHF with PPO", detail 12.

    Args:
        values: Values `[B, T]` of the critic, differentiable.
        old_values: Values `[B, T]` before the update.
        returns: Targets `[B, T]`.
        mask: `[B, T]`, true at the tokens that are trained on.
        clip: Largest change of a value.
        denominator: Divisor of the sums; None means the number of true entries of `mask`.

    Returns:
        The loss, a scalar, and the statistics `loss` and `clip_fraction`, the share of tokens whose
        clipped error is the larger one.
    """
    mask = mask.bool()
    reduce = build_reduction(mask, None, denominator)
    values = torch.where(mask, values, 0.0)
    old_values = torch.where(mask, old_values, 0.0)
    returns = torch.where(mask, returns, 0.0)

    # clip(V, V_old - clip, V_old + clip)
    clipped = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    plain_error = (values - returns).square()
    clipped_error = (clipped - returns).square()
    loss = 0.5 * reduce(torch.maximum(plain_error, clipped_error))
    return loss, {"loss": loss.detach(), "clip_fraction": reduce(clipped_error > plain_error)}


def token_label_loss(
    values: Tensor, labels: Tensor, mask: Tensor, denominator: float | None = None
) -> Tensor:
    """Return the binary cross entropy of σ(values) against the labels, a scalar.

    This is the loss of a process reward model (Lightman et al. 2023, "Let's Verify Step by Step").

    Args:
        values: Outputs `[B, T]` of the reward head, differentiable.
        labels: Labels `[B, T]` in [0, 1].
        mask: `[B, T]`, true at the labeled tokens.
        denominator: Divisor of the sum; None means the number of true entries of `mask`.
    """
    mask = mask.bool()
    values = torch.where(mask, values, 0.0)
    errors = binary_cross_entropy_with_logits(
        values, torch.where(mask, labels, 0.0).to(values.dtype), reduction="none"
    )
    return build_reduction(mask, None, denominator)(errors)
