"""Fused passes over a chunk's scores for log-probs and their gradients on a GPU.

Executed as single operations, these computations would read and write the scores, float32 [m, V],
about twelve times. torch.compile makes one kernel of each function. Apart from the GEMMs, these
passes are the largest cost of log-probs over a vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def reduce_scores(scores: Tensor, local: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the statistics of each row of scores from which log-probs and entropies are computed.

    Args:
        scores: Scores of m tokens on this rank, float32 [m, V].
        local: Column of each token's target, int64 [m].

    Returns:
        Four tensors, float32 [m]. With r = score - maximum: the maximum; the sum of exp(r); the sum
        of exp(r) r; and r of the target.
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


def compute_score_gradient(
    scores: Tensor,
    peak: Tensor,
    factor: Tensor,
    entropy_factor: Tensor,
    upstream: Tensor,
    local: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the scores.

    It is `factor` e + `entropy_factor` e log(e) with e = exp(scores - peak), plus `upstream` at the
    target.

    Args:
        scores: Scores of m tokens on this rank, float32 [m, V].
        peak: Maximum of each row, float32 [m].
        factor: Factor of e, float32 [m].
        entropy_factor: Factor of e log(e), float32 [m].
        upstream: Gradient of the target's score, float32 [m].
        local: Column of each token's target, int64 [m].
        dtype: Dtype of the result.

    Returns:
        [m, V] of `dtype`.
    """
    relative = scores - peak[:, None]
    result = relative.exp() * (factor[:, None] + entropy_factor[:, None] * relative)
    is_target = torch.arange(scores.shape[1], device=scores.device) == local[:, None]
    return torch.where(is_target, result + upstream[:, None], result).to(dtype)


@functools.cache
def compile_pass(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of this module's functions, compiled to a kernel."""
    return torch.compile(function)


def should_fuse(scores: Tensor) -> bool:
    """Return whether to use the fused passes for `scores`.

    On a CPU, blocks of rows that stay in its caches serve the same purpose.
    """
    return scores.is_cuda
