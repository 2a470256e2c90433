"""An online algorithm as a composition: which samples it learns from, their advantages, its loss, and where the KL goes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from aligner.algorithms import advantages, losses
from aligner.algorithms.kl import KLEstimator, approximate_kl
from aligner.algorithms.losses import Stats
from aligner.algorithms.preference_losses import pair_loss
from aligner.algorithms.score_shaping import ScoreShaping, penalized_rewards
from aligner.algorithms.whitening import masked_whiten
from aligner.data.types import Experience, SampleBatch
from aligner.megatron.policy import PolicyLoss
from aligner.schema import AlgorithmConfig, Config
from aligner.schema.derived import overlong_buffer, rows_together

Aggregation = Literal["token", "sequence", "sum", "constant"]
Select = Callable[[Tensor, int], Tensor]
"""From scores [B], those of a prompt in a row, and samples a prompt to the rows (int64 [N]) that are learned from."""
Estimate = Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor | None]]
"""From rewards, values and mask [B, T] to advantages and, with a critic, returns [B, T]."""


class Objective(Protocol):
    """What is minimized, but for a KL penalty and an entropy bonus, over some rows."""

    def __call__(
        self, logprobs: Tensor, rows: Experience, *, weights: Tensor | None, denominator: float, kl_coefficient: float
    ) -> tuple[Tensor, Stats]:
        """Loss and statistics of some rows, each a sum over tokens of `weights` times its terms, over `denominator`."""
        ...


@dataclass(frozen=True)
class OnlineAlgorithm:
    """What a step makes of its samples; built from the configuration by `build_online_algorithm`."""

    estimate: Estimate
    objective: Objective
    select: Select | None
    samples_per_prompt: int
    group: int
    """The loss must see so many rows in a row together."""
    aggregation: Aggregation
    max_response_tokens: int
    kl_in_loss: bool
    kl_estimator: KLEstimator
    entropy_coefficient: float
    whiten_rewards: bool
    whiten_advantages: bool
    whiten_within_prompt: bool
    shaping: ScoreShaping

    def experience(
        self,
        batch: SampleBatch,
        scores: Tensor,
        values: Tensor | None,
        old_logprobs: Tensor,
        reference_logprobs: Tensor,
        kl_coefficient: float,
    ) -> Experience:
        """Scores [B], and values [B, S] where there is a critic, to rewards, advantages and returns [B, S-1].

        A KL penalty in the reward is taken token by token, the score on the last response token; rewards are whitened
        without moving their mean, advantages with (Huang et al. 2023, "The N Implementation Details of RLHF with PPO",
        details 10 and 11).
        """
        mask = batch.mask
        values = None if values is None else torch.where(mask, values[:, :-1], 0.0)
        kl = approximate_kl(old_logprobs, reference_logprobs, self.kl_estimator)
        rewards = penalized_rewards(scores, kl, 0.0 if self.kl_in_loss else kl_coefficient, mask)
        if self.whiten_rewards:
            rewards = masked_whiten(rewards, mask, shift_mean=False)
        estimated, returns = self.estimate(rewards, values, mask)
        if self.whiten_advantages and self.whiten_within_prompt:
            estimated = advantages.group_whiten(estimated, mask, self.samples_per_prompt)
        elif self.whiten_advantages:
            estimated = masked_whiten(estimated, mask)
        return Experience(
            tokens=batch.tokens,
            lengths=batch.lengths,
            mask=mask,
            engine_logprobs=batch.engine_logprobs,
            old_logprobs=old_logprobs,
            reference_logprobs=reference_logprobs,
            values=values,
            rewards=rewards,
            advantages=estimated,
            returns=returns,
        )

    def minibatches(self, experience: Experience, epochs: int, count: int, seed: int) -> Iterator[Experience]:
        """`epochs` passes over the rows, each reshuffled and cut into `count` minibatches; a function of the seed alone.

        Rows that the loss must see together stay together.
        """
        generator = torch.Generator().manual_seed(seed)
        members = torch.arange(experience.tokens.shape[0]).view(-1, self.group)
        for _ in range(epochs):
            for chosen in torch.randperm(len(members), generator=generator).tensor_split(min(count, len(members))):
                yield experience.select(members[chosen].flatten())

    def denominator(self, minibatch: Experience) -> float:
        """What the loss's sums over a minibatch are divided by: its tokens, or its rows where the loss compares these."""
        return float(minibatch.tokens.shape[0] if self.group > 1 else minibatch.mask.sum())

    def loss(self, minibatch: Experience, kl_coefficient: float) -> PolicyLoss[Experience]:
        """The policy's loss on parts of a minibatch, under a KL coefficient."""
        tokens_a_row = float(minibatch.mask.sum()) / minibatch.tokens.shape[0]
        return functools.partial(self._loss, tokens_a_row=tokens_a_row, kl_coefficient=kl_coefficient)

    def _loss(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        rows: Experience,
        denominator: float,
        *,
        tokens_a_row: float,
        kl_coefficient: float,
    ) -> tuple[Tensor, Stats]:
        mask = rows.mask
        weights = None
        if self.aggregation == "sequence":
            # Of mean 1 over the minibatch's tokens, so that the mean over tokens becomes that of the responses' means.
            weights = (tokens_a_row / mask.sum(1, keepdim=True).clamp(min=1)).expand(mask.shape)
        # Scaling the loss alone leaves statistics what they are, means over tokens.
        scale = {"sum": tokens_a_row, "constant": tokens_a_row / self.max_response_tokens}.get(self.aggregation, 1.0)

        def total(terms: Tensor) -> Tensor:
            return torch.where(mask, terms if weights is None else terms * weights, 0.0).sum() / denominator

        loss, stats = self.objective(logprobs, rows, weights=weights, denominator=denominator, kl_coefficient=kl_coefficient)
        if self.kl_in_loss and self.group == 1:
            kl = total(approximate_kl(logprobs, torch.where(mask, rows.reference_logprobs, 0.0), self.kl_estimator))
            loss = loss + kl_coefficient * kl
            stats["kl_loss"] = kl.detach()
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * total(entropy)
        loss = scale * loss
        return loss, stats | {"loss": loss.detach()}


def best_and_worst(scores: Tensor, samples_per_prompt: int) -> Tensor:
    """Rows of each prompt's best and worst sample, in turns; none of a prompt whose scores are all equal."""
    groups = scores.view(-1, samples_per_prompt)
    first = torch.arange(len(groups)) * samples_per_prompt
    pairs = torch.stack([first + groups.argmax(1), first + groups.argmin(1)], dim=1)
    return pairs[groups.amax(1) > groups.amin(1)].flatten()


def best(scores: Tensor, samples_per_prompt: int) -> Tensor:
    """The row of each prompt's best sample; none of a prompt whose scores are all equal, where no sample is the best."""
    return best_and_worst(scores, samples_per_prompt)[::2]


def build_online_algorithm(config: Config) -> OnlineAlgorithm:
    """The composition that the configuration describes; `aligner.checks.algorithm` has made sure that its parts fit."""
    settings, samples_per_prompt = config.algorithm, config.rollout.samples_per_prompt
    return OnlineAlgorithm(
        estimate=build_estimate(settings, samples_per_prompt),
        objective=build_objective(settings, samples_per_prompt),
        select={"all": None, "best": best, "best_and_worst": best_and_worst}[settings.train_on],
        samples_per_prompt=samples_per_prompt,
        group=rows_together(config),
        aggregation=settings.aggregation,  # type: ignore[arg-type]  # the schema's choices, here and below
        max_response_tokens=config.rollout.max_response_tokens,
        kl_in_loss=settings.kl_placement == "loss",
        kl_estimator=settings.kl_estimator,  # type: ignore[arg-type]
        entropy_coefficient=settings.entropy_coefficient,
        whiten_rewards=settings.whiten_rewards,
        whiten_advantages=settings.whiten_advantages,
        whiten_within_prompt=settings.whiten_over == "prompt",
        shaping=build_shaping(config),
    )


def build_shaping(config: Config) -> ScoreShaping:
    """What becomes of a run's scores before it learns from them, or compares them."""
    return ScoreShaping(config.reward.missing_end_score, config.rollout.max_response_tokens, overlong_buffer(config))


def build_estimate(settings: AlgorithmConfig, samples_per_prompt: int) -> Estimate:
    """The advantage estimator."""
    of_scores = {"rloo": advantages.rloo, "grpo": advantages.grpo, "dr_grpo": advantages.dr_grpo}
    of_rewards = {"reinforce": advantages.reinforce, "reinforce_plus_plus": advantages.reinforce_plus_plus}

    def estimate(rewards: Tensor, values: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `Estimate`."""
        if values is not None:
            return advantages.gae(rewards, values, mask, settings.gamma, settings.lam)
        if settings.advantage in of_rewards:
            return of_rewards[settings.advantage](rewards, mask, settings.gamma), None
        if settings.advantage in of_scores:
            # A grouped baseline is that of the whole response: its score, less a KL penalty in the reward.
            of_responses = of_scores[settings.advantage](rewards.sum(1), samples_per_prompt)
            return torch.where(mask, of_responses[:, None], 0.0), None
        return torch.zeros_like(rewards), None

    return estimate


def build_objective(settings: AlgorithmConfig, samples_per_prompt: int) -> Objective:
    """The policy's loss, without penalty and bonus."""
    clip: dict[str, Any] = {"clip_low": settings.clip_low, "clip_high": settings.clip_high}
    objectives: Mapping[str, Callable[..., tuple[Tensor, Stats]]] = {
        "clip": functools.partial(clipped_surrogate, settings=settings),
        "cispo": functools.partial(clipped_importance, **clip),
        "reinforce": policy_gradient,
        "copg": functools.partial(contrastive, samples_per_prompt=samples_per_prompt),
        "dpo": functools.partial(preference, settings=settings),
        "cross_entropy": imitation,
    }
    return objectives[settings.loss]


def clipped_surrogate(
    logprobs: Tensor, rows: Experience, *, settings: AlgorithmConfig, weights: Tensor | None, denominator: float, **_: Any
) -> tuple[Tensor, Stats]:
    """PPO's surrogate. Without truncated importance sampling the samples count as the trainer's own.

    With it they are the engine's, and the trainer's log-probs before the update are the proximal ones.
    """
    trainer, corrected = rows.old_logprobs, settings.truncated_importance != "none"
    return losses.policy_loss(
        logprobs,
        rows.engine_logprobs if corrected else trainer,
        rows.advantages,
        rows.mask,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        ratio_level=settings.ratio_level,  # type: ignore[arg-type]  # the schema's choices, here and below
        proximal_logprobs=trainer if corrected else None,
        behavior_weight_cap=settings.truncated_importance_cap if corrected else None,
        behavior_level="sequence" if settings.truncated_importance == "sequence" else "token",
        above_behavior_cap=settings.above_importance_cap,  # type: ignore[arg-type]
        weights=weights,
        denominator=denominator,
    )


def clipped_importance(
    logprobs: Tensor,
    rows: Experience,
    *,
    clip_low: float,
    clip_high: float,
    weights: Tensor | None,
    denominator: float,
    **_: Any,
) -> tuple[Tensor, Stats]:
    """CISPO."""
    return losses.cispo_loss(
        logprobs,
        rows.old_logprobs,
        rows.advantages,
        rows.mask,
        clip_low=clip_low,
        clip_high=clip_high,
        weights=weights,
        denominator=denominator,
    )


def policy_gradient(
    logprobs: Tensor, rows: Experience, *, weights: Tensor | None, denominator: float, **_: Any
) -> tuple[Tensor, Stats]:
    """REINFORCE's loss: no ratio, so samples count as the policy's own however old they are."""
    return losses.reinforce_loss(logprobs, rows.advantages, rows.mask, weights=weights, denominator=denominator)


def contrastive(
    logprobs: Tensor, rows: Experience, *, samples_per_prompt: int, denominator: float, kl_coefficient: float, **_: Any
) -> tuple[Tensor, Stats]:
    """CoPG. Without a KL penalty in the reward a response's rewards add up to its score."""
    return losses.contrastive_policy_gradient_loss(
        logprobs,
        rows.reference_logprobs,
        rows.rewards.sum(1),
        rows.mask,
        group_size=samples_per_prompt,
        kl_coefficient=kl_coefficient,
        denominator=denominator,
    )


def preference(
    logprobs: Tensor, rows: Experience, *, settings: AlgorithmConfig, denominator: float, **_: Any
) -> tuple[Tensor, Stats]:
    """DPO on pairs of rows, the better one first (Guo et al. 2024, "Direct Language Model Alignment from Online AI Feedback").

    With truncated importance sampling a pair counts by how much likelier the trainer is to draw it, before the update, than
    the engine was: the product of its two responses' ratios. `denominator` counts rows.
    """
    if settings.truncated_importance == "none":
        return pair_loss(logprobs, rows.reference_logprobs, rows.mask, settings.preference, denominator / 2)
    weights, above = losses.behavior_weights(
        _pairs(rows.old_logprobs),
        _pairs(rows.engine_logprobs),
        _pairs(rows.mask),
        settings.truncated_importance_cap,
        "sequence",
        settings.above_importance_cap,  # type: ignore[arg-type]
    )
    weights, above = weights[:, 0], above[:, 0]  # a pair's, for each of its tokens
    loss, stats = pair_loss(logprobs, rows.reference_logprobs, rows.mask, settings.preference, denominator / 2, weights)
    importance = {"importance_mean": weights, "importance_truncated": above.to(weights.dtype)}
    return loss, stats | {name: of_pairs.sum() / (denominator / 2) for name, of_pairs in importance.items()}


def _pairs(of_tokens: Tensor) -> Tensor:
    """Rows [2P, T], pair by pair, as [P, 2T]: a pair is one draw."""
    return of_tokens.reshape(-1, 2 * of_tokens.shape[1])


def imitation(
    logprobs: Tensor, rows: Experience, *, weights: Tensor | None, denominator: float, **_: Any
) -> tuple[Tensor, Stats]:
    """Cross entropy of the chosen samples: best-of-n fine-tuning."""
    terms = logprobs if weights is None else logprobs * weights
    loss = losses.cross_entropy_loss(terms, rows.mask, denominator=denominator)
    return loss, {"loss": loss.detach()}
