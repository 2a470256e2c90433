"""What was left to choose from where tokens were drawn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class KeptTokens:
    """What tokens were drawn among where sampling left some of the vocabulary out, as top-k and
    top-p do."""

    counts: Tensor
    """int64 [...]: to how many each one's choice was left; 0: to all"""
    starts: Tensor
    """int64 [...]: where in `ids` these begin"""
    ids: Tensor
    """int32 [K]: token ids"""

    @classmethod
    def in_order(cls, counts: Tensor, ids: Tensor) -> Self:
        """Of counts [N], whose ids are one after another."""
        return cls(counts, counts.cumsum(0) - counts, ids)

    @classmethod
    def of_all(cls, tokens: int) -> Self:
        """Of so many tokens, each drawn among all."""
        none = torch.zeros(tokens, dtype=torch.int64)
        return cls(none, none, none[:0].int())

    def at(self, index: Any) -> Self:
        """Those of some tokens: `index` is one of `counts`."""
        return replace(self, counts=self.counts[index], starts=self.starts[index])

    def in_rows(self) -> tuple[Tensor, Tensor]:
        """Every id that these tokens kept, int64 [M], behind which token's it is, int64 [M],
        counted over their flat order."""
        counts = self.counts.flatten()
        token = torch.repeat_interleave(counts)
        place = torch.arange(len(token), device=counts.device) - (counts.cumsum(0) - counts)[token]
        return token, self.ids[self.starts.flatten()[token] + place].long()

    def among(self, size: int) -> Tensor:
        """bool [N, V]: which tokens of a vocabulary of V each of these [N] was drawn among."""
        kept = (self.counts == 0)[:, None].repeat(1, size)
        return kept.index_put_(self.in_rows(), torch.tensor(True, device=kept.device))

    def each(self) -> list[Tensor]:
        """The ids of every token, int32, in flat order."""
        return list(self.in_rows()[1].int().split(self.counts.flatten().tolist()))

    def to(self, device: torch.device) -> Self:
        """The same on a device, with no ids but these tokens'."""
        own = self.in_order(self.counts.flatten(), self.in_rows()[1].int())
        starts = own.starts.view(self.counts.shape)
        return replace(
            self, counts=self.counts.to(device), starts=starts.to(device), ids=own.ids.to(device)
        )
