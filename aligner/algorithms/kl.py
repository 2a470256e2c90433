"""Kullback–Leibler estimators and the controllers of the KL coefficient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


def approximate_kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator = "k1") -> Tensor:
    """Per-token estimate of KL(policy ‖ reference) from samples of the policy; any shape, element by element.

    With d = logprobs - reference_logprobs: k1 = d, k2 = d²/2, k3 = exp(-d) - 1 + d (Schulman, "Approximating KL
    divergence", 2020). k1 and k3 are unbiased; k3 is never negative.
    """
    difference = logprobs - reference_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    raise ValueError(f"unknown KL estimator {estimator!r}; known: k1, k2, k3")


class KLController(Protocol):
    """Keeps the weight of the KL penalty."""

    coefficient: float

    def update(self, current: float, steps: int) -> None:
        """Take note of the KL per sequence that `steps` sequences showed."""
        ...


@dataclass
class FixedKLController:
    """A coefficient that stays."""

    coefficient: float

    def update(self, current: float, steps: int) -> None:
        """Nothing changes."""


@dataclass
class AdaptiveKLController:
    """A coefficient that moves so that the KL per sequence approaches `target`.

    error = clip(KL / target - 1, ±0.2), coefficient ← coefficient · (1 + error · steps / horizon) (Ziegler et al. 2019,
    section 2.2). Raises ValueError for a target or a horizon that is not above 0.
    """

    coefficient: float
    target: float
    horizon: int

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(f"target={self.target} and horizon={self.horizon} must be above 0")

    def update(self, current: float, steps: int) -> None:
        """Move the coefficient after `steps` sequences whose mean KL was `current`."""
        if not math.isfinite(current):
            raise ValueError(f"the KL is {current}")
        error = min(max(current / self.target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * steps / self.horizon
