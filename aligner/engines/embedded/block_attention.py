"""Attention of one new token per row over the blocks of a paged KV cache, without a copy of them.

Batched matmuls run over all blocks in the order of the memory: each block is multiplied with the
queries of the rows that read it. The scores are then arranged by row for the softmax. The weights
return to the order of the memory, and are multiplied with the values of each block. The output of a
row is the sum of the outputs of its blocks, in the order of its block table. The result therefore
does not depend on the place of a block.

A block that several rows share, such as the blocks of a common prompt, is read once for all of
them.

Shapes: R rows, M blocks of the longest row, T tokens of a block, H heads, G KV heads, Q = H / G
queries of a KV head, D dimensions. A group has n blocks with S readers each. The matmuls of a group
multiply [n * G] blocks of a KV head with S * Q queries each. The entries of a group are its
n * G * S * Q pairs of block and query, in this order; E is their number in all groups.
"""

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
    num_readers: int
    """Number of readers of each block, S."""
    entries: slice
    """The group's entries among all entries."""

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
    queries: Tensor
    """Index of the query of each entry among R * H queries, int64 [E]; 0 for missing readers."""
    row_entries: Tensor
    """Entry of each query and block of each row, int64 [R * H * M]; 0 after the row's last
    block."""
    entry_columns: Tensor
    """Index in `row_entries` of each entry, int64 [E]; 0 for entries without a reader."""
    used_entries: Tensor
    """Entries of each query, without those after the last block of its row, int64."""
    query_starts: Tensor
    """Index of each query's first entry in `used_entries`, int64 [R * H]."""


def build_plan(
    block_tables: Tensor, num_blocks: Tensor, kv_heads: int, queries_per_kv_head: int
) -> BlockPlan:
    """Return the plan of a step.

    Args:
        block_tables: Blocks of each row on the CPU, int64 [R, M].
        num_blocks: Number of blocks of each row, int64 [R].
        kv_heads: Number of KV heads, G.
        queries_per_kv_head: Number of queries of a KV head, Q.
    """
    tables = block_tables.numpy()
    counts = num_blocks.numpy()
    rows, width = tables.shape
    heads = kv_heads * queries_per_kv_head
    head_range = np.arange(heads)

    # Sort the columns r * M + m of the table by block. The readers of a block are then adjacent.
    columns = np.flatnonzero(np.arange(width) < counts[:, None])
    blocks = tables.ravel()[columns]
    order = np.argsort(blocks, kind="stable")
    sorted_columns = columns[order]
    unique_blocks, first_readers, reader_counts = np.unique(
        blocks[order], return_index=True, return_counts=True
    )

    groups: list[BlockGroup] = []
    group_columns: list[np.ndarray] = []
    row_entries = np.zeros((rows * width, heads), dtype=np.int64)
    first_entry = 0
    is_shared = reader_counts > 1
    for selected, num_readers in (
        (~is_shared, 1),
        (is_shared, min(int(reader_counts.max()), _MAX_READERS)),
    ):
        if not selected.any():
            continue
        read_columns, places, group_blocks = _place_readers(
            unique_blocks[selected],
            first_readers[selected],
            reader_counts[selected],
            sorted_columns,
            num_readers,
        )
        num_blocks_read = (
            group_blocks.stop - group_blocks.start
            if isinstance(group_blocks, slice)
            else len(group_blocks)
        )
        # Columns of the readers, 0 where there are none, [n, S].
        reader_columns = np.zeros((num_blocks_read, num_readers), dtype=np.int64)
        reader_columns.ravel()[places] = read_columns
        # Entry ((block * G + KV head) * S + reader) * Q + query of each place and head.
        entries = (
            places[:, None] // num_readers * kv_heads + head_range // queries_per_kv_head
        ) * num_readers + places[:, None] % num_readers
        entries = entries * queries_per_kv_head + head_range % queries_per_kv_head
        row_entries[read_columns] = first_entry + entries

        num_entries = reader_columns.size * heads
        groups.append(
            BlockGroup(group_blocks, num_readers, slice(first_entry, first_entry + num_entries))
        )
        # [n, S] -> [n, G, S, Q]: the column and the head of each entry.
        by_head = np.broadcast_to(
            reader_columns[:, None, :, None],
            (num_blocks_read, kv_heads, num_readers, queries_per_kv_head),
        )
        group_heads = head_range.reshape(1, kv_heads, 1, queries_per_kv_head)
        row_heads = by_head // width * heads + group_heads
        group_columns.append((row_heads * width + by_head % width).ravel())
        first_entry += num_entries

    entry_columns = np.concatenate(group_columns)
    # [R * M, H] -> [R, H, M]
    row_entries = row_entries.reshape(rows, width, heads).transpose(0, 2, 1)
    is_used = np.broadcast_to((np.arange(width) < counts[:, None])[:, None], row_entries.shape)
    query_counts = np.repeat(counts, heads)
    return BlockPlan(
        groups=tuple(groups),
        queries=torch.from_numpy(entry_columns // width),
        row_entries=torch.from_numpy(row_entries.ravel()),
        entry_columns=torch.from_numpy(entry_columns),
        used_entries=torch.from_numpy(row_entries[is_used]),
        query_starts=torch.from_numpy(np.cumsum(query_counts) - query_counts),
    )


def _place_readers(
    blocks: np.ndarray,
    first_readers: np.ndarray,
    reader_counts: np.ndarray,
    sorted_columns: np.ndarray,
    num_readers: int,
) -> tuple[np.ndarray, np.ndarray, slice | Tensor]:
    """Assign the readers of blocks to the places of a group.

    Args:
        blocks: Blocks of the group, ascending.
        first_readers: Index in `sorted_columns` of the first reader of each block.
        reader_counts: Number of readers of each block.
        sorted_columns: Columns of the table, sorted by block.
        num_readers: Number of places per block, S.

    Returns:
        The columns of all readers, the place of each (block * S + reader), and the group's blocks.
    """
    # A block with more readers than places is repeated.
    repeats = -(-reader_counts // num_readers)
    first_places = np.cumsum(repeats) - repeats
    selection: slice | Tensor = torch.from_numpy(np.repeat(blocks, repeats))
    if (repeats == 1).all() and blocks[-1] + 1 - blocks[0] <= _MAX_SPREAD * len(blocks):
        first_places = blocks - blocks[0]
        selection = slice(int(blocks[0]), int(blocks[-1]) + 1)

    # Number of each reader among those of its block.
    reader_starts = np.cumsum(reader_counts) - reader_counts
    numbers = np.arange(reader_counts.sum()) - np.repeat(reader_starts, reader_counts)
    read_columns = sorted_columns[np.repeat(first_readers, reader_counts) + numbers]
    places = np.repeat(first_places, reader_counts) * num_readers + numbers
    return read_columns, places, selection


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
    tokens = keys.shape[2]
    scaled_query = query * (dim**-0.5 if scale is None else scale)
    queries = scaled_query.flatten(0, 1).index_select(0, plan.queries)
    scores = queries.new_empty(len(queries), tokens)
    for group in plan.groups:
        _multiply(queries, group.select(keys).mT, scores, group)

    # [E, T] -> [R, H, M * T]
    row_scores = scores.index_select(0, plan.row_entries).view(rows, heads, -1)
    if softcap is not None:
        row_scores.div_(softcap).tanh_().mul_(softcap)
    weights = _softmax(row_scores.add_(mask), sinks)

    # [R, H, M * T] -> [E, T]
    weights = weights.view(-1, tokens).index_select(0, plan.entry_columns)
    outputs = queries.new_empty(len(queries), values.shape[-1])
    for group in plan.groups:
        _multiply(weights, group.select(values), outputs, group)
    # `embedding_bag` sums the entries of each query in one pass.
    attention = F.embedding_bag(plan.used_entries, outputs, plan.query_starts, mode="sum")
    return attention.view(rows, -1)


def _multiply(left: Tensor, blocks: Tensor, product: Tensor, group: BlockGroup) -> None:
    """Multiply the entries of a group with its blocks.

    Args:
        left: Left factors of all entries, [E, inputs].
        blocks: Blocks of the group, [n * G, inputs, outputs].
        product: Products of all entries, [E, outputs]; the function writes those of the group.
        group: The group.
    """
    torch.bmm(
        left[group.entries].view(len(blocks), -1, left.shape[1]),
        blocks,
        out=product[group.entries].view(len(blocks), -1, product.shape[1]),
    )


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores [R, H, columns] over the columns and the sink of each head."""
    if sinks is None:
        return scores.softmax(-1)
    sink_scores = sinks.to(scores.dtype)[:, None].expand(len(scores), -1, 1)
    return torch.cat((scores, sink_scores), -1).softmax(-1)[..., :-1].contiguous()
