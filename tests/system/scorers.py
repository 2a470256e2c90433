"""Scoring functions like those of users, some with a defect."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from aligner.rewards.function_forms import ScoringRequest

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


async def abstaining(requests: Sequence[ScoringRequest]) -> list[float | None]:
    """Abstain on all responses to one prompt, and on others that begin with a letter up to m."""
    await asyncio.sleep(0)
    return [
        None
        if request.prompt == BAD_PROMPT or "a" <= request.response[:1] <= "m"
        else float(sum(map(str.isdigit, request.response)))
        for request in requests
    ]


def _acquire_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def deadlocked(requests: Sequence[ScoringRequest]) -> list[float]:
    _acquire_twice()
    return [0.5] * len(requests)


def deadlocked_for_one_prompt(requests: Sequence[ScoringRequest]) -> list[float]:
    if any(request.prompt == BAD_PROMPT for request in requests):
        _acquire_twice()
    return [0.5] * len(requests)
