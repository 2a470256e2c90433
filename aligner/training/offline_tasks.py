"""What an offline run learns: from demonstrations (SFT), preferences (DPO, a reward model) or labeled steps."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aligner.algorithms.losses import cross_entropy_loss, token_label_loss
from aligner.algorithms.preference_losses import pair_loss, pairwise_reward_loss, pairwise_reward_stats
from aligner.data.examples import Demonstration, LabeledSteps, Preference
from aligner.data.types import Rows, Stats, response_mask
from aligner.errors import AlignerError
from aligner.megatron.policy import Policy
from aligner.megatron.value_model import ValueModel
from aligner.models.model_source import NORMALIZATION
from aligner.rewards.normalizer import RewardNormalizer
from aligner.schema import PreferenceConfig


@dataclass(frozen=True)
class PreferenceRows(Rows):
    """Chosen, rejected, chosen, rejected, …; the mask is that of the responses."""

    reference_logprobs: Tensor
    """float32 [B, S-1]"""


def pair_members(pairs: Sequence[Preference]) -> list[Demonstration]:
    """Chosen, rejected, chosen, rejected, …"""
    return [member for pair in pairs for member in (pair.chosen, pair.rejected)]


@dataclass(frozen=True)
class DirectPreferenceOptimization:
    """See `aligner.training.offline.OfflineTask`. The reference is the model that the run starts from."""

    model: Policy
    pad_token_id: int
    settings: PreferenceConfig
    name: ClassVar[str] = "dpo"
    part: ClassVar[str] = "policy"

    def rows(self, examples: Sequence[Preference]) -> PreferenceRows:
        """Two rows a pair, with the reference's log-probs."""
        rows = demonstration_rows(pair_members(examples), self.pad_token_id)
        reference = self.model.reference_logprobs(rows.tokens, rows.lengths)
        return PreferenceRows(rows.tokens, rows.lengths, rows.mask, reference)

    def count(self, rows: PreferenceRows) -> float:
        """Pairs."""
        return rows.tokens.shape[0] / 2

    def train(self, rows: PreferenceRows) -> dict[str, float]:
        """One optimizer step."""
        return self.model.train(rows, self._loss, denominator=self.count(rows), group=2)

    def evaluate(self, rows: PreferenceRows, denominator: float) -> Stats:
        """The loss as it is."""
        logprobs = self.model.logprobs(rows.tokens, rows.lengths)
        return pair_loss(logprobs, rows.reference_logprobs, rows.mask, self.settings, denominator)[1]

    def companions(self) -> Mapping[str, Any]:
        """None."""
        return {}

    def _loss(self, logprobs: Tensor, entropy: Tensor, rows: PreferenceRows, denominator: float) -> tuple[Tensor, Stats]:
        return pair_loss(logprobs, rows.reference_logprobs, rows.mask, self.settings, denominator)


def demonstration_rows(demonstrations: Sequence[Demonstration], pad_token_id: int) -> Rows:
    """Right-padded rows of demonstrations, in their order; the mask is that of the responses."""
    lengths = torch.tensor([demonstration.tokens.numel() for demonstration in demonstrations])
    prompt_lengths = torch.tensor([demonstration.prompt_length for demonstration in demonstrations])
    tokens = pad_sequence(
        [demonstration.tokens for demonstration in demonstrations], batch_first=True, padding_value=pad_token_id
    )
    return Rows(tokens, lengths, response_mask(lengths, prompt_lengths, tokens.shape[1]))


def sft_loss(logprobs: Tensor, entropy: Tensor, rows: Rows, denominator: float) -> tuple[Tensor, Stats]:
    """Cross entropy of the response tokens; see `aligner.megatron.policy.PolicyLoss`."""
    loss = cross_entropy_loss(logprobs, rows.mask, denominator=denominator)
    return loss, {"loss": loss.detach()}


@dataclass(frozen=True)
class SupervisedFineTuning:
    """See `aligner.training.offline.OfflineTask`."""

    model: Policy
    pad_token_id: int
    name: ClassVar[str] = "sft"
    part: ClassVar[str] = "policy"

    def rows(self, examples: Sequence[Demonstration]) -> Rows:
        """Rows that learn from the responses alone."""
        return demonstration_rows(examples, self.pad_token_id)

    def count(self, rows: Rows) -> float:
        """Response tokens."""
        return float(rows.mask.sum())

    def train(self, rows: Rows) -> dict[str, float]:
        """One optimizer step."""
        return self.model.train(rows, sft_loss, denominator=self.count(rows))

    def evaluate(self, rows: Rows, denominator: float) -> Stats:
        """The loss as it is."""
        logprobs = self.model.logprobs(rows.tokens, rows.lengths)
        return sft_loss(logprobs, torch.zeros_like(logprobs), rows, denominator)[1]

    def companions(self) -> Mapping[str, Any]:
        """None."""
        return {}


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
    """See `aligner.training.offline.OfflineTask`.

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
    """See `aligner.training.offline.OfflineTask`. The head's number at a step's end is the logit of its being right."""

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
