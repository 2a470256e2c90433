"""Selections of the samples that a step trains on, by their name in `algorithm.train_on`.

The rows of each prompt's samples are consecutive. A sample without a score (a score that is not
finite) is never selected.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from aligner.data.types import ScoredSamples

ScoreSelection = Callable[[Tensor, int], Tensor]
"""Function that returns the rows to train on, int64 `[N]`, from the scores of a step, float32
`[B]`, and the number of samples per prompt. It never selects samples whose score is not finite."""
CustomSelection = Callable[[ScoredSamples], Tensor]
"""Custom selection: function that returns the rows to train on, int64 `[N]`, from the samples of a
step with log-probs, rewards and values."""


def score_bounds(scores: Tensor, samples_per_prompt: int) -> tuple[Tensor, Tensor]:
    """Return two copies `[P, K]` of the scores `[B]`: one for maxima and one for minima.

    A sample without a score has -inf in the first tensor, so it is never the maximum, and inf in
    the second tensor, so it is never the minimum.
    """
    groups = scores.view(-1, samples_per_prompt)
    has_score = groups.isfinite()
    return torch.where(has_score, groups, -torch.inf), torch.where(has_score, groups, torch.inf)


def best_and_worst(scores: Tensor, samples_per_prompt: int) -> Tensor:
    """Return the rows of each prompt's best and worst sample, alternating, int64 `[N]`.

    A prompt whose scores are all equal, or that has fewer than two scores, contributes no rows.
    """
    high, low = score_bounds(scores, samples_per_prompt)
    first_rows = torch.arange(len(high)) * samples_per_prompt
    pairs = torch.stack([first_rows + high.argmax(1), first_rows + low.argmin(1)], dim=1)
    # The comparison is also false for a prompt without any score (-inf > inf) or with one score.
    return pairs[high.amax(1) > low.amin(1)].flatten()


def all_pairs(scores: Tensor, samples_per_prompt: int) -> Tensor:
    """Return the rows of all pairs of a prompt's samples with different scores, int64 `[N]`.

    Each pair is two consecutive entries, the better sample first. The pairs of a prompt are sorted
    by the score of their better sample, highest first.
    """
    groups, _ = score_bounds(scores, samples_per_prompt)
    # A stable sort makes the order of equal scores reproducible.
    order = groups.argsort(dim=1, descending=True, stable=True)
    better, worse = torch.triu_indices(samples_per_prompt, samples_per_prompt, 1)
    first_rows = torch.arange(len(groups))[:, None] * samples_per_prompt
    pairs = torch.stack([first_rows + order[:, better], first_rows + order[:, worse]], dim=2).view(
        -1, 2
    )
    has_scores = scores[pairs].isfinite().all(1)
    return pairs[has_scores & (scores[pairs[:, 0]] > scores[pairs[:, 1]])].flatten()


def best(scores: Tensor, samples_per_prompt: int) -> Tensor:
    """Return the row of each prompt's best sample, int64 `[N]`.

    A prompt whose scores are all equal, or that has fewer than two scores, contributes no row.
    """
    return best_and_worst(scores, samples_per_prompt)[::2]


def rejection_sampled_rows(
    scores: Tensor, samples_per_prompt: int, which: str, least: float | None
) -> Tensor:
    """Return the rows that rejection sampling accepts, int64 `[N]`.

    Args:
        scores: float32 `[B]`.
        samples_per_prompt: Number of consecutive rows of each prompt.
        which: Value of `algorithm.responses`: `best` selects each prompt's best sample, the first
            of equally good samples; any other value selects all samples.
        least: Smallest accepted score; None accepts all scores.
    """
    high, _ = score_bounds(scores, samples_per_prompt)
    first_rows = torch.arange(len(high)) * samples_per_prompt
    rows = first_rows + high.argmax(1) if which == "best" else torch.arange(len(scores))
    rows = rows[scores[rows].isfinite()]
    return rows if least is None else rows[scores[rows] >= least]


PAIRS: Mapping[str, ScoreSelection] = {"best_and_worst": best_and_worst, "all": all_pairs}
"""Selections of pairs of samples by their name in `algorithm.pairs`."""
SELECTIONS: Mapping[str, ScoreSelection | None] = {
    "all": None,
    "best": best,
    "best_and_worst": best_and_worst,
}
"""Selections by their name in `algorithm.train_on`; None means that a step trains on all samples
and does not wait for their scores before it computes log-probs."""
