"""Attention of one new token a row that reads of the cache what each row has, and none of what is
masked.

By the kernel behind `torch.nn.attention.varlen` (FlashAttention-2, Dao 2023), which torch has for
half precision on GPUs: a row's keys begin where its row of the cache does, and `seqused_k` says how
many there are. Everything that changes from step to step is in tensors, so that one recorded step
serves whatever lengths the rows have.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.models.shape import ModelShape

_WIDEST_HEAD = 256


@dataclass(frozen=True)
class Spans:
    """What of the cache, seen as one sequence of all its rows' tokens, the rows of a step read."""

    starts: Tensor
    """int32 [R + 1]: where each row's tokens begin, and one more entry, which is not read"""
    lengths: Tensor
    """int32 [R]: how many there are of each"""
    queries: Tensor
    """int32 [R + 1]: 0 to R, one query a row"""
    columns: int
    """The cache's: no row has more tokens."""


def can_slice(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel is there for such a model."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return (
        device.type == "cuda"
        and is_half
        and shape.head_dim % 8 == 0
        and shape.head_dim <= _WIDEST_HEAD
    )


def spans(rows: Tensor, lengths: Tensor, columns: int) -> Spans:
    """Those of a step that reads the first `lengths` int32 [R] tokens of the cache's `rows` int64
    [R]."""
    starts = torch.cat((rows, rows[-1:] + 1)) * columns
    queries = torch.arange(len(rows) + 1, device=rows.device, dtype=torch.int32)
    return Spans(starts.int(), lengths, queries, columns)


def attend(query: Tensor, keys: Tensor, values: Tensor, spans: Spans, window: int | None) -> Tensor:
    """query [R, heads, head dim] over [rows, KV heads, columns, head dim] that lie by token: [R,
    heads * head dim].

    A token sees itself and those before it, of the last `window` tokens where there is one.
    """
    by_token = [each.transpose(1, 2).flatten(0, 1) for each in (keys, values)]
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        *by_token,
        spans.queries,
        spans.starts,
        1,
        spans.columns,
        0.0,
        False,
        False,
        seqused_k=spans.lengths,
        # A window counts the tokens before a query and those after it, of which there are none.
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]
    return attended.flatten(1)
