"""A scoring function as a user might write it, wrong for one prompt."""

from __future__ import annotations

from collections.abc import Sequence

from aligner.rewards.scorers import ScoringRequest

BAD_PROMPT = "xyz"


def raising(requests: Sequence[ScoringRequest]) -> list[float]:
    if any(request.prompt == BAD_PROMPT for request in requests):
        raise LookupError("no rule for this prompt")
    return [0.5] * len(requests)


def digit_steps(requests: Sequence[ScoringRequest]) -> list[list[tuple[int, float]]]:
    """Each digit ends a step that is worth 1."""
    return [
        [(place + 1, 1.0) for place, each in enumerate(request.response) if each.isdigit()]
        for request in requests
    ]
