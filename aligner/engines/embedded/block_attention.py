"""Attention of one new token per row over the blocks of a paged KV cache, without a copy of them.

Batched matmuls run over all blocks in the order of the memory: each block is multiplied with the
queries of the rows that read it. The scores are then arranged by row for the softmax. The weights
return to the order of the memory, and are multiplied with the values of each block. The output of a
row is the sum of the outputs of its blocks, in the order of its block table. The result therefore
does not depend on the place of a block.

A block that several rows share, such as the blocks of a common prompt, is read once for all of
them.

Shapes: R rows, M blocks of the longest row, T tokens of a block, H heads, G KV heads, Q = H / G
queries of a KV head, D dimensions. A group has n blocks with S readers each. The entries of a group
are its pairs of block and reader; E is their number in all groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Readers of a shared block that one matmul combines; more readers repeat the block.
_MAX_READERS = 8
# Matmuls include the blocks of other sequences between those that a step reads, up to this multiple
# of the number of blocks. If there are more, the blocks are copied.
_MAX_SPREAD = 2


@dataclass(frozen=True)
class BlockGroup:
    """Blocks with equally many readers."""

    blocks: slice | Tensor
    """The blocks: a slice of the cache, or indices, int64 [n]."""
    readers: Tensor
    """Rows that read each block, int64 [n * S]; 0 for missing readers."""
    num_readers: int
    """Number of readers of each block, S."""

    def select(self, cached: Tensor) -> Tensor:
        """Return the group's blocks of keys or values, [n * G, T, D].

        Args:
            cached: Keys or values of a layer, [blocks, G, T, D].
        """
        if isinstance(self.blocks, slice):
            return cached[self.blocks].flatten(0, 1)
        return cached.index_select(0, self.blocks).flatten(0, 1)


@dataclass(frozen=True)
class BlockPlan:
    """Assignment of the blocks of a step to groups, and of their scores to rows."""

    groups: tuple[BlockGroup, ...]
    row_entries: Tensor
    """Entry of each block of each row, int64 [R * M]; 0 after the row's last block."""
    entry_columns: Tensor
    """Index in `row_entries` of each entry, int64 [E]; 0 for entries without a reader."""
    used_entries: Tensor
    """Entries of each row, without those after its last block, int64."""
    row_starts: Tensor
    """Index of each row's first entry in `used_entries`, int64 [R]."""


def build_plan(block_tables: Tensor, num_blocks: Tensor) -> BlockPlan:
    """Return the plan of a step.

    Args:
        block_tables: Blocks of each row on the CPU, int64 [R, M].
        num_blocks: Number of blocks of each row, int64 [R].
    """
    tables = block_tables.numpy()
    counts = num_blocks.numpy()
    width = tables.shape[1]
    is_used = np.arange(width) < counts[:, None]
    columns = np.flatnonzero(is_used)
    blocks = tables.ravel()[columns]
    # Sort the columns by block. The readers of a block are then adjacent.
    order = np.argsort(blocks, kind="stable")
    sorted_blocks = blocks[order]
    sorted_columns = columns[order]
    unique_blocks, first_readers, reader_counts = np.unique(
        sorted_blocks, return_index=True, return_counts=True
    )
    is_shared = reader_counts > 1

    row_entries = np.zeros(tables.size, dtype=np.int64)
    entry_columns: list[np.ndarray] = []
    groups: list[BlockGroup] = []
    if not is_shared.all():
        own_blocks = unique_blocks[~is_shared]
        own_columns = sorted_columns[first_readers[~is_shared]]
        first, last = own_blocks[0], own_blocks[-1]
        selection: slice | Tensor = slice(first, last + 1)
        if last + 1 - first > _MAX_SPREAD * len(own_blocks):
            selection = torch.from_numpy(own_blocks)
            entries = np.arange(len(own_blocks))
            group_columns = own_columns
        else:
            entries = own_blocks - first
            group_columns = np.zeros(last + 1 - first, dtype=np.int64)
            group_columns[entries] = own_columns
        row_entries[own_columns] = entries
        entry_columns.append(group_columns)
        groups.append(BlockGroup(selection, torch.from_numpy(group_columns // width), 1))

    if is_shared.any():
        shared_counts = reader_counts[is_shared]
        num_readers = min(int(shared_counts.max()), _MAX_READERS)
        # A block with more readers than `num_readers` is repeated.
        repeats = -(-shared_counts // num_readers)
        repeated_blocks = np.repeat(unique_blocks[is_shared], repeats)
        first_entries = (np.cumsum(repeats) - repeats) * num_readers
        reader_ids = np.concatenate([np.arange(count) for count in shared_counts])
        entries = np.repeat(first_entries, shared_counts) + reader_ids
        first_columns = np.repeat(first_readers[is_shared], shared_counts)
        shared_columns = sorted_columns[first_columns + reader_ids]
        group_columns = np.zeros(len(repeated_blocks) * num_readers, dtype=np.int64)
        group_columns[entries] = shared_columns
        row_entries[shared_columns] = entries + sum(map(len, entry_columns))
        entry_columns.append(group_columns)
        readers = torch.from_numpy(group_columns // width)
        groups.append(BlockGroup(torch.from_numpy(repeated_blocks), readers, num_readers))

    return BlockPlan(
        groups=tuple(groups),
        row_entries=torch.from_numpy(row_entries),
        entry_columns=torch.from_numpy(np.concatenate(entry_columns)),
        used_entries=torch.from_numpy(row_entries[columns]),
        row_starts=torch.from_numpy(np.cumsum(counts) - counts),
    )


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: BlockPlan,
    mask: Tensor,
    *,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the attention of one query per row over the row's blocks.

    Args:
        query: [R, H, D].
        keys: Keys of a layer, [blocks, G, T, D].
        values: Values of a layer, [blocks, G, T, value dim].
        plan: Plan of the step.
        mask: Mask that is added to the scores, [R, 1, M * T].
        scale: Factor of the scores; None means 1/√D.
        softcap: Soft cap of the scores; None means no cap.
        sinks: Sink of each head, [H]; None means no sinks. See `score_attention`.

    Returns:
        The attention output, [R, H * value dim].
    """
    rows, heads, dim = query.shape
    scaled_query = query * (dim**-0.5 if scale is None else scale)
    group_scores = [_compute_scores(scaled_query, keys, group) for group in plan.groups]

    # [E, H, T] -> [R, H, M * T]
    scores = _concatenate(group_scores).index_select(0, plan.row_entries)
    scores = scores.view(rows, -1, heads, keys.shape[2]).transpose(1, 2).flatten(2)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores += mask
    weights = _softmax(scores, sinks)

    # [R, H, M * T] -> [E, H, T]
    weights = weights.unflatten(2, (-1, keys.shape[2])).transpose(1, 2).flatten(0, 1)
    weights = weights.index_select(0, plan.entry_columns)
    sizes = [len(group.readers) for group in plan.groups]
    outputs = [
        _weigh_values(group_weights, values, group)
        for group_weights, group in zip(weights.split(sizes), plan.groups, strict=True)
    ]
    # `embedding_bag` sums the entries of each row in one pass.
    return F.embedding_bag(plan.used_entries, _concatenate(outputs), plan.row_starts, mode="sum")


def _compute_scores(query: Tensor, keys: Tensor, group: BlockGroup) -> Tensor:
    """Return the scores of a group's entries, [n * S, H, T]."""
    kv_heads, block_tokens, dim = keys.shape[1:]
    heads = query.shape[1]
    readers = group.num_readers
    # [n * S, H, D] -> [n * G, S * Q, D], so that the readers of a block share a matmul.
    queries = query.index_select(0, group.readers)
    queries = queries.view(-1, readers, kv_heads, heads // kv_heads, dim).transpose(1, 2)
    queries = queries.reshape(-1, readers * heads // kv_heads, dim)
    scores = torch.bmm(queries, group.select(keys).mT)
    scores = scores.view(-1, kv_heads, readers, heads // kv_heads, block_tokens)
    return scores.transpose(1, 2).reshape(-1, heads, block_tokens)


def _weigh_values(weights: Tensor, values: Tensor, group: BlockGroup) -> Tensor:
    """Return the weighted values of a group's entries, [n * S, H * value dim].

    Args:
        weights: Attention weights of the entries, [n * S, H, T].
        values: Values of a layer, [blocks, G, T, value dim].
        group: The group.
    """
    kv_heads, block_tokens, dim = values.shape[1:]
    readers = group.num_readers
    queries = weights.shape[1] // kv_heads
    weights = weights.view(-1, readers, kv_heads, queries, block_tokens).transpose(1, 2)
    outputs = torch.bmm(weights.reshape(-1, readers * queries, block_tokens), group.select(values))
    outputs = outputs.view(-1, kv_heads, readers, queries, dim).transpose(1, 2)
    return outputs.reshape(-1, kv_heads * queries * dim)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores [R, H, columns] over the columns and the sink of each head."""
    if sinks is None:
        return scores.softmax(-1)
    sink_scores = sinks.to(scores.dtype)[:, None].expand(len(scores), -1, 1)
    return torch.cat((scores, sink_scores), -1).softmax(-1)[..., :-1]


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the tensors of the groups; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
