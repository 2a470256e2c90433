"""Scoring functions as a user might write them, wrong for one prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

from aligner.rewards.scorers import ScoringRequest

BAD_PROMPT = "xyz"


def not_a_number(requests: Sequence[ScoringRequest]) -> list[float]:
    return [math.nan if request.prompt == BAD_PROMPT else 0.5 for request in requests]


def raising(requests: Sequence[ScoringRequest]) -> list[float]:
    if any(request.prompt == BAD_PROMPT for request in requests):
        raise LookupError("no rule for this prompt")
    return [0.5] * len(requests)
