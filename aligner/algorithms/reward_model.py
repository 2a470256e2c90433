"""Reward models: of whole answers from pairs (Bradley and Terry 1952), and of steps from their labels.

A sequence's raw reward is the head's number at its last token. In the [B, S-1] tensors of its rows entry t speaks of token
t+1 here too: of the head's number there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from aligner.algorithms.dpo import pair_members
from aligner.algorithms.losses import Stats, pairwise_reward_loss, pairwise_reward_stats, token_label_loss
from aligner.algorithms.sft import demonstration_rows
from aligner.config.normalization import NORMALIZATION
from aligner.data.examples import Demonstration, LabeledSteps, Preference
from aligner.data.types import Rows
from aligner.errors import AlignerError
from aligner.megatron.value_model import ValueModel
from aligner.rewards.shaping import RewardNormalizer


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


def pair_rows(pairs: Sequence[Preference], pad_token_id: int) -> PairRows:
    """Two rows a pair, the chosen one first; a pair without a margin has 0."""
    rows = demonstration_rows(pair_members(pairs), pad_token_id)
    last = torch.arange(1, rows.tokens.shape[1]) == rows.lengths[:, None] - 1
    margins = torch.tensor([pair.margin or 0.0 for pair in pairs]).repeat_interleave(2)
    return PairRows(rows.tokens, rows.lengths, last, margins)


def step_rows(examples: Sequence[LabeledSteps], pad_token_id: int) -> StepRows:
    """A row an answer."""
    rows = demonstration_rows([Demonstration(each.tokens, each.prompt_length) for each in examples], pad_token_id)
    mask, labels = torch.zeros_like(rows.mask), torch.zeros(rows.mask.shape)
    for row, example in enumerate(examples):
        mask[row, example.positions - 1] = True
        labels[row, example.positions - 1] = example.labels
    return StepRows(rows.tokens, rows.lengths, mask, labels)


def sequence_rewards(values: Tensor, rows: Rows) -> Tensor:
    """Raw rewards [B] out of the head's numbers [B, S]."""
    return values.gather(1, rows.lengths[:, None] - 1)[:, 0]


def pairwise_loss(values: Tensor, rows: PairRows, denominator: float, *, normalizer: RewardNormalizer) -> tuple[Tensor, Stats]:
    """Loss and statistics of normalized rewards; `denominator` counts pairs; see `aligner.megatron.value_model.RowsLoss`."""
    chosen, rejected = normalizer(sequence_rewards(values, rows)).view(-1, 2).unbind(1)
    loss = pairwise_reward_loss(chosen, rejected, rows.margins[::2], denominator=denominator)
    return loss, {"loss": loss.detach()} | pairwise_reward_stats(chosen, rejected, denominator=denominator)


def step_loss(values: Tensor, rows: StepRows, denominator: float) -> tuple[Tensor, Stats]:
    """Binary cross entropy of the labeled tokens, and the share on the right side of 0."""
    values = values[:, 1:]
    loss = token_label_loss(values, rows.labels, rows.mask, denominator=denominator)
    right = rows.mask & ((values.detach() > 0) == (rows.labels > 0.5))
    return loss, {"loss": loss.detach(), "accuracy": right.sum() / denominator}


@dataclass(frozen=True)
class PairwiseRewardModel:
    """See `aligner.algorithms.offline.OfflineTask`.

    The loss is that of normalized rewards, under which the initial policy's samples had mean 0 and deviation 1 when the
    head was new; what is stored is the normalization of the head as it has become (Huang et al. 2023, detail 6).
    """

    model: ValueModel
    pad_token_id: int
    samples: Rows
    """Of the initial policy; whole sequences."""
    normalizer: RewardNormalizer
    """Of the model before its first step."""
    name: ClassVar[str] = "reward_model"
    part: ClassVar[str] = "reward_model"

    @classmethod
    def start(cls, model: ValueModel, pad_token_id: int, samples: Sequence[Demonstration]) -> PairwiseRewardModel:
        """Normalize a model that has not been trained. Raises AlignerError where its rewards of the samples are equal."""
        rows = demonstration_rows(samples, pad_token_id)
        return cls(model, pad_token_id, rows, fit_normalizer(model, rows))

    def rows(self, examples: Sequence[Preference]) -> PairRows:
        """Two rows a pair."""
        return pair_rows(examples, self.pad_token_id)

    def count(self, rows: PairRows) -> float:
        """Pairs."""
        return rows.tokens.shape[0] / 2

    def train(self, rows: PairRows) -> dict[str, float]:
        """One optimizer step."""
        loss = functools.partial(pairwise_loss, normalizer=self.normalizer)
        return self.model.train_rows(rows, loss, denominator=self.count(rows), group=2)

    def evaluate(self, rows: PairRows, denominator: float) -> Stats:
        """The loss as it is."""
        values = self.model.values(rows.tokens, rows.lengths)
        return pairwise_loss(values, rows, denominator, normalizer=self.normalizer)[1]

    def companions(self) -> Mapping[str, Any]:
        """The normalization of the model as it is."""
        return {NORMALIZATION: asdict(fit_normalizer(self.model, self.samples))}


@dataclass(frozen=True)
class ProcessRewardModel:
    """See `aligner.algorithms.offline.OfflineTask`. The head's number at a step's end is the logit of its being right."""

    model: ValueModel
    pad_token_id: int
    name: ClassVar[str] = "reward_model"
    part: ClassVar[str] = "reward_model"

    def rows(self, examples: Sequence[LabeledSteps]) -> StepRows:
        """Rows that learn at the steps' last tokens."""
        return step_rows(examples, self.pad_token_id)

    def count(self, rows: StepRows) -> float:
        """Labeled tokens."""
        return float(rows.mask.sum())

    def train(self, rows: StepRows) -> dict[str, float]:
        """One optimizer step."""
        return self.model.train_rows(rows, step_loss, denominator=self.count(rows))

    def evaluate(self, rows: StepRows, denominator: float) -> Stats:
        """The loss as it is."""
        return step_loss(self.model.values(rows.tokens, rows.lengths), rows, denominator)[1]

    def companions(self) -> Mapping[str, Any]:
        """None: a normalized logit would be no logit."""
        return {}


def fit_normalizer(model: ValueModel, samples: Rows) -> RewardNormalizer:
    """What gives the model's rewards of the samples mean 0 and deviation 1. Collective.

    Raises AlignerError where they are all equal, or not finite.
    """
    rewards = sequence_rewards(model.values(samples.tokens, samples.lengths), samples)
    try:
        return RewardNormalizer.fit(rewards)
    except ValueError as error:
        raise AlignerError(
            f"the reward model cannot be normalized by its rewards of {len(rewards)} samples of the initial policy: {error}"
        ) from error
