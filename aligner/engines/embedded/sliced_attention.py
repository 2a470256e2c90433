"""Attention of one new token per row that reads only the tokens that each row has.

A masked kernel would read all columns of the KV cache. This module instead calls the
variable-length kernel behind `torch.nn.attention.varlen` (FlashAttention-2, Dao 2023), which torch
provides for half precision on GPUs. The start of a row's keys is the start of the row in the cache,
and `seqused_k` is their number.

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
    """Part of the KV cache that each row of a step reads.

    The kernel sees the cache as one sequence that concatenates the tokens of all rows.
    """

    starts: Tensor
    """Index of each row's first token in that sequence, int32 [R + 1]; the last entry is not read.
    """
    lengths: Tensor
    """Number of tokens of each row, int32 [R]."""
    queries: Tensor
    """Index of each row's first query, int32 [R + 1]: 0 to R, as every row has one query."""
    columns: int
    """Number of columns of the cache, which is the maximum number of tokens of a row."""


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


def compute_spans(rows: Tensor, lengths: Tensor, columns: int) -> Spans:
    """Return the spans of a step.

    Args:
        rows: Rows of the KV cache that the step decodes, int64 [R].
        lengths: Number of tokens that the step reads of each row, from the row's start, int32 [R].
        columns: Number of columns of the KV cache.
    """
    # Row r begins at token r * columns of the concatenated cache. The kernel expects one more start
    # than rows; `seqused_k` replaces the lengths that differences of the starts would give.
    starts = torch.cat((rows, rows[-1:] + 1)) * columns
    queries = torch.arange(len(rows) + 1, device=rows.device, dtype=torch.int32)
    return Spans(starts.int(), lengths, queries, columns)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Spans,
    window: int | None,
    scale: float | None = None,
) -> Tensor:
    """Compute the attention of one query per row over the row's tokens.

    A query attends to its own token, which is the last one of its row, and to the tokens before it.

    Args:
        query: [R, heads, head dim].
        keys: [rows, KV heads, columns, head dim], stored by token (see `KVCache`).
        values: [rows, KV heads, columns, head dim], stored by token.
        spans: Spans of the step.
        window: Number of tokens of the sliding window, including the query's own; None means no
            window.
        scale: Factor of the scores; None means 1/√dim.

    Returns:
        The attention output [R, heads * head dim].
    """
    # The result is [rows * columns, KV heads, head dim], a view, since the memory has this order.
    token_major = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (keys, values)]
    attention: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        *token_major,
        spans.queries,
        spans.starts,
        1,  # max_q
        spans.columns,  # max_k
        0.0,  # dropout_p
        False,  # is_causal: a row's only query is its last token, so no key comes after it
        False,  # return_debug_mask
        scale=scale,
        seqused_k=spans.lengths,
        # The kernel's window excludes the query's own token, and no token comes after it.
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]
    return attention.flatten(1)
