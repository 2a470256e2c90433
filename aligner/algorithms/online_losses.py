"""Losses of the policy on its own samples, by name (`algorithm.loss`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aligner.algorithms import losses
from aligner.algorithms.preference_losses import pair_loss
from aligner.data.types import Experience, Stats
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
        """The rows' part of the minibatch's mean: terms [B, S-1] over the mask, weighted, over the denominator."""
        return losses.total_over(mask, self.weights, self.denominator)(terms)


OnlineLoss = Callable[[Tensor, Experience, LossContext], tuple[Tensor, Stats]]
"""From log-probs [B, S-1] (differentiable, 0 outside the mask), their rows and the context to the loss and its statistics.

The rows are some of a minibatch's, and what is returned are sums over them that `LossContext.total` makes: added up over all
parts they are the minibatch's, however it was cut. A statistic whose name ends in _max is a maximum.
"""


def clipped_surrogate(logprobs: Tensor, rows: Experience, context: LossContext) -> tuple[Tensor, Stats]:
    """PPO's surrogate. Without truncated importance sampling the samples count as the trainer's own.

    With it they are the engine's, and the trainer's log-probs before the update are the proximal ones.
    """
    settings, trainer = context.settings, rows.old_logprobs
    corrected = settings.truncated_importance != "none"
    return losses.policy_loss(
        logprobs,
        rows.engine_logprobs if corrected else trainer,
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


def clipped_importance(logprobs: Tensor, rows: Experience, context: LossContext) -> tuple[Tensor, Stats]:
    """CISPO."""
    low, high = context.settings.clip_low, context.settings.clip_high
    inputs = logprobs, rows.old_logprobs, rows.advantages, rows.mask
    return losses.cispo_loss(*inputs, clip_low=low, clip_high=high, **context.sums)


def policy_gradient(logprobs: Tensor, rows: Experience, context: LossContext) -> tuple[Tensor, Stats]:
    """REINFORCE's loss: no ratio, so samples count as the policy's own however old they are."""
    return losses.reinforce_loss(logprobs, rows.advantages, rows.mask, **context.sums)


def contrastive(logprobs: Tensor, rows: Experience, context: LossContext) -> tuple[Tensor, Stats]:
    """CoPG. Without a KL penalty in the reward a response's rewards add up to its score."""
    return losses.contrastive_policy_gradient_loss(
        logprobs,
        rows.reference_logprobs,
        rows.rewards.sum(1),
        rows.mask,
        group_size=rows.samples_per_prompt,
        kl_coefficient=context.kl_coefficient,
        denominator=context.denominator,
    )


def preference(logprobs: Tensor, rows: Experience, context: LossContext) -> tuple[Tensor, Stats]:
    """DPO on pairs of rows, the better one first (Guo et al. 2024, "Direct Language Model Alignment from Online AI Feedback").

    With truncated importance sampling a pair counts by how much likelier the trainer is to draw it, before the update, than
    the engine was: the product of its two responses' ratios. The context's denominator counts rows.
    """
    settings, pairs = context.settings, context.denominator / 2
    if settings.truncated_importance == "none":
        return pair_loss(logprobs, rows.reference_logprobs, rows.mask, settings.preference, pairs)
    weights, above = losses.behavior_weights(
        _drawn_together(rows.old_logprobs),
        _drawn_together(rows.engine_logprobs),
        _drawn_together(rows.mask),
        settings.truncated_importance_cap,
        "sequence",
        settings.above_importance_cap,
    )
    weights, above = weights[:, 0], above[:, 0]  # a pair's, for each of its tokens
    loss, stats = pair_loss(logprobs, rows.reference_logprobs, rows.mask, settings.preference, pairs, weights)
    importance = {"importance_mean": weights, "importance_truncated": above.to(weights.dtype)}
    return loss, stats | {name: of_pairs.sum() / pairs for name, of_pairs in importance.items()}


def _drawn_together(of_tokens: Tensor) -> Tensor:
    """Rows [2P, T], pair by pair, as [P, 2T]: a pair is one draw."""
    return of_tokens.reshape(-1, 2 * of_tokens.shape[1])


def imitation(logprobs: Tensor, rows: Experience, context: LossContext) -> tuple[Tensor, Stats]:
    """Cross entropy of the chosen samples: best-of-n fine-tuning."""
    loss = losses.cross_entropy_loss(logprobs, rows.mask, **context.sums)
    return loss, {"loss": loss.detach()}


LOSSES: Mapping[str, OnlineLoss] = {
    "clip": clipped_surrogate,
    "cispo": clipped_importance,
    "reinforce": policy_gradient,
    "copg": contrastive,
    "dpo": preference,
    "cross_entropy": imitation,
}
