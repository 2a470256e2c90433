"""Attention with capped scores or sinks, which PyTorch's fused kernels do not support.

The trainer and the embedded engine use it for models with these parts. A score is the product of a
query and a key times a factor. With a soft cap c, it becomes c tanh(score / c) (Gemma Team 2024,
"Gemma 2", section 2). With a sink, a query's weights are

    p_j = exp(s_j) / (exp(sink) + sum_k exp(s_k)),

where the sink is a learned score of the head (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card",
section 2). The weights of a query then sum to less than one.

Scores exist for one block of queries at a time. As in FlashAttention (Dao et al. 2022), the forward
pass saves only the logarithm of each query's denominator, and the backward pass computes the scores
again.

Shapes: N sequences, H heads, G key-value heads, R = H / G, L queries, W keys, D dimensions; l is
the number of queries of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# Maximum number of scores of a block, unless one query of each sequence has more. The memory
# estimate contains it (`placement/memory/activations.py`).
_BLOCK_ELEMENTS = 1 << 22


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention with capped scores or sinks; the result can be differentiated once.

    Args:
        query: [N, H, L, D].
        key: [N, G, W, D].
        value: [N, G, W, D].
        visible: Attention mask, bool [N or 1, L, W] or [L, W]: the keys to which a query attends,
            at least one for each query. None means a causal mask, with L = W.
        scale: Factor of the scores; None means 1/√D.
        softcap: Soft cap of the scores; None means no cap.
        sinks: Sink of each head, [H]; None means no sinks.

    Returns:
        The attention output [N, H, L, D], in the dtype of `query`.
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    if visible is not None and visible.dim() == 2:
        visible = visible[None]
    output: Tensor = _ScoreAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, visible, sinks, factor, softcap
    )
    return output


class _ScoreAttention(Function):
    """Autograd function of `attend`."""

    @staticmethod
    def forward(
        context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Tensor | None,
        sinks: Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Return the attention output; see `attend`."""
        # The heads that share a KV head are a dimension of their own: [N, G, R, L, D].
        grouped = query.unflatten(1, (key.shape[1], -1))
        output = query.new_empty(*grouped.shape[:-1], value.shape[-1])
        log_totals = query.new_empty(grouped.shape[:-1], dtype=torch.float32)
        for block in _split_queries(grouped, key, visible):
            scores = _compute_scores(grouped, key, block, scale, softcap)
            scores = _mask_scores(scores, block)
            log_total = scores.logsumexp(-1)
            if sinks is not None:
                log_total = torch.logaddexp(log_total, _group_sinks(sinks, key))
            weights = scores.sub_(log_total[..., None]).exp_().to(value.dtype)
            attended = weights.flatten(2, 3) @ value[:, :, block.keys]
            output[:, :, :, block.queries] = attended.unflatten(2, weights.shape[2:4])
            log_totals[:, :, :, block.queries] = log_total
        context.save_for_backward(query, key, value, visible, sinks, output, log_totals)
        context.scale = scale
        context.softcap = softcap
        return output.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys, values and sinks.

        With g the gradient of a query's output o, the gradient of its score s_j is
        p_j (g v_j - g o), and that of the sink -p_sink (g o). The soft cap multiplies the gradient
        of a score by 1 - (s_j / c)^2.

        Args:
            context: Autograd context of the forward pass.
            gradient: Gradient of the output, [N, H, L, D].
        """
        query, key, value, visible, sinks, output, log_totals = context.saved_tensors
        grouped = query.unflatten(1, (key.shape[1], -1))
        upstream = gradient.unflatten(1, (key.shape[1], -1))
        for_query = torch.empty_like(grouped)
        # Each block adds to the gradients of keys and values.
        for_key = torch.zeros_like(key, dtype=torch.float32)
        for_value = torch.zeros_like(value, dtype=torch.float32)
        for_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        for block in _split_queries(grouped, key, visible):
            scores = _compute_scores(grouped, key, block, context.scale, context.softcap)
            slope = None
            if context.softcap is not None:
                slope = 1 - (scores / context.softcap).square_()
            log_total = log_totals[:, :, :, block.queries]
            weights = _mask_scores(scores, block).sub_(log_total[..., None]).exp_()

            block_upstream = upstream[:, :, :, block.queries]
            rows = block_upstream.flatten(2, 3)
            for_value[:, :, block.keys] += weights.to(value.dtype).flatten(2, 3).mT @ rows
            # g o of each query
            along = (block_upstream.float() * output[:, :, :, block.queries].float()).sum(-1)
            if for_sinks is not None and sinks is not None:
                sink_weights = (_group_sinks(sinks, key) - log_total).exp()
                for_sinks -= (sink_weights * along).sum((0, 3)).flatten()
            for_weights = (rows @ value[:, :, block.keys].mT).float().view(weights.shape)
            for_scores = weights.mul_(for_weights.sub_(along[..., None])).mul_(context.scale)
            if slope is not None:
                for_scores.mul_(slope)
            score_rows = for_scores.to(query.dtype).flatten(2, 3)
            query_rows = grouped[:, :, :, block.queries].flatten(2, 3)
            for_query[:, :, :, block.queries] = (score_rows @ key[:, :, block.keys]).unflatten(
                2, weights.shape[2:4]
            )
            for_key[:, :, block.keys] += score_rows.mT @ query_rows
        return (
            for_query.flatten(1, 2),
            for_key.to(key.dtype),
            for_value.to(value.dtype),
            None,
            None if for_sinks is None or sinks is None else for_sinks.to(sinks.dtype),
            None,
            None,
        )


@dataclass(frozen=True)
class _Block:
    """A range of queries, and the keys that they may attend to."""

    queries: slice
    keys: slice
    visible: Tensor
    """Keys to which each query attends, bool [N or 1, l, keys of the block]."""


def _split_queries(grouped: Tensor, key: Tensor, visible: Tensor | None) -> Iterator[_Block]:
    """Yield blocks of at most `_BLOCK_ELEMENTS` scores.

    Args:
        grouped: Queries, [N, G, R, L, D].
        key: [N, G, W, D].
        visible: Attention mask, bool [N or 1, L, W], or None; see `attend`.
    """
    rows, groups, heads, length, _ = grouped.shape
    width = key.shape[2]
    size = max(1, _BLOCK_ELEMENTS // max(1, rows * groups * heads * width))
    for start in range(0, length, size):
        stop = min(start + size, length)
        if visible is not None:
            yield _Block(slice(start, stop), slice(0, width), visible[:, start:stop])
            continue
        # A query attends to no key after it.
        causal = torch.ones(1, stop - start, stop, dtype=torch.bool, device=key.device)
        yield _Block(slice(start, stop), slice(0, stop), causal.tril(start))


def _compute_scores(
    grouped: Tensor, key: Tensor, block: _Block, scale: float, softcap: float | None
) -> Tensor:
    """Return the capped scores of a block without its mask, float32 [N, G, R, l, keys]."""
    queries = grouped[:, :, :, block.queries]
    # The queries that share a KV head are the rows of one matmul.
    scores = (queries.flatten(2, 3) @ key[:, :, block.keys].mT).float().mul_(scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    return scores.unflatten(2, queries.shape[2:4])


def _mask_scores(scores: Tensor, block: _Block) -> Tensor:
    """Set the scores of keys to which a query does not attend to minus infinity, in place."""
    return scores.masked_fill_(~block.visible[:, None, None], float("-inf"))


def _group_sinks(sinks: Tensor, key: Tensor) -> Tensor:
    """Return the sinks [H] by KV head, float32 [G, R, 1]."""
    return sinks.float().view(key.shape[1], -1, 1)
