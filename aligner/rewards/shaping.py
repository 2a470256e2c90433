"""From a score a sequence to a reward a token."""

from __future__ import annotations

import torch
from torch import Tensor


def penalized_rewards(scores: Tensor, kl: Tensor, kl_coefficient: float, mask: Tensor) -> Tensor:
    """Per-token rewards float32 [B, S-1]: -kl_coefficient * kl on response tokens, the score added on the last of them.

    `scores` float32 [B]; `kl` float32 [B, S-1]; `mask` bool [B, S-1], true on response tokens. Entries outside the mask are
    0 whatever `kl` holds there. Raises ValueError for a sequence without a response token, whose score would be lost.
    """
    if kl.shape != mask.shape or scores.shape != kl.shape[:1]:
        raise ValueError(
            f"scores {tuple(scores.shape)}, kl {tuple(kl.shape)} and mask {tuple(mask.shape)} do not fit together"
        )
    if not bool(mask.any(dim=1).all()):
        raise ValueError("a sequence has no response token to put its score on")
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1)
    rewards = torch.where(mask, -kl_coefficient * kl, 0.0)
    return rewards.scatter_add(1, last[:, None], scores[:, None].to(rewards.dtype))
