"""Right-padded rows to packed micro-batches and back. No other room sees the packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from aligner.data.batching import data_parallel_share, token_budget_batches


@dataclass
class PackedSequences(PackedSeqParams):
    """megatron-core's description of a packed micro-batch, with the rows that our attention computes on.

    One row holds one sequence, N rows of L tokens.
    """

    row_index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [T]: each packed token's place in the flattened rows [N·L]"""
    rows: tuple[int, int] = (0, 0)
    """(N, L)"""


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch: N sequences of T tokens in all, laid end to end."""

    tokens: Tensor
    """int64 [1, T]"""
    positions: Tensor
    """int64 [1, T]: restarts at every sequence"""
    sequences: PackedSequences
    target_index: Tensor
    """int64 [M]: packed places of the tokens that have a successor, in row order"""
    targets: Tensor
    """int64 [M]: those successors"""
    target_rows: Tensor
    """int64 [M]: their places in a flattened [N, L-1]"""
    batch_rows: Tensor
    """int64 [N]: which rows of the whole batch these sequences are"""

    @property
    def width(self) -> int:
        """Length L of the longest sequence."""
        return self.sequences.rows[1]

    def unpack_targets(self, values: Tensor) -> Tensor:
        """[M] values about next tokens to [N, L-1], zeros elsewhere; differentiable."""
        rows, width = self.sequences.rows
        return values.new_zeros(rows * (width - 1)).index_copy(0, self.target_rows, values).view(rows, width - 1)

    def unpack_tokens(self, values: Tensor) -> Tensor:
        """[T] values about tokens to [N, L], zeros elsewhere; differentiable."""
        rows, width = self.sequences.rows
        return values.new_zeros(rows * width).index_copy(0, self.sequences.row_index, values).view(rows, width)


def pack(tokens: Tensor, lengths: Tensor, rows: Tensor, device: torch.device) -> PackedBatch:
    """Pack the given rows (int64 [N]) of right-padded tokens [B, S] with lengths [B]."""
    counts = lengths[rows]
    width = int(counts.max())
    inside = torch.arange(width) < counts[:, None]
    has_successor = torch.arange(width) < counts[:, None] - 1
    chosen = tokens[rows, :width]
    positions = torch.arange(width).expand(len(rows), -1)[inside]
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    cumulative = starts.to(torch.int32).to(device)
    sequences = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=width,
        max_seqlen_kv=width,
        row_index=inside.flatten().nonzero()[:, 0].to(device),
        rows=(len(rows), width),
    )
    successors = torch.zeros_like(chosen)
    successors[:, :-1] = chosen[:, 1:]
    return PackedBatch(
        tokens=chosen[inside][None].to(device),
        positions=positions[None].to(device),
        sequences=sequences,
        target_index=has_successor[inside].nonzero()[:, 0].to(device),
        targets=successors[has_successor].to(device),
        target_rows=has_successor[:, :-1].flatten().nonzero()[:, 0].to(device),
        batch_rows=rows,
    )


def pack_share(
    tokens: Tensor, lengths: Tensor, *, data_rank: int, data_size: int, budget: int, device: torch.device
) -> list[PackedBatch]:
    """The micro-batches of one data rank: its share of the rows, packed within a token budget.

    Every data rank gets as many micro-batches as every other, since pipeline schedules and gradient reductions go in step.
    """
    shares = data_parallel_share(lengths.tolist(), data_size)
    counts = [len(token_budget_batches(_take(lengths, share), budget)) for share in shares]
    mine = shares[data_rank]
    batches = token_budget_batches(_take(lengths, mine), budget, count=max(counts))
    return [pack(tokens, lengths, torch.tensor([mine[index] for index in batch]), device) for batch in batches]


def _take(lengths: Tensor, rows: Sequence[int]) -> list[int]:
    return [int(lengths[row]) for row in rows]
