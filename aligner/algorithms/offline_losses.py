"""Losses of offline runs: demonstrations, preferences, labeled answers, and labeled steps.

Each loss function returns the contribution of its rows to the loss of the whole batch, and
statistics. Both are sums over the rows, divided by `denominator`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.algorithms.distillation import distillation_loss
from aligner.algorithms.policy_losses import build_reduction, cross_entropy_loss, token_label_loss
from aligner.algorithms.preference_losses import (
    kto_loss,
    pairwise_reward_loss,
    pairwise_reward_stats,
)
from aligner.data.types import Rows, Stats
from aligner.schema import PreferenceConfig, TeacherConfig


@dataclass(frozen=True)
class PreferenceRows(Rows):
    """Pairs of answers for a preference loss.

    The rows are chosen, rejected, chosen, rejected, … The mask is true at the response tokens.
    """

    reference_logprobs: Tensor
    """Log-probs of the reference model, float32 `[B, S-1]`; 0 if the loss has no reference."""
    margins: Tensor
    """Reward of the chosen answer minus reward of the rejected answer, float32 `[B]`, the same
    value for both rows of a pair; NaN if unknown."""


@dataclass(frozen=True)
class LabeledRows(Rows):
    """Answers with a label, desirable or undesirable, for KTO.

    The mask is true at the response tokens.
    """

    reference_logprobs: Tensor
    """Log-probs of the reference model, float32 `[B, S-1]`."""
    is_desirable: Tensor
    """Whether each answer is desirable, bool `[B]`."""
    baseline: Tensor
    """Estimate of the KL divergence between policy and reference, float32 `[B]`, the same value for
    all rows of a step."""
    label_weight: Tensor
    """Number of rows of the step divided by the number of rows with the row's label, float32
    `[B]`."""


@dataclass(frozen=True)
class PairRows(Rows):
    """Pairs of answers for a reward model.

    The rows are chosen, rejected, chosen, rejected, … The mask is true at the last token of each
    answer.
    """

    margins: Tensor
    """Required difference of the pair's rewards, float32 `[B]`, the same value for both rows of a
    pair."""


@dataclass(frozen=True)
class StepRows(Rows):
    """Answers with labeled steps, for a process reward model.

    The mask is true at the last token of each step.
    """

    labels: Tensor
    """Labels in [0, 1] at the masked tokens, float32 `[B, S-1]`."""


def imitation_loss(logprobs: Tensor, rows: Rows, denominator: float) -> tuple[Tensor, Stats]:
    """Return the cross entropy of the response tokens, and the statistic `loss`.

    Args:
        logprobs: Log-probs `[B, S-1]` of the policy, differentiable.
        rows: Demonstrations.
        denominator: Number of response tokens of the whole batch.
    """
    loss = cross_entropy_loss(logprobs, rows.mask, denominator)
    return loss, {"loss": loss.detach()}


def offline_distillation_loss(
    logprobs: Tensor, rows: Rows, teacher: TeacherConfig, denominator: float
) -> tuple[Tensor, Stats]:
    """Return the weighted sum of the divergence from a teacher and the cross entropy.

    The weights are `teacher.weight` and `teacher.imitation_weight`.

    Args:
        logprobs: Log-probs `[B, S-1]` of the policy for the response tokens, differentiable.
        rows: Demonstrations with the candidate log-probs of the teacher and of the policy.
        teacher: Section `teacher` of the configuration.
        denominator: Number of response tokens of the whole batch.

    Returns:
        The loss, a scalar, and the statistics `loss`, `cross_entropy` and `teacher_divergence`.
    """
    cross_entropy = cross_entropy_loss(logprobs, rows.mask, denominator)
    divergence, stats = distillation_loss(
        rows, teacher, build_reduction(rows.mask, None, denominator)
    )
    loss = (
        divergence + teacher.imitation_weight * cross_entropy
        if teacher.imitation_weight
        else divergence
    )
    return loss, {"loss": loss.detach(), "cross_entropy": cross_entropy.detach()} | stats


def labeled_answer_loss(
    logprobs: Tensor, rows: LabeledRows, settings: PreferenceConfig, denominator: float
) -> tuple[Tensor, Stats]:
    """Return the KTO loss of labeled answers. See `preference_losses.kto_loss`.

    Args:
        logprobs: Log-probs `[B, S-1]` of the policy, differentiable.
        rows: Labeled answers.
        settings: Section `algorithm.preference` of the configuration.
        denominator: Number of answers of the whole batch.

    Returns:
        The loss, a scalar, and these statistics:
            - `loss`
            - `chosen_reward` and `rejected_reward`: mean implicit rewards of the step's desirable
              and undesirable answers
            - `margin`: `chosen_reward` minus `rejected_reward`
            - `accuracy`: share of answers whose log-ratio is above the baseline if they are
              desirable, and not above it if they are undesirable
            - `kl`: the baseline
    """
    beta = settings.beta
    log_ratios = torch.where(rows.mask, logprobs - rows.reference_logprobs, 0.0).sum(1)
    weights = settings.desirable_weight, settings.undesirable_weight
    loss = kto_loss(
        log_ratios, rows.is_desirable, rows.baseline, beta, *weights, denominator=denominator
    )

    # label_weight / denominator = 1 / (answers with this label), so each sum is a mean per label.
    rewards = beta * log_ratios.detach() * rows.label_weight / denominator
    chosen = rewards[rows.is_desirable].sum()
    rejected = rewards[~rows.is_desirable].sum()
    is_correct = (log_ratios.detach() > rows.baseline) == rows.is_desirable
    return loss, {
        "loss": loss.detach(),
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "margin": chosen - rejected,
        "accuracy": is_correct.sum() / denominator,
        "kl": rows.baseline.sum() / denominator,
    }


def pairwise_loss(
    values: Tensor, rows: PairRows, denominator: float, normalize: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Stats]:
    """Return the Bradley-Terry loss of the normalized rewards of pairs, and its statistics.

    See `preference_losses.pairwise_reward_loss` and `pairwise_reward_stats`.

    Args:
        values: Outputs `[B, S]` of the reward head, differentiable.
        rows: Pairs of answers.
        denominator: Number of pairs of the whole batch.
        normalize: Function from raw rewards `[B]` to normalized rewards `[B]`.
    """
    chosen, rejected = normalize(sequence_rewards(values, rows)).view(-1, 2).unbind(1)
    loss = pairwise_reward_loss(chosen, rejected, rows.margins[::2], denominator=denominator)
    return loss, {"loss": loss.detach()} | pairwise_reward_stats(
        chosen, rejected, denominator=denominator
    )


def step_label_loss(values: Tensor, rows: StepRows, denominator: float) -> tuple[Tensor, Stats]:
    """Return the binary cross entropy of the labeled steps. See `policy_losses.token_label_loss`.

    Args:
        values: Outputs `[B, S]` of the reward head, differentiable.
        rows: Answers with labeled steps.
        denominator: Number of labeled steps of the whole batch.

    Returns:
        The loss, a scalar, and the statistics `loss` and `accuracy`, the share of steps whose
        output has the sign of the label (positive for labels above 0.5).
    """
    # Entry t of the rows' tensors [B, S-1] belongs to token t+1, so the output at token 0 has no
    # entry.
    values = values[:, 1:]
    loss = token_label_loss(values, rows.labels, rows.mask, denominator=denominator)
    is_correct = rows.mask & ((values.detach() > 0) == (rows.labels > 0.5))
    return loss, {"loss": loss.detach(), "accuracy": is_correct.sum() / denominator}


def sequence_rewards(values: Tensor, rows: Rows) -> Tensor:
    """Return the raw reward `[B]` of each row: the output `values` `[B, S]` at its last token."""
    return values.gather(1, rows.lengths[:, None] - 1)[:, 0]
