"""Attention of one new token per row over the blocks of a paged KV cache, on GPUs.

This module calls the variable-length kernel behind `torch.nn.attention.varlen` (FlashAttention-2,
Dao 2023), which torch provides for half precision on GPUs. Each block of a row is a sequence of the
kernel: `starts` locates its keys, and `seqused_k` is their number. The outputs of a row's blocks
are then combined by their log-sum-exp (Dao et al. 2023, "Flash-Decoding").

Everything that changes from step to step is stored in tensors. One captured CUDA graph therefore
works for all lengths of the rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.models.shape import ModelShape

# Maximum head dim that the kernel supports.
_MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Spans:
    """Part of the KV cache that each block of each row of a step reads.

    The kernel sees the cache as one sequence that concatenates the tokens of all blocks. E is the
    number of rows times the number M of blocks per row.
    """

    starts: Tensor
    """Index of the first token of each block of each row in that sequence, int32 [E + 1]; the last
    entry is not read."""
    lengths: Tensor
    """Number of tokens to read of each block, int32 [E]; at least 1."""
    queries: Tensor
    """Index of the query of each block, int32 [E + 1]: 0 to E, as every block has one query."""
    is_hidden: Tensor
    """Whether the row attends to no token of the block, bool [rows, M]."""
    block_tokens: int
    """Number of tokens of a block."""


def can_slice(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel supports the model's attention, the device and the data type.

    The keys that latent attention caches are longer than its values, which the kernel does not
    support.
    """
    is_half = dtype in (torch.bfloat16, torch.float16)
    return (
        device.type == "cuda"
        and is_half
        and shape.has_plain_scores
        and shape.latent_attention is None
        and shape.head_dim % 8 == 0
        and shape.head_dim <= _MAX_HEAD_DIM
    )


def compute_spans(
    block_tables: Tensor, lengths: Tensor, block_tokens: int, window: int | None = None
) -> Spans:
    """Return the spans of a step.

    Args:
        block_tables: Blocks of each row, int64 [R, M].
        lengths: Number of tokens of each row, int64 [R].
        block_tokens: Number of tokens of a block.
        window: Number of tokens of the sliding window, including the query's own; None means no
            window.
    """
    rows, width = block_tables.shape
    # Position of the first token of each block, and of the row's end relative to it.
    block_starts = torch.arange(width, device=block_tables.device) * block_tokens
    ends = (lengths[:, None] - block_starts).clamp(max=block_tokens)
    first = torch.zeros_like(ends)
    if window is not None:
        first = (lengths[:, None] - window - block_starts).clamp(min=0)
    is_hidden = ends <= first
    first = first.clamp(max=block_tokens - 1)
    starts = (block_tables * block_tokens + first).flatten()
    # The kernel expects one more start than sequences; `seqused_k` replaces the lengths that
    # differences of the starts would give. Hidden blocks read one token, whose result is dropped.
    return Spans(
        starts=torch.cat((starts, starts[-1:] + 1)).int(),
        lengths=(ends - first).clamp(min=1).flatten().int(),
        queries=torch.arange(rows * width + 1, device=block_tables.device, dtype=torch.int32),
        is_hidden=is_hidden,
        block_tokens=block_tokens,
    )


def attend(
    query: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float | None = None
) -> Tensor:
    """Compute the attention of one query per row over the row's tokens.

    A query attends to its own token, which is the last one of its row, and to the tokens before it.

    Args:
        query: [R, heads, head dim].
        keys: [blocks, KV heads, block tokens, head dim], stored by token (see `KVCache`).
        values: [blocks, KV heads, block tokens, head dim], stored by token.
        spans: Spans of the step.
        scale: Factor of the scores; None means 1/√dim.

    Returns:
        The attention output [R, heads * head dim].
    """
    rows, width = spans.is_hidden.shape
    # The result is [blocks * block tokens, KV heads, head dim], a view, since the memory has this
    # order.
    token_major = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (keys, values)]
    outputs, log_totals = torch.ops.aten._flash_attention_forward(
        query.repeat_interleave(width, 0),
        *token_major,
        spans.queries,
        spans.starts,
        1,  # max_q
        spans.block_tokens,  # max_k
        0.0,  # dropout_p
        False,  # is_causal: no key comes after the query, which is the row's last token
        False,  # return_debug_mask
        scale=scale,
        seqused_k=spans.lengths,
    )[:2]
    if width == 1:
        only_output: Tensor = outputs
        return only_output.flatten(1)
    # The weight of a block is its share of the sum of the exponentials of the row's scores.
    # [heads, R * M] -> [R, heads, M]
    log_totals = log_totals.view(-1, rows, width).transpose(0, 1)
    weights = log_totals.masked_fill(spans.is_hidden[:, None], float("-inf")).softmax(-1)
    # [R, heads, 1, M] @ [R, heads, M, head dim]
    parts = outputs.unflatten(0, (rows, width)).transpose(1, 2)
    combined = weights.to(parts.dtype)[:, :, None] @ parts
    return combined.flatten(1)
