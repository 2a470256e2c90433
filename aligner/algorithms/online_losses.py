"""Losses of the policy on its own samples, by name (`algorithm.loss`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aligner.algorithms import losses
from aligner.algorithms.preference_losses import pair_loss
from aligner.data.types import Experience, ScoredSamples, Stats
from aligner.schema import AlgorithmConfig


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
        """How the token losses of `aligner.algorithms.losses` are to add up."""
        return {"weights": self.weights, "denominator": self.denominator}

    def total(self, terms: Tensor, mask: Tensor) -> Tensor:
        """The rows' part of the minibatch's mean: terms [B, S-1] over the mask, weighted, over the
        denominator."""
        return losses.total_over(mask, self.weights, self.denominator)(terms)


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
    `losses.policy_loss`.
    """
    settings = context.settings
    if settings.truncated_importance == "none":
        return None, {}
    weights, above = losses.behavior_weights(
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
    return losses.policy_loss(
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
    loss, stats = losses.cispo_loss(
        *inputs, clip_low=settings.clip_low, clip_high=settings.clip_high, **context.sums
    )
    return loss, stats | importance


def policy_gradient(
    logprobs: Tensor, rows: Experience, context: LossContext
) -> tuple[Tensor, Stats]:
    """REINFORCE's loss: no ratio, so samples count as the policy's own but for their weights' age
    at the step's beginning."""
    advantages, importance = _weighed(rows.advantages, rows, context)
    loss, stats = losses.reinforce_loss(logprobs, advantages, rows.mask, **context.sums)
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
    loss, stats = losses.contrastive_policy_gradient_loss(
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

    weights, above = losses.behavior_weights(
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
    loss = losses.cross_entropy_loss(*inputs, **context.sums)
    return loss, stats | {"loss": loss.detach()}


LOSSES: Mapping[str, OnlineLoss] = {
    "clip": clipped_surrogate,
    "cispo": clipped_importance,
    "reinforce": policy_gradient,
    "copg": contrastive,
    "dpo": preference,
    "cross_entropy": imitation,
}
