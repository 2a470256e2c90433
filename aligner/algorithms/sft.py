"""Supervised fine-tuning: learning the responses of demonstrations, given their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aligner.algorithms.losses import Stats, cross_entropy_loss
from aligner.data.examples import Demonstration
from aligner.data.types import Rows, response_mask
from aligner.megatron.policy import Policy


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
    """See `aligner.algorithms.offline.OfflineTask`."""

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
