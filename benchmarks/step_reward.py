"""The reward of benchmarks.step: trivial and the same on both sides.

The environment of TRL imports no module of this project except this one and benchmarks.step_trl.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def _score(response: str) -> float:
    return float(len(response) % 8)


def ours(requests: Sequence[Any]) -> list[float]:
    """Return the rewards of requests, for `reward.function`."""
    return [_score(request.response) for request in requests]


def trl(completions: Sequence[str], **_: Any) -> list[float]:
    """Return the rewards of completions, for GRPOTrainer's `reward_funcs`."""
    return [_score(completion) for completion in completions]
