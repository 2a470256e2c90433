"""PPO as a composition: what it makes of samples, and the loss of its policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from aligner.algorithms.advantages import gae
from aligner.algorithms.kl import KLEstimator, approximate_kl
from aligner.algorithms.losses import Stats, policy_loss
from aligner.algorithms.whitening import masked_whiten
from aligner.data.types import Experience, SampleBatch
from aligner.rewards.shaping import penalized_rewards

TruncatedImportance = Literal["none", "token", "sequence"]


def ppo_experience(
    batch: SampleBatch,
    scores: Tensor,
    values: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor,
    *,
    kl_coefficient: float,
    kl_estimator: KLEstimator,
    gamma: float,
    lam: float,
    whiten_rewards: bool,
    whiten_advantages: bool,
) -> Experience:
    """The step's experience: scores [B] and values [B, S] to rewards, advantages and returns [B, S-1].

    The KL penalty is taken token by token, the score on the last response token; rewards are whitened without moving
    their mean, advantages with (Huang et al. 2023, "The N Implementation Details of RLHF with PPO", details 10 and 11).
    """
    mask = batch.mask
    values = torch.where(mask, values[:, :-1], 0.0)
    kl = approximate_kl(old_logprobs, reference_logprobs, kl_estimator)
    rewards = penalized_rewards(scores, kl, kl_coefficient, mask)
    if whiten_rewards:
        rewards = masked_whiten(rewards, mask, shift_mean=False)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    if whiten_advantages:
        advantages = masked_whiten(advantages, mask)
    return Experience(
        tokens=batch.tokens,
        lengths=batch.lengths,
        mask=mask,
        engine_logprobs=batch.engine_logprobs,
        old_logprobs=old_logprobs,
        reference_logprobs=reference_logprobs,
        values=values,
        rewards=rewards,
        advantages=advantages,
        returns=returns,
    )


def ppo_loss(
    logprobs: Tensor,
    experience: Experience,
    denominator: float,
    *,
    clip_low: float,
    clip_high: float,
    truncated_importance: TruncatedImportance = "none",
    truncated_importance_cap: float = 2.0,
) -> tuple[Tensor, Stats]:
    """The clipped surrogate of some rows, over the minibatch's token count.

    Without truncated importance sampling the samples count as the trainer's own. With it, they are the engine's, and the
    trainer's log-probs before the update are the proximal ones.
    """
    trainer, corrected = experience.old_logprobs, truncated_importance != "none"
    return policy_loss(
        logprobs,
        experience.engine_logprobs if corrected else trainer,
        experience.advantages,
        experience.mask,
        clip_low=clip_low,
        clip_high=clip_high,
        proximal_logprobs=trainer if corrected else None,
        behavior_weight_cap=truncated_importance_cap if corrected else None,
        behavior_level="sequence" if truncated_importance == "sequence" else "token",
        denominator=denominator,
    )


def minibatches(experience: Experience, epochs: int, count: int, seed: int) -> Iterator[Experience]:
    """`epochs` passes over the rows, each reshuffled and cut into `count` minibatches; a function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    rows = experience.tokens.shape[0]
    for _ in range(epochs):
        for chosen in torch.randperm(rows, generator=generator).chunk(count):
            yield experience.select(chosen)
