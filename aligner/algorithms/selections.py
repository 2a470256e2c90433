"""Selections: which of a step's samples are learned from, by name (`algorithm.train_on`)."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from aligner.data.types import ScoredSamples

SelectByScore = Callable[[Tensor, int], Tensor]
"""From a step's scores, float32 [B], and the number of samples per prompt to the rows to learn
from, int64 [N]. Samples without a score, whose score is not finite, are never among them."""
Select = Callable[[ScoredSamples], Tensor]
"""The same from all that is known of the samples before anything is learned: a user's own."""


def score_bounds(scores: Tensor, samples_per_prompt: int) -> tuple[Tensor, Tensor]:
    """Scores [B] as [P, K], twice: a sample without a score is never the highest of the first, nor
    the lowest of the second."""
    groups = scores.view(-1, samples_per_prompt)
    scored = groups.isfinite()
    return torch.where(scored, groups, -torch.inf), torch.where(scored, groups, torch.inf)


def best_and_worst(scores: Tensor, samples_per_prompt: int) -> Tensor:
    """Rows of each prompt's best and worst sample, in turns; none of a prompt whose scores are all
    equal, or that has fewer than two."""
    high, low = score_bounds(scores, samples_per_prompt)
    first = torch.arange(len(high)) * samples_per_prompt
    pairs = torch.stack([first + high.argmax(1), first + low.argmin(1)], dim=1)
    return pairs[high.amax(1) > low.amin(1)].flatten()


def all_pairs(scores: Tensor, samples_per_prompt: int) -> Tensor:
    """Rows of every two samples of a prompt of which one is better, that one first, in turns; the
    best samples' come first."""
    groups, _ = score_bounds(scores, samples_per_prompt)
    order = groups.argsort(dim=1, descending=True, stable=True)
    better, worse = torch.triu_indices(samples_per_prompt, samples_per_prompt, 1)
    first = torch.arange(len(groups))[:, None] * samples_per_prompt
    pairs = torch.stack([first + order[:, better], first + order[:, worse]], dim=2).view(-1, 2)
    scored = scores[pairs].isfinite().all(1)
    return pairs[scored & (scores[pairs[:, 0]] > scores[pairs[:, 1]])].flatten()


def best(scores: Tensor, samples_per_prompt: int) -> Tensor:
    """The row of each prompt's best sample; none of a prompt whose scores are all equal, where no
    sample is the best."""
    return best_and_worst(scores, samples_per_prompt)[::2]


def kept_responses(
    scores: Tensor, samples_per_prompt: int, which: str, least: float | None
) -> Tensor:
    """Rejection sampling: all rows or each prompt's best (`algorithm.responses`), the first of
    equals, without those that score below `least` or have no score."""
    high, _ = score_bounds(scores, samples_per_prompt)
    first = torch.arange(len(high)) * samples_per_prompt
    rows = first + high.argmax(1) if which == "best" else torch.arange(len(scores))
    rows = rows[scores[rows].isfinite()]
    return rows if least is None else rows[scores[rows] >= least]


PAIRS: Mapping[str, SelectByScore] = {"best_and_worst": best_and_worst, "all": all_pairs}
"""By `algorithm.pairs`, where pairs are of samples."""
SELECTIONS: Mapping[str, SelectByScore | None] = {
    "all": None,
    "best": best,
    "best_and_worst": best_and_worst,
}
"""None: nothing is left out, and the scores are not waited for."""
