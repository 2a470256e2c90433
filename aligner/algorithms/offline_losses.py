"""Losses of an offline run's rows: demonstrations, preferences, and answers whose steps are
labeled.

Each gives the rows' part of a loss, and its statistics, as sums over `denominator`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.algorithms.distillation import distillation_loss
from aligner.algorithms.policy_losses import cross_entropy_loss, token_label_loss, total_over
from aligner.algorithms.preference_losses import (
    kto_loss,
    pairwise_reward_loss,
    pairwise_reward_stats,
)
from aligner.data.types import Rows, Stats
from aligner.schema import PreferenceConfig, TeacherConfig


@dataclass(frozen=True)
class PreferenceRows(Rows):
    """Chosen, rejected, chosen, rejected, …; the mask is that of the responses."""

    reference_logprobs: Tensor
    """float32 [B, S-1]; zero where the loss has no reference"""
    margins: Tensor
    """float32 [B]: by how much the chosen one's reward is above the other's, for both of a pair;
    not a number: not known"""


@dataclass(frozen=True)
class LabeledRows(Rows):
    """Answers, each desirable or not; the mask is that of the responses."""

    reference_logprobs: Tensor
    """float32 [B, S-1]"""
    is_desirable: Tensor
    """bool [B]"""
    baseline: Tensor
    """float32 [B]: how far the policy has come from the reference, for every row of the step the
    same"""
    share: Tensor
    """float32 [B]: the step's rows over those with the row's label"""


@dataclass(frozen=True)
class PairRows(Rows):
    """Chosen, rejected, chosen, rejected, …; the mask is that of the last tokens."""

    margins: Tensor
    """float32 [B]: by how much the chosen one should be ahead, for both of a pair"""


@dataclass(frozen=True)
class StepRows(Rows):
    """Answers in steps; the mask is that of the steps' last tokens."""

    labels: Tensor
    """float32 [B, S-1]"""


def imitation_loss(logprobs: Tensor, rows: Rows, denominator: float) -> tuple[Tensor, Stats]:
    """Cross entropy of the response tokens; log-probs [B, S-1]."""
    loss = cross_entropy_loss(logprobs, rows.mask, denominator)
    return loss, {"loss": loss.detach()}


def taught_loss(
    logprobs: Tensor, rows: Rows, teacher: TeacherConfig, denominator: float
) -> tuple[Tensor, Stats]:
    """`teacher.weight` times the divergence from a teacher, and `teacher.imitation_weight` times
    the cross entropy.

    Log-probs [B, S-1] of the response tokens, of rows with the teacher's and the policy's of its
    candidates.
    """
    imitated = cross_entropy_loss(logprobs, rows.mask, denominator)
    taught, stats = distillation_loss(rows, teacher, total_over(rows.mask, None, denominator))
    loss = taught + teacher.imitation_weight * imitated if teacher.imitation_weight else taught
    return loss, {"loss": loss.detach(), "cross_entropy": imitated.detach()} | stats


def labeled_loss(
    logprobs: Tensor, rows: LabeledRows, settings: PreferenceConfig, denominator: float
) -> tuple[Tensor, Stats]:
    """KTO of the rows; log-probs [B, S-1].

    Statistics: mean implicit rewards of the desirable and the other answers of the step, their
    difference, the share of answers on their label's side of the baseline, and the baseline.
    """
    beta = settings.beta
    log_ratios = torch.where(rows.mask, logprobs - rows.reference_logprobs, 0.0).sum(1)
    weights = settings.desirable_weight, settings.undesirable_weight
    loss = kto_loss(
        log_ratios, rows.is_desirable, rows.baseline, beta, *weights, denominator=denominator
    )
    rewards = beta * log_ratios.detach() * rows.share / denominator
    chosen, rejected = rewards[rows.is_desirable].sum(), rewards[~rows.is_desirable].sum()
    right = (log_ratios.detach() > rows.baseline) == rows.is_desirable
    return loss, {
        "loss": loss.detach(),
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "margin": chosen - rejected,
        "accuracy": right.sum() / denominator,
        "kl": rows.baseline.sum() / denominator,
    }


def pairwise_loss(
    values: Tensor, rows: PairRows, denominator: float, normalized: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Stats]:
    """The pairs' loss of normalized rewards out of a head's numbers [B, S]; `denominator` counts
    pairs."""
    chosen, rejected = normalized(sequence_rewards(values, rows)).view(-1, 2).unbind(1)
    loss = pairwise_reward_loss(chosen, rejected, rows.margins[::2], denominator=denominator)
    return loss, {"loss": loss.detach()} | pairwise_reward_stats(
        chosen, rejected, denominator=denominator
    )


def step_loss(values: Tensor, rows: StepRows, denominator: float) -> tuple[Tensor, Stats]:
    """Binary cross entropy of the labeled tokens, of a head's numbers [B, S], and the share on the
    right side of 0."""
    values = values[:, 1:]
    loss = token_label_loss(values, rows.labels, rows.mask, denominator=denominator)
    right = rows.mask & ((values.detach() > 0) == (rows.labels > 0.5))
    return loss, {"loss": loss.detach(), "accuracy": right.sum() / denominator}


def sequence_rewards(values: Tensor, rows: Rows) -> Tensor:
    """Raw rewards [B] out of a head's numbers [B, S]."""
    return values.gather(1, rows.lengths[:, None] - 1)[:, 0]
