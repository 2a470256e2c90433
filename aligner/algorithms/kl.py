"""Kullback–Leibler estimators and the controller of the KL coefficient."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def approximate_kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: str = "k1") -> Tensor:
    """Per-token estimate of KL(policy ‖ reference) from samples of the policy; any shape, element
    by element.

    With d = logprobs - reference_logprobs: k1 = d, k2 = d²/2, k3 = exp(-d) - 1 + d (Schulman,
    "Approximating KL divergence", 2020). k1 and k3 are unbiased; k3 is never negative.
    """
    difference = logprobs - reference_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    raise ValueError(f"unknown KL estimator {estimator!r}; allowed: k1, k2, k3")


@dataclass
class KLController:
    """Keeps the weight of the KL penalty: as it is or, with a target, so that the KL per sequence
    approaches that.

    error = clip(KL / target - 1, ±0.2), coefficient ← coefficient · (1 + error · steps / horizon)
    (Ziegler et al. 2019, section 2.2). Raises ValueError for a target or a horizon that is not
    above 0.
    """

    coefficient: float
    target: float | None = None
    horizon: int = 1

    def __post_init__(self) -> None:
        if self.target is not None and (self.target <= 0 or self.horizon <= 0):
            raise ValueError(f"target={self.target} and horizon={self.horizon}: must be > 0")

    def resume(self, coefficient: float) -> None:
        """Go on from a checkpoint's coefficient; without a target, or from nothing, it stays as it
        is configured."""
        if self.target is not None and self.coefficient:
            self.coefficient = coefficient

    def update(self, current: float, steps: int) -> None:
        """Take note of `steps` sequences whose mean KL was `current`. Raises ValueError where that
        is not finite."""
        if self.target is None:
            return
        if not math.isfinite(current):
            raise ValueError(
                f"algorithm.kl_target={self.target:g}: the mean KL divergence per sequence is"
                f" {current}, must be finite to adapt the KL coefficient"
            )
        error = min(max(current / self.target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * steps / self.horizon
