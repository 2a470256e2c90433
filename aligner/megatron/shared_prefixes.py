"""Shared prefixes: bundles of rows with a common prefix, and causal attention over prefix trees.

The first part of the module decides which rows of a batch share a prefix, so that the prefix is
computed only once, for example for many responses to one prompt.

The second part is causal attention over packed segments, where some segments continue another
segment. A token attends to its own segment, up to and including itself, and to the whole segment
that is its prefix. The two partial softmaxes are combined by their log-sum-exps, as FlashAttention
combines blocks of keys (Dao et al. 2022, section 3.1). The backward kernel computes the gradients
of each part from the output and the log-sum-exp of the combined softmax.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# For a prefix of fewer tokens, the second attention pass costs more than the sharing saves.
_MIN_SHARED_TOKENS = 4


@dataclass(frozen=True)
class Bundle:
    """Rows that are packed into the same micro-batch and whose common prefix is computed once."""

    rows: tuple[int, ...]
    """Indices of the rows in the batch."""
    shared_tokens: int
    """Length of the common prefix in tokens; 0 if the rows share nothing."""
    computed_tokens: int
    """Number of tokens that are computed for all rows of the bundle."""


def bundle_without_sharing(lengths: Tensor, group_size: int = 1) -> list[Bundle]:
    """Return one bundle for each `group_size` consecutive rows, without any shared prefix.

    Args:
        lengths: Lengths of the rows in tokens, int64 [B].
        group_size: Number of consecutive rows in a bundle.
    """
    rows = range(len(lengths))
    return [
        Bundle(
            tuple(rows[start : start + group_size]),
            0,
            int(lengths[start : start + group_size].sum()),
        )
        for start in range(0, len(rows), group_size)
    ]


def bundle_rows(
    tokens: Tensor, lengths: Tensor, max_tokens: int, group_size: int = 1
) -> list[Bundle]:
    """Return the bundles of rows for which the fewest tokens are computed.

    At least one token of each row is not part of the shared prefix. If `group_size` is 1, any rows
    may be bundled, in any order. Otherwise each `group_size` consecutive rows stay in one bundle,
    in their order.

    Args:
        tokens: Right-padded rows, int64 [B, S], on the CPU.
        lengths: Lengths of the rows in tokens, int64 [B], on the CPU.
        max_tokens: Maximum number of computed tokens of a bundle. A bundle of a single group may
            exceed it.
        group_size: Number of consecutive rows that a loss compares with each other.
    """
    if not len(tokens):
        return []
    data = tokens.numpy()
    counts = lengths.numpy()
    order = np.arange(len(data))
    if group_size == 1:
        # Big-endian bytes sort like the token ids, so rows with a common prefix become neighbors.
        comparable = data.astype(">i8")
        order = np.array(
            sorted(range(len(data)), key=lambda row: comparable[row, : counts[row]].tobytes())
        )
    common = _common_prefix_lengths(data[order], counts[order])
    sums = np.concatenate([[0], counts[order].cumsum()])
    largest_ends = _compute_largest_ends(common, counts[order], max_tokens)

    # Dynamic programming over the sorted rows: min_cost[end] is the smallest number of computed
    # tokens of the first `end` rows, and last_start[end] is the first row of their last bundle.
    min_cost = np.full(len(data) + 1, np.iinfo(np.int64).max)
    last_start = np.zeros(len(data) + 1, dtype=np.int64)
    min_cost[0] = 0
    for start in range(0, len(data), group_size):
        # All bundles that begin with row `start`; each ends with one of the following groups.
        # A bundle of a single group is always allowed.
        largest_end = max(int(largest_ends[start]), start + group_size)
        ends = np.arange(start + group_size, largest_end + 1, group_size)
        shared = np.minimum.accumulate(np.append(common[start:largest_end], 0))[
            np.maximum(ends - start - 2, 0)
        ]
        shared = np.where((ends - start > 1) & (shared >= _MIN_SHARED_TOKENS), shared, 0)
        computed = sums[ends] - sums[start] - (ends - start - 1) * shared
        allowed = (ends == start + group_size) | ((shared > 0) & (computed <= max_tokens))
        better = allowed & (min_cost[start] + computed < min_cost[ends])
        min_cost[ends[better]] = min_cost[start] + computed[better]
        last_start[ends[better]] = start

    # Follow the optimal bundles from the last row back to the first.
    bundles: list[Bundle] = []
    end = len(data)
    while end:
        start = int(last_start[end])
        prefix = int(common[start : end - 1].min()) if end - start > 1 else 0
        prefix = prefix if prefix >= _MIN_SHARED_TOKENS else 0
        cost = int(sums[end] - sums[start]) - (end - start - 1) * prefix
        bundles.append(Bundle(tuple(order[start:end].tolist()), prefix, cost))
        end = start
    return bundles[::-1]


def _common_prefix_lengths(data: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the length of the common prefix of each row and its successor.

    The last token of a row is never part of the prefix.

    Args:
        data: Right-padded rows, int64 [B, S].
        counts: Lengths of the rows in tokens, int64 [B].

    Returns:
        int64 [B-1].
    """
    limit = np.minimum(counts[1:], counts[:-1]) - 1
    inside = np.arange(data.shape[1]) < limit[:, None]
    return np.logical_and.accumulate((data[1:] == data[:-1]) & inside, axis=1).sum(1)


def _compute_largest_ends(common: np.ndarray, counts: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return for each row an upper bound of the end of a bundle that begins with this row.

    The bound keeps the cost of `bundle_rows` linear in the number of rows: without it, a bundle
    could end at any of the following rows.

    Args:
        common: Length of the common prefix of each row and its successor, int64 [B-1].
        counts: Lengths of the rows in tokens, int64 [B].
        max_tokens: Maximum number of computed tokens of a bundle.

    Returns:
        int64 [B]: index of the row after the last row that the bundle could contain.
    """
    # Neighbors without a sufficient common prefix are never in the same bundle.
    prefixes = np.append(common, 0)
    borders = np.flatnonzero(prefixes < _MIN_SHARED_TOKENS)
    rows = np.arange(len(counts))
    border_ends = borders[np.searchsorted(borders, rows)] + 1

    # A bundle's prefix is not longer than the common prefix of a row and a neighbor, so at least
    # the other tokens of each row are computed.
    own_tokens = counts - np.maximum(prefixes, np.append(0, common))
    sums = np.concatenate([[0], own_tokens.cumsum()])
    budget_ends = np.searchsorted(sums, sums[:-1] + max_tokens, side="right") - 1
    return np.minimum(border_ends, budget_ends)


_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _empty_index() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Block:
    """Runs of consecutive packed tokens as N padded rows of L positions."""

    rows: int
    """Number N of rows."""
    width: int
    """Number L of positions of a row."""
    tokens: Tensor | slice
    """Index of the packed token at each position, int64 [N·L], arbitrary at padding; a slice if the
    tokens are consecutive and there is no padding."""
    padding_index: Tensor = field(default_factory=_empty_index)
    """Indices of the padding in the flattened rows, int64; empty if `tokens` is a slice."""
    valid_index: Tensor = field(default_factory=_empty_index)
    """Indices in the flattened rows of the positions that are not padding, int64 [K]; empty if
    `tokens` is a slice."""
    valid_tokens: Tensor = field(default_factory=_empty_index)
    """Index of the packed token at each position of `valid_index`, int64 [K]; empty if `tokens` is
    a slice."""

    @classmethod
    def build(cls, starts: Tensor, lengths: Tensor, device: torch.device) -> "Block":
        """Return the block of the runs that start at `starts` and have `lengths` tokens.

        Args:
            starts: Index of the first packed token of each run, int64 [N], on the CPU.
            lengths: Number of tokens of each run, int64 [N], on the CPU.
            device: Device of the block's indices.
        """
        rows = len(lengths)
        width = int(lengths.max())
        first = int(starts[0])
        if bool((lengths == width).all()) and torch.equal(
            starts, first + width * torch.arange(rows)
        ):
            # Consecutive runs of one length: a slice avoids all index operations.
            return cls(rows, width, slice(first, first + rows * width))
        inside = torch.arange(width) < lengths[:, None]
        tokens = torch.where(inside, starts[:, None] + torch.arange(width), 0).flatten()
        padding = (~inside).flatten().nonzero()[:, 0]
        valid = inside.flatten().nonzero()[:, 0]
        return cls(
            rows,
            width,
            tokens.to(device),
            padding.to(device),
            valid.to(device),
            tokens[valid].to(device),
        )

    def gather_rows(self, values: Tensor, fill: float | None = None) -> Tensor:
        """Return the values of packed tokens [T, heads, …] as rows [N, heads, L, …].

        Args:
            values: One entry for each packed token, [T, heads, …].
            fill: Value at padding; None leaves values of arbitrary tokens there.
        """
        if isinstance(self.tokens, slice):
            gathered = values[self.tokens]
        else:
            gathered = values.index_select(0, self.tokens)
            if fill is not None:
                gathered.index_fill_(0, self.padding_index, fill)
        return gathered.unflatten(0, (self.rows, self.width)).transpose(1, 2)

    def scatter_rows(self, values: Tensor, rows: Tensor, *, add: bool = False) -> None:
        """Write rows [N, heads, L, …] to their tokens in `values` [T, heads, …], in place.

        Args:
            values: One entry for each packed token, [T, heads, …].
            rows: Rows of this block, [N, heads, L, …]; padding is ignored.
            add: Whether to add the rows to the values instead of replacing the values.
        """
        flat = rows.transpose(1, 2).flatten(0, 1)
        if isinstance(self.tokens, slice):
            target = values[self.tokens]
            target.add_(flat) if add else target.copy_(flat)
        elif add:
            values.index_add_(0, self.valid_tokens, flat[self.valid_index])
        else:
            values.index_copy_(0, self.valid_tokens, flat[self.valid_index])


@dataclass(frozen=True)
class AttentionTree:
    """Attention pattern of a packed micro-batch whose segments may share prefixes."""

    segments: tuple[Block, ...]
    """Blocks of segments for causal attention. Each token is in exactly one segment."""
    prefixes: tuple[tuple[Block, Block], ...]
    """Pairs of queries and keys for attention to shared prefixes. A row of the keys is one shared
    segment; the same row of the queries contains all tokens that continue this segment, and each of
    them attends to all keys of the row. A token is in at most one such row of queries."""

    @classmethod
    def build(
        cls, starts: Tensor, padded: Tensor, lengths: Tensor, prefixes: Tensor, device: torch.device
    ) -> "AttentionTree":
        """Return the attention pattern of packed segments.

        The last N of the M segments are the rows; the other segments are shared prefixes. Further
        entries of `starts` and `padded` describe padding at the end of the micro-batch.

        Args:
            starts: Index of the first packed token of each segment, int64 [M or more].
            padded: Length of each segment including its padding, int64 [M or more].
            lengths: Length of each segment without padding, int64 [M].
            prefixes: Index of the segment that is the prefix of each row, int64 [N]; -1 if the row
                has no prefix. Rows with the same prefix must be consecutive.
            device: Device of the blocks' indices.
        """
        # Use one block for each power of two of the segment length, to limit the padding of the
        # rows.
        classes = (padded - 1).clamp(min=0).log2().floor().clamp(min=3)
        segments = [
            Block.build(starts[classes == size], padded[classes == size], device)
            for size in classes.unique()
        ]
        pairs = []
        if len(prefixes) and int(prefixes.max()) >= 0:
            numbers, branches = prefixes[prefixes >= 0].unique(return_counts=True)
            first = (prefixes[:, None] == numbers).int().argmax(0) + len(lengths) - len(prefixes)
            last = first + branches - 1
            begin = starts[first]
            extent = starts[last] + padded[last] - starts[first]
            # A pair contains only prefixes of one length, so that no key has to be masked.
            for length in lengths[numbers].unique():
                is_length = lengths[numbers] == length
                keys = Block.build(starts[numbers[is_length]], lengths[numbers[is_length]], device)
                pairs.append((Block.build(begin[is_length], extent[is_length], device), keys))
        return cls(tuple(segments), tuple(pairs))


def attend(
    query: Tensor, key: Tensor, value: Tensor, tree: AttentionTree, scale: float | None
) -> Tensor:
    """Return the attention of packed tokens along a prefix tree, on a CPU.

    The result can be differentiated once.

    Args:
        query: [T, heads, dim].
        key: [T, key/value heads, dim].
        value: [T, key/value heads, dim].
        tree: Attention pattern of the micro-batch.
        scale: Factor of the scores; None means 1/√dim.

    Returns:
        [T, heads, dim], in the dtype of `query`.
    """
    return _TreeAttention.apply(query, key, value, tree, scale)


class _TreeAttention(Function):
    """Autograd function of `attend`."""

    @staticmethod
    def forward(
        context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tree: AttentionTree,
        scale: float | None,
    ) -> Tensor:
        """Return the attention of packed tokens; see `attend`."""
        attended = torch.empty_like(query)
        # Log-sum-exp of each query's scores, [T, heads].
        normalizer = query.new_empty(query.shape[:2], dtype=_at_least_float32(query))
        for block in tree.segments:
            rows, sums = _flash_attention(
                *(block.gather_rows(tensor) for tensor in (query, key, value)),
                is_causal=True,
                scale=scale,
            )
            block.scatter_rows(attended, rows)
            block.scatter_rows(normalizer, sums)
        for queries, keys in tree.prefixes:
            rows, sums = _flash_attention(
                queries.gather_rows(query),
                keys.gather_rows(key),
                keys.gather_rows(value),
                scale=scale,
            )
            # Combine two partial softmaxes with log-sum-exps a and b: with c = logaddexp(a, b),
            # out = exp(a - c) out_a + exp(b - c) out_b (Dao et al. 2022, section 3.1).
            segment_sums = queries.gather_rows(normalizer)
            total = torch.logaddexp(segment_sums, sums)
            rows = rows * (sums - total).exp_()[..., None].to(rows.dtype)
            rows.addcmul_(
                queries.gather_rows(attended),
                (segment_sums - total).exp_()[..., None].to(rows.dtype),
            )
            queries.scatter_rows(attended, rows)
            queries.scatter_rows(normalizer, total)
        context.save_for_backward(query, key, value, attended, normalizer)
        context.tree = tree
        context.scale = scale
        return attended

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values, in their shapes and dtype.

        Args:
            context: Autograd context of the forward pass.
            gradient: Gradient of the output, [T, heads, dim].
        """
        query, key, value, attended, normalizer = context.saved_tensors
        # The backward kernel is up to twenty times slower in bfloat16.
        precise = _at_least_float32(query)
        for_query, for_key, for_value = (
            torch.empty_like(tensor, dtype=precise) for tensor in (query, key, value)
        )
        tree: AttentionTree = context.tree
        for queries, keys in (*((block, block) for block in tree.segments), *tree.prefixes):
            # For padded queries, a log-sum-exp of infinity makes the probabilities 0, and the
            # upstream gradients are 0.
            gradients = _flash_attention_backward(
                queries.gather_rows(gradient, 0.0).to(precise),
                queries.gather_rows(query).to(precise),
                keys.gather_rows(key).to(precise),
                keys.gather_rows(value).to(precise),
                queries.gather_rows(attended).to(precise),
                queries.gather_rows(normalizer, torch.inf),
                0.0,
                queries is keys,
                scale=context.scale,
            )
            # The segments come first and write every token; the prefixes add to these gradients.
            is_prefix = queries is not keys
            queries.scatter_rows(for_query, gradients[0], add=is_prefix)
            keys.scatter_rows(for_key, gradients[1], add=is_prefix)
            keys.scatter_rows(for_value, gradients[2], add=is_prefix)
        dtype = query.dtype
        return for_query.to(dtype), for_key.to(dtype), for_value.to(dtype), None, None
