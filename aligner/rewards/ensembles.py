"""Several sources' scores of the same responses made one: their sum, or what an ensemble of reward models agrees on."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import Tensor

Combine: TypeAlias = Callable[[Tensor, float], Tensor]
"""Scores [P, B] by P sources, and the weight of their disagreement, to [B]."""

COMBINATIONS: Mapping[str, Combine] = {
    "sum": lambda scores, weight: scores.sum(0),
    "mean": lambda scores, weight: scores.mean(0),
    "min": lambda scores, weight: scores.amin(0),
    "mean_minus_std": lambda scores, weight: scores.mean(0) - weight * scores.std(0, correction=0),
    "mean_minus_variance": lambda scores, weight: scores.mean(0) - weight * scores.var(0, correction=0),
}
"""By the name that `reward.combine` has for them.

`min` is worst-case optimization (WCO) and `mean_minus_variance` uncertainty-weighted optimization (UWO) of Coste et al. 2023,
"Reward Model Ensembles Help Mitigate Overoptimization"; with `mean_minus_std` the weight does not hang on the scores' scale.
"""
