"""Penalties on scores, and from a score to rewards of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.data.types import Sample


def penalized_rewards(scores: Tensor, kl: Tensor, kl_coefficient: float, mask: Tensor) -> Tensor:
    """Per-token rewards float32 [B, S-1]: -kl_coefficient * kl on response tokens, the score added
    on the last of them.

    `scores` float32 [B]; `kl` float32 [B, S-1]; `mask` bool [B, S-1], true on response tokens.
    Entries outside the mask are 0 whatever `kl` holds there. Raises ValueError for a sequence
    without a response token, whose score would be lost.
    """
    if kl.shape != mask.shape or scores.shape != kl.shape[:1]:
        raise ValueError(
            f"scores: got shape {tuple(scores.shape)}, kl: {tuple(kl.shape)}, mask:"
            f" {tuple(mask.shape)}; expected [B], [B, S-1] and [B, S-1]"
        )
    mask = mask.bool()
    if not bool(mask.any(dim=1).all()):
        raise ValueError("mask: every sequence must have at least one response token")
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1)
    rewards = torch.where(mask, -kl_coefficient * kl, 0.0)
    return rewards.scatter_add(1, last[:, None], scores[:, None].to(rewards.dtype))


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """What a response of so many tokens loses for its length; [B] to float [B].

    0 up to max_length - buffer, from there linearly to -1 at max_length, and -1 above (Yu et al.
    2025, "DAPO", equation 13). Raises ValueError for a buffer that is not within 1 and max_length.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer={buffer}: must be in [1, max_length={max_length}]")
    return -((lengths - (max_length - buffer)) / buffer).clamp(0.0, 1.0)


def length_penalty(lengths: Tensor, coefficient: float, target: int) -> Tensor:
    """What a response of so many tokens loses for each by which it misses the target; [B] to float
    [B].

    -coefficient * |lengths - target|: LCPO-Exact of Aggarwal & Welleck 2025, "L1: Controlling How
    Long A Reasoning Model Thinks With Reinforcement Learning". With a target of 0 it is a penalty
    on each token.
    """
    return -coefficient * (lengths - target).abs()


def missing_token_penalty(scores: Tensor, found: Tensor, penalty: float = -1.0) -> Tensor:
    """The scores [B], `penalty` taking the place of one whose response lacks the token (`found`
    bool [B])."""
    return torch.where(found.bool(), scores, penalty)


@dataclass(frozen=True)
class ScoreShaping:
    """How scores are set back before they are learned from."""

    missing_end_score: float | None
    """What a response without an end gets instead of its score; None: it keeps it."""
    max_response_tokens: int
    overlong_buffer: int
    """Tokens before the longest response over which a response loses score; 0: it loses none."""
    length_penalty: float
    """What a response loses for each drawn token between its length and the target's."""
    target_length: int

    def __call__(self, scores: Tensor, samples: Sequence[Sample]) -> Tensor:
        """Scores [B] of these samples as they are learned from; a sample without a score has none
        afterwards."""
        scores = self.of_ends(scores, samples)
        if self.overlong_buffer:
            lengths = torch.tensor([len(sample.response) for sample in samples])
            scores = scores + overlong_penalty(
                lengths, self.max_response_tokens, self.overlong_buffer
            )
        if self.length_penalty:
            drawn = torch.tensor([sample.drawn_count for sample in samples])
            scores = scores + length_penalty(drawn, self.length_penalty, self.target_length)
        return scores

    def of_ends(self, scores: Tensor, samples: Sequence[Sample]) -> Tensor:
        """Scores [B] with those of responses without an end replaced: what dynamic sampling
        compares, whatever the lengths."""
        if self.missing_end_score is None:
            return scores
        ended = torch.tensor([sample.finish_reason == "stop" for sample in samples])
        penalized = missing_token_penalty(scores, ended, self.missing_end_score)
        return torch.where(scores.isfinite(), penalized, scores)
