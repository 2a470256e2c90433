"""Direct preference optimization on pairs from a file (Rafailov et al. 2023), with IPO and conservative DPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from aligner.algorithms.losses import Stats, dpo_loss, dpo_stats
from aligner.algorithms.sft import demonstration_rows
from aligner.config import schema
from aligner.data.examples import Demonstration, Preference
from aligner.data.types import Rows
from aligner.megatron.policy import Policy


@dataclass(frozen=True)
class PreferenceRows(Rows):
    """Chosen, rejected, chosen, rejected, …; the mask is that of the responses."""

    reference_logprobs: Tensor
    """float32 [B, S-1]"""


def pair_members(pairs: Sequence[Preference]) -> list[Demonstration]:
    """Chosen, rejected, chosen, rejected, …"""
    return [member for pair in pairs for member in (pair.chosen, pair.rejected)]


def pair_loss(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    settings: schema.Preference,
    pairs: float,
    weights: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """The preference loss and its statistics of rows chosen, rejected, chosen, …, all [2P, T], as sums over `pairs`.

    `weights` [P] are the pairs'; the statistics are of all pairs alike.
    """

    def of_answers(of_tokens: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.where(mask, of_tokens, 0.0).sum(1)
        return whole[::2], whole[1::2]

    (chosen, rejected), (reference_chosen, reference_rejected) = of_answers(logprobs), of_answers(reference_logprobs)
    loss = dpo_loss(
        chosen,
        rejected,
        reference_chosen,
        reference_rejected,
        settings.beta,
        label_smoothing=settings.label_smoothing,
        kind=settings.kind,  # type: ignore[arg-type]  # one of its values: the schema's choices
        denominator=pairs,
        weights=weights,
    )
    stats = dpo_stats(chosen, rejected, reference_chosen, reference_rejected, settings.beta, denominator=pairs)
    return loss, {"loss": loss.detach()} | stats


@dataclass(frozen=True)
class DirectPreferenceOptimization:
    """See `aligner.algorithms.offline.OfflineTask`. The reference is the model that the run starts from."""

    model: Policy
    pad_token_id: int
    settings: schema.Preference
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
