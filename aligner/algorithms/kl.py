"""Estimators of the Kullback–Leibler divergence, and the controller of the KL coefficient."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def approximate_kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: str = "k1") -> Tensor:
    """Return an estimate of KL(policy ‖ reference) for each token that the policy generated.

    With d = logprobs - reference_logprobs: k1 = d, k2 = d²/2, k3 = exp(-d) - 1 + d (Schulman,
    "Approximating KL divergence", 2020). k1 and k3 are unbiased; k3 is never negative.

    Args:
        logprobs: Log-probs of the policy, of any shape.
        reference_logprobs: Log-probs of the reference model, of the same shape.
        estimator: `k1`, `k2` or `k3`.

    Returns:
        The estimates, of the shape of `logprobs`.

    Raises:
        ValueError: `estimator` is unknown.
    """
    log_ratio = logprobs - reference_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        # expm1 is accurate for small log-ratios.
        return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"unknown KL estimator {estimator!r}; allowed: k1, k2, k3")


@dataclass
class KLController:
    """Coefficient of the KL penalty, constant or adapted to a target KL per sequence.

    With a target, each update computes error = clip(KL / target - 1, ±0.2) and coefficient ←
    coefficient · (1 + error · steps / horizon) (Ziegler et al. 2019, section 2.2).

    Raises:
        ValueError: `target` is set, and `target` or `horizon` is not above 0.
    """

    coefficient: float
    """Current weight of the KL penalty."""
    target: float | None = None
    """Target of the KL divergence per sequence, in nats; None keeps the coefficient constant."""
    horizon: int = 1
    """Time constant of the adaptation, in sequences."""

    def __post_init__(self) -> None:
        if self.target is not None and (self.target <= 0 or self.horizon <= 0):
            raise ValueError(f"target={self.target} and horizon={self.horizon}: must be > 0")

    def resume(self, coefficient: float) -> None:
        """Restore the coefficient from a checkpoint.

        Without a target, or if the configured coefficient is 0, the configured coefficient is kept.
        """
        if self.target is not None and self.coefficient:
            self.coefficient = coefficient

    def update(self, current: float, steps: int) -> None:
        """Adapt the coefficient to the mean KL of the latest sequences.

        Args:
            current: Mean KL divergence per sequence, in nats.
            steps: Number of sequences.

        Raises:
            ValueError: A target is set and `current` is not finite.
        """
        if self.target is None:
            return
        if not math.isfinite(current):
            raise ValueError(
                f"algorithm.kl_target={self.target:g}: the mean KL divergence per sequence is"
                f" {current}, must be finite to adapt the KL coefficient"
            )
        # Ziegler et al. 2019, section 2.2
        error = min(max(current / self.target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * steps / self.horizon
