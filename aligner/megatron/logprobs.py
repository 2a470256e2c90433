"""Log-probabilities of tokens from logits whose vocabulary is cut over tensor ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


class _VocabParallelLogprobs(Function):
    """Saves one probability matrix, in place of the logits, for the backward pass."""

    @staticmethod
    def forward(
        context: Any, logits: Tensor, targets: Tensor, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        size = 1 if group is None else group.size()
        scaled = logits.float() / temperature
        peak = scaled.amax(-1, keepdim=True)
        if size > 1:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        scaled -= peak
        first = 0 if size == 1 or group is None else group.rank() * logits.shape[-1]
        local = targets - first
        here = (local >= 0) & (local < logits.shape[-1])
        local = torch.where(here, local, 0)
        chosen = torch.where(here, scaled.gather(-1, local[:, None])[:, 0], 0.0)
        probabilities = scaled.exp()
        # Sum of exponentials, and of exponential times score, for the entropy: log Z - E[score].
        sums = torch.stack([probabilities.sum(-1), torch.einsum("tv,tv->t", probabilities, scaled), chosen])
        del scaled
        if size > 1:
            dist.all_reduce(sums, group=group)
        normalizer, weighted, chosen = sums
        log_normalizer = normalizer.log()
        probabilities /= normalizer[:, None]
        context.save_for_backward(probabilities, local, here)
        context.temperature = temperature
        entropy = log_normalizer - weighted / normalizer
        context.mark_non_differentiable(entropy)
        return chosen - log_normalizer, entropy

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, local, here = context.saved_tensors
        gradient = gradients[0] / context.temperature
        # d logprob / d logit = onehot - probability; the saved matrix is used up by it.
        result = probabilities.mul_(-gradient[:, None])
        result.scatter_add_(-1, local[:, None], torch.where(here, gradient, 0.0)[:, None])
        return result, None, None, None


def vocab_parallel_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, at a sampling temperature.

    `logits` [M, V/TP] is this tensor rank's part of the vocabulary, `targets` int64 [M] are global token ids; both results
    are float32 [M], equal on every rank of `group`. Gradients flow through the log-probabilities, once; the entropy is for
    reading only.
    """
    return _VocabParallelLogprobs.apply(logits, targets, temperature, group)
