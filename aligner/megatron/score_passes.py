"""What log-probs and their gradients need of a chunk's scores, in one pass over them each way.

As single operations these would read and write the scores, [m, V] of float32, a dozen times;
torch.compile makes one kernel of each function on a GPU, where that is the most of what a
vocabulary's log-probs cost beside their products.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def sums(scores: Tensor, local: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row of scores float32 [m, V], float32 [m] each: the largest, and relative to it the
    sum of exponentials, that sum weighted with the scores, and the score at `local` int64 [m].
    """
    peak = scores.amax(-1)
    relative = scores - peak[:, None]
    exponentials = relative.exp()
    return (
        peak,
        exponentials.sum(-1),
        (exponentials * relative).sum(-1),
        relative.gather(-1, local[:, None])[:, 0],
    )


def gradient(
    scores: Tensor,
    peak: Tensor,
    factor: Tensor,
    entropy_factor: Tensor,
    upstream: Tensor,
    local: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """factor e + entropy_factor e log(e) with e = exp(scores - peak), and `upstream` more at
    `local`: [m, V] of `dtype`."""
    relative = scores - peak[:, None]
    found = relative.exp() * (factor[:, None] + entropy_factor[:, None] * relative)
    is_target = torch.arange(scores.shape[1], device=scores.device) == local[:, None]
    return torch.where(is_target, found + upstream[:, None], found).to(dtype)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One of these functions as a kernel."""
    return torch.compile(function)


def are_fused(scores: Tensor) -> bool:
    """Whether these passes are for such scores; on a CPU blocks that stay in its caches are."""
    return scores.is_cuda
