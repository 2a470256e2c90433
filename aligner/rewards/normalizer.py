"""A reward model's normalization to mean 0 and deviation 1."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RewardNormalizer:
    """gain·reward + bias."""

    gain: float = 1.0
    bias: float = 0.0

    @classmethod
    def fit(cls, scores: Tensor, mean: float = 0.0, std: float = 1.0) -> RewardNormalizer:
        """The one that gives these scores a mean and a population standard deviation.

        gain = std / σ, bias = mean - gain·μ (Huang et al. 2023, "The N Implementation Details of RLHF with PPO", detail 6).
        Raises ValueError for scores that are all equal, or not all finite.
        """
        samples = scores.detach().double()
        if not samples.isfinite().all():
            raise ValueError("a score is not finite")
        if samples.unique().numel() < 2:
            raise ValueError(f"{samples.numel()} scores do not differ: there is no deviation to scale by")
        gain = std / float(samples.std(correction=0))
        return cls(gain, mean - gain * float(samples.mean()))

    def __call__(self, rewards: Tensor) -> Tensor:
        """Any shape, element by element."""
        return self.gain * rewards + self.bias
