"""What a teacher says of its most probable tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class TaughtTokens:
    """A teacher's distribution at each place of some rows, by its k most probable tokens; zeros
    where it was not asked."""

    logprobs: Tensor
    """float32 [B, S-1]: of the token that follows"""
    ids: Tensor
    """int32 [B, S-1, k]: the most probable ones, in their order"""
    outcomes: Tensor
    """float32 [B, S-1, k+1]: the log-probs of these, and that of all other tokens together"""

    def packed(self) -> Tensor:
        """All of it as float32 [B, S-1, 2+2k], in which ids are exact up to 2^24."""
        return torch.cat([self.logprobs[..., None], self.outcomes, self.ids.float()], -1)

    @classmethod
    def unpacked(cls, packed: Tensor) -> Self:
        """What `packed` gave."""
        count = packed.shape[-1] // 2 - 1
        return cls(packed[..., 0], packed[..., 2 + count :].int(), packed[..., 1 : 2 + count])
