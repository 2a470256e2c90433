"""Penalties on the scores of responses, and the conversion of scores to rewards of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.data.types import Sample


def penalized_rewards(scores: Tensor, kl: Tensor, kl_coefficient: float, mask: Tensor) -> Tensor:
    """Return rewards of tokens: the KL penalty at each response token, and the score at the last.

    Args:
        scores: Score of each response, float32 `[B]`.
        kl: KL estimate of each token, float32 `[B, S-1]`; its values outside the mask are ignored.
        kl_coefficient: Weight of the penalty -kl_coefficient · kl.
        mask: bool `[B, S-1]`, true at the response tokens.

    Returns:
        float32 `[B, S-1]`, 0 outside the mask.

    Raises:
        ValueError: The shapes do not match, or a row has no response token, so that its score would
            be lost.
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
    # The score belongs to the whole response, so the response's last token gets the score.
    last_positions = torch.where(mask, positions, -1).amax(dim=1)
    rewards = torch.where(mask, -kl_coefficient * kl, 0.0)
    return rewards.scatter_add(1, last_positions[:, None], scores[:, None].to(rewards.dtype))


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Return the soft overlong punishment of responses, between -1 and 0.

    The penalty is 0 up to max_length - buffer tokens, falls linearly to -1 at max_length, and is -1
    above (Yu et al. 2025, "DAPO", equation 13).

    Args:
        lengths: Number of response tokens, `[B]`.
        max_length: Length at which the penalty reaches -1.
        buffer: Number of tokens over which the penalty falls.

    Returns:
        float `[B]`.

    Raises:
        ValueError: `buffer` is not in [1, max_length].
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer={buffer}: must be in [1, max_length={max_length}]")
    # Yu et al. 2025, equation 13: the ramp from 0 to -1 over the last `buffer` tokens
    return -((lengths - (max_length - buffer)) / buffer).clamp(0.0, 1.0)


def length_penalty(lengths: Tensor, coefficient: float, target: int) -> Tensor:
    """Return the penalty -coefficient · |lengths - target| of responses.

    This is LCPO-Exact (Aggarwal & Welleck 2025, "L1: Controlling How Long A Reasoning Model Thinks
    With Reinforcement Learning"). With a target of 0 it is a penalty on each token.

    Args:
        lengths: Number of tokens, `[B]`.
        coefficient: Penalty for each token of difference.
        target: Target length in tokens.

    Returns:
        float `[B]`.
    """
    return -coefficient * (lengths - target).abs()


def missing_token_penalty(scores: Tensor, has_token: Tensor, penalty: float = -1.0) -> Tensor:
    """Return the scores `[B]`, replaced by `penalty` where `has_token` (bool `[B]`) is false."""
    return torch.where(has_token.bool(), scores, penalty)


@dataclass(frozen=True)
class ScoreShaping:
    """Callable that applies the configured penalties to the scores of samples."""

    missing_end_score: float | None
    """Score that replaces the score of a response without an end-of-sequence token; None: no
    replacement."""
    max_response_tokens: int
    """Largest length of a response, in tokens."""
    overlong_buffer: int
    """Number of tokens below `max_response_tokens` over which `overlong_penalty` falls; 0: no
    overlong penalty."""
    length_penalty: float
    """Penalty for each generated token of difference from `target_length`; 0: no penalty."""
    target_length: int
    """Target number of generated tokens."""

    def __call__(self, scores: Tensor, samples: Sequence[Sample]) -> Tensor:
        """Return the scores `[B]` of the samples after all penalties.

        A score that is not finite (an abstention or a failure) stays not finite.
        """
        # `missing_end_score` replaces the score, so it is applied before the penalties.
        scores = self.penalize_missing_ends(scores, samples)
        if self.overlong_buffer:
            lengths = torch.tensor([len(sample.response) for sample in samples])
            scores = scores + overlong_penalty(
                lengths, self.max_response_tokens, self.overlong_buffer
            )
        if self.length_penalty:
            generated_counts = torch.tensor([sample.generated_token_count for sample in samples])
            scores = scores + length_penalty(
                generated_counts, self.length_penalty, self.target_length
            )
        return scores

    def penalize_missing_ends(self, scores: Tensor, samples: Sequence[Sample]) -> Tensor:
        """Return the scores `[B]`, with `missing_end_score` for each response without an end token.

        Dynamic sampling compares these scores, which do not contain the length penalties. Scores
        that are not finite stay unchanged.
        """
        if self.missing_end_score is None:
            return scores
        has_end = torch.tensor([sample.finish_reason == "stop" for sample in samples])
        penalized = missing_token_penalty(scores, has_end, self.missing_end_score)
        return torch.where(scores.isfinite(), penalized, scores)
