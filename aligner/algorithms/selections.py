"""Selections: which of a step's samples are learned from, by name (`algorithm.train_on`)."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from aligner.data.types import SampleBatch

Select = Callable[[SampleBatch, Tensor], Tensor]
"""From a step's samples and their scores, float32 [B], to the rows to learn from, int64 [N]."""


def best_and_worst(scores: Tensor, samples_per_prompt: int) -> Tensor:
    """Rows of each prompt's best and worst sample, in turns; none of a prompt whose scores are all equal."""
    groups = scores.view(-1, samples_per_prompt)
    first = torch.arange(len(groups)) * samples_per_prompt
    pairs = torch.stack([first + groups.argmax(1), first + groups.argmin(1)], dim=1)
    return pairs[groups.amax(1) > groups.amin(1)].flatten()


def best(scores: Tensor, samples_per_prompt: int) -> Tensor:
    """The row of each prompt's best sample; none of a prompt whose scores are all equal, where no sample is the best."""
    return best_and_worst(scores, samples_per_prompt)[::2]


SELECTIONS: Mapping[str, Select | None] = {
    "all": None,
    "best": lambda samples, scores: best(scores, samples.samples_per_prompt),
    "best_and_worst": lambda samples, scores: best_and_worst(scores, samples.samples_per_prompt),
}
"""None: nothing is left out, and the scores are not waited for."""
