"""Several sources' scores of the same responses made one: their sum, or what an ensemble of reward
models agrees on."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

Combine: TypeAlias = Callable[[Tensor, Tensor, float], Tensor]
"""Combine the scores [P, B] of P sources into [B].

The second argument, bool [P, B], is true where a source has scored; scores are 0 elsewhere, and the
result has no meaning where no source has scored. The third is the weight of the disagreement."""


def _mean(scores: Tensor, there: Tensor) -> Tensor:
    return scores.sum(0) / there.sum(0)


def _variance(scores: Tensor, there: Tensor) -> Tensor:
    """Over all of a row's scores, not a sample of them."""
    return _mean(torch.where(there, scores - _mean(scores, there), 0.0).square(), there)


COMBINATIONS: Mapping[str, Combine] = {
    "sum": lambda scores, there, weight: scores.sum(0),
    "mean": lambda scores, there, weight: _mean(scores, there),
    "min": lambda scores, there, weight: torch.where(there, scores, torch.inf).amin(0),
    "mean_minus_std": (
        lambda scores, there, weight: (
            _mean(scores, there) - weight * _variance(scores, there).sqrt()
        )
    ),
    "mean_minus_variance": (
        lambda scores, there, weight: _mean(scores, there) - weight * _variance(scores, there)
    ),
}
"""By the name that `reward.combine` has for them.

`min` is worst-case optimization (WCO) and `mean_minus_variance` uncertainty-weighted optimization
(UWO) of Coste et al. 2023, "Reward Model Ensembles Help Mitigate Overoptimization"; with
`mean_minus_std` the weight does not hang on the scores' scale.
"""
