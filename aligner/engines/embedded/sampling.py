"""Drawing tokens: every sample has a random stream of its own, and every token takes one number of it."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 128
"""Vocabulary entries whose probabilities are summed first, so that only one chunk a row is looked at closely."""


def uniforms(seed: int, prompt_id: int, sample_index: int, count: int) -> np.ndarray:
    """float64 [count] in [0, 1): the first numbers of a sample's stream; they depend on the first three arguments alone."""
    bits = np.random.Philox(np.random.SeedSequence([seed, prompt_id, sample_index]))
    return np.random.Generator(bits).random(count)


def choose(logits: Tensor, temperature: float, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """Token of each row and its log-probability at `temperature`; overwrites `logits`.

    logits: [B, V]; uniform: float64 [B] in [0, 1), or None for the most probable token.
    Returns int64 [B] and float32 [B]. The token is the inverse of the cumulative distribution at `uniform`, which is
    summed in float64 above chunks of float32; a token of probability zero is never drawn.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits.div_(temperature)
    best, token = logits.max(-1, keepdim=True)
    weights = logits.sub_(best).exp_()  # the greatest is 1: no overflow, and the total is at least 1
    padding = -weights.shape[1] % _CHUNK
    chunks = F.pad(weights, (0, padding)).unflatten(1, (-1, _CHUNK))
    cumulative = chunks.sum(-1).cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    if uniform is not None:
        token = _invert(chunks, cumulative, uniform[:, None] * total)
    logprob = weights.gather(1, token).double().log_() - total.log()
    return token.squeeze(1), logprob.squeeze(1).float()


def _invert(chunks: Tensor, cumulative: Tensor, target: Tensor) -> Tensor:
    """int64 [B, 1]: where the running sum of [B, chunks, entries] first exceeds `target` [B, 1]."""
    index = _first_above(cumulative, target)
    before = cumulative.gather(1, (index - 1).clamp_min_(0)).where(index > 0, 0.0)
    chunk = chunks[torch.arange(len(chunks), device=chunks.device), index.squeeze(1)]
    inside = _first_above(chunk.cumsum(-1, dtype=torch.float64), target - before)
    return index * _CHUNK + inside


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """First entry of each row above `target`, kept within [0, the row's total): its own share is never zero."""
    ceiling = cumulative[:, -1:].nextafter(cumulative.new_zeros(()))
    return torch.searchsorted(cumulative, target.clamp_min(0.0).minimum(ceiling), right=True)
