"""Packing of right-padded rows into micro-batches, and unpacking of results.

No other package depends on the layout of packed rows. The sequences of a micro-batch are
concatenated along one dimension (megatron-core's "thd" format). Three mechanisms change this
layout:

- Shared prefixes. If attention runs over a prefix tree, a common prefix of several rows is one
  segment, and the rest of each of these rows is another segment. The prefix's tokens belong to all
  of these rows: unpacking copies their values into each row, and the backward pass adds up their
  gradients.
- Context parallelism. Each sequence is padded until it divides into 2C chunks, where C is the
  context-parallel size. Context rank r holds the chunks r and 2C-1-r. This division balances the
  work of causal attention. transformer-engine's attention and megatron-core's rotary embedding
  require it.
- Sequence parallelism. The tokens of a context rank are divided evenly among the tensor ranks.

Without context and sequence parallelism, nothing is padded. Padding follows the tokens of its
sequence, so causal attention never reads it, and it belongs to no row.

The last part of the module balances the rows over data ranks and micro-batches.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from aligner.megatron.shared_prefixes import (
    AttentionTree,
    Bundle,
    bundle_rows,
    bundle_without_sharing,
)
from aligner.models.shape import Rope


@dataclass(frozen=True)
class PackingLayout:
    """Division of a packed micro-batch's tokens over the ranks of a model, and this rank's part."""

    sequence_size: int = 1
    """Number of tensor ranks that divide the tokens between attention and MLP (sequence
    parallelism); 1 without sequence parallelism."""
    context_size: int = 1
    """Context-parallel size."""
    sequence_rank: int = 0
    context_rank: int = 0
    context_group: dist.ProcessGroup | None = None
    token_multiple: int = 1
    """Required divisor of the token count of each rank."""
    should_share_prefixes: bool = False
    """Whether rows may share a prefix, because attention runs over a prefix tree."""

    @property
    def sequence_multiple(self) -> int:
        """Required divisor of the padded length of each sequence."""
        return 2 * self.context_size if self.context_size > 1 else 1

    @property
    def total_multiple(self) -> int:
        """Required divisor of the padded length of a micro-batch."""
        return math.lcm(
            self.sequence_multiple, self.context_size * self.sequence_size * self.token_multiple
        )


@dataclass(frozen=True)
class RoutingReplay:
    """Recorded expert routing of this rank's tokens in a micro-batch.

    Only tokens that have a successor have a recorded routing. The layer's router chooses the
    experts of the other tokens.
    """

    token_index: Tensor
    """Indices of the tokens with recorded routing among this rank's tokens between attention and
    MLP, int64 [M]."""
    experts: Tensor
    """Recorded expert ids of the L layers with experts, uint8 or int16 [M, L, K], in host memory;
    each pipeline stage copies only the ids of its own layers to the device."""
    mismatch_counts: list[Tensor] = field(default_factory=list)
    """For each forward pass of a layer, the number of the M tokens for which the layer's router
    would have chosen other experts, int64 []."""


@dataclass
class PackedSequences(PackedSeqParams):
    """megatron-core's description of a packed micro-batch, and the rows of `PackedAttention`.

    The row layout has N padded sequences of L tokens. T is the number of tokens of all context
    ranks, and C is the context-parallel size.
    """

    key_index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Index of each key in the flattened rows [N·L], int64 [T]; keys are in the order of the
    context ranks."""
    key_shape: tuple[int, int] = (0, 0)
    """Shape (N, L) of the rows of keys."""
    query_index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Index of each of this rank's tokens in the flattened rows [N·L/C], int64 [T/C]."""
    query_shape: tuple[int, int] = (0, 0)
    """Shape (N, L/C) of the rows of queries."""
    query_positions: Tensor | None = None
    """Position of each query in its sequence, int64 [N, L/C]; None without context parallelism,
    because the position then equals the column in the row."""
    context_group: dist.ProcessGroup | None = None
    """The context ranks; None without context parallelism."""
    routing_replay: RoutingReplay | None = None
    attention_tree: AttentionTree | None = None
    """Attention pattern that replaces the rows if rows share prefixes; otherwise None."""
    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Position of each of this rank's tokens in its row, int64 [T/C]."""
    rotations: dict[Rope, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Cosines and sines of the rotary embeddings, which the first layer with each of them caches
    for the other layers."""

    def to_key_rows(self, values: Tensor) -> Tensor:
        """Return values of the tokens of all context ranks [T, …] as rows [N, L, …].

        The rows are zero at padding.
        """
        return _scatter_to_rows(values, self.key_index, self.key_shape)

    def to_query_rows(self, values: Tensor) -> Tensor:
        """Return values of this rank's tokens [T/C, …] as rows [N, L/C, …], zero at padding."""
        return _scatter_to_rows(values, self.query_index, self.query_shape)

    def from_query_rows(self, rows: Tensor) -> Tensor:
        """Return the values [T/C, …] of this rank's tokens from rows [N, L/C, …]."""
        # The backward pass of index_select adds gradients without sorting the indices, unlike the
        # backward pass of indexing.
        return rows.flatten(0, 1).index_select(0, self.query_index)


def require_packed(packed: object, module: str) -> PackedSequences:
    """Return the description of a packed micro-batch that megatron-core passes to a module.

    Args:
        packed: `packed_seq_params` of the module's forward pass.
        module: Name of the module for the error.

    Raises:
        TypeError: If `packed` is not a PackedSequences.
    """
    if not isinstance(packed, PackedSequences):
        raise TypeError(
            f"{module} requires packed micro-batches (PackedSequences), got {type(packed).__name__}"
        )
    return packed


def _scatter_to_rows(values: Tensor, index: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return packed values as rows; differentiable.

    Args:
        values: Values of n tokens, [n, …].
        index: Index of each token in the flattened rows, int64 [n].
        shape: Number of rows and their length.

    Returns:
        [*shape, …], zero where there is no token.
    """
    padded = values.new_zeros(shape[0] * shape[1], *values.shape[1:])
    return padded.index_copy(0, index, values).unflatten(0, shape)


@dataclass(frozen=True)
class PackedBatch:
    """This rank's part of a micro-batch of N sequences: T tokens, including padding.

    N is 0 for a filler, which exists only so that all data ranks run the same number of
    micro-batches.
    """

    tokens: Tensor
    """Token ids, int64 [1, T]."""
    positions: Tensor
    """Position of each token in its sequence, int64 [1, T]; 0 at padding."""
    sequences: PackedSequences
    token_index: Tensor
    """Packed indices of this rank's tokens that are not padding, int64 [K]."""
    token_rows: Tensor
    """Indices of the tokens of `token_index` in the flattened rows [N, L], int64 [K]."""
    target_index: Tensor
    """Packed indices of this rank's tokens that have a successor, int64 [M]."""
    targets: Tensor
    """Token ids of the successors of the tokens of `target_index`, int64 [M]."""
    target_rows: Tensor
    """Indices of `targets` in the flattened rows [N, L-1], int64 [M]."""
    batch_rows: Tensor
    """Row index of each sequence in the whole batch, int64 [N]."""
    width: int
    """Length L of the longest sequence."""

    @property
    def is_filler(self) -> bool:
        """Whether the micro-batch contains no sequence."""
        return len(self.batch_rows) == 0

    def unpack_targets(self, values: Tensor) -> Tensor:
        """Return values of the targets as rows; differentiable, and equal on every context rank.

        Args:
            values: [M, …].

        Returns:
            [N, L-1, …], zero where there is no target.
        """
        return self._unpack(values, self.target_rows, self.width - 1)

    def unpack_tokens(self, values: Tensor) -> Tensor:
        """Return values of the tokens as rows; differentiable, and equal on every context rank.

        Args:
            values: [T, …].

        Returns:
            [N, L, …], zero where there is no token.
        """
        return self._unpack(values.index_select(0, self.token_index), self.token_rows, self.width)

    def _unpack(self, values: Tensor, index: Tensor, width: int) -> Tensor:
        local = _scatter_to_rows(values, index, (len(self.batch_rows), width))
        if self.sequences.context_group is None:
            return local
        # Every context rank computes the same loss from the sum. In the backward pass, each context
        # rank receives the gradients of its own tokens.
        return reduce_from_tensor_model_parallel_region(local, self.sequences.context_group)


def pack(
    tokens: Tensor,
    lengths: Tensor,
    bundles: Sequence[Bundle],
    device: torch.device,
    layout: PackingLayout | None = None,
    expert_routing: Tensor | None = None,
) -> PackedBatch:
    """Return this rank's part of the micro-batch that contains the rows of some bundles.

    Without any bundle, the result is a filler.

    Args:
        tokens: Right-padded rows of the whole batch, int64 [B, S].
        lengths: Lengths of the rows in tokens, int64 [B].
        bundles: Bundles of the micro-batch. Bundles with shared tokens require
            `layout.should_share_prefixes`.
        device: Device of the result.
        layout: Division of the tokens; None means that this rank holds all of them.
        expert_routing: Recorded expert routing of the whole batch, uint8 or int16 [B, S-1, L, K].
    """
    layout = layout or PackingLayout()
    rows = torch.tensor([row for bundle in bundles for row in bundle.rows], dtype=torch.int64)
    counts = lengths[rows]
    width = int(counts.max()) if len(rows) else 1
    segments = _build_segments(bundles, rows, counts)
    padded = _padded_lengths(segments.lengths, layout)
    max_length = int(padded.max())
    inside = torch.arange(max_length) < padded[:, None]

    # For each packed token: its segment, its offset in the segment, and whether it is a token of a
    # row. A last segment may consist of padding only.
    segment, offset = inside.nonzero(as_tuple=True)
    padding_segments = len(padded) - len(segments.lengths)
    is_token = (
        offset
        < torch.cat([segments.lengths, segments.lengths.new_zeros(padding_segments)])[segment]
    )
    first = torch.cat(
        [segments.first_positions, segments.first_positions.new_zeros(padding_segments)]
    )
    packed_tokens = torch.zeros_like(offset)
    positions = torch.zeros_like(offset)
    positions[is_token] = first[segment[is_token]] + offset[is_token]
    packed_tokens[is_token] = tokens[rows[segments.rows[segment[is_token]]], positions[is_token]]

    # Select the tokens of this context rank.
    indices = [
        _context_rank_indices(padded, layout.context_size, rank)
        for rank in range(layout.context_size)
    ]
    local = indices[layout.context_rank]
    sequences = _build_sequences(padded, inside, indices, layout, device)
    sequences.positions = positions[local].to(device)
    starts = padded.cumsum(0) - padded
    if layout.should_share_prefixes:
        sequences.attention_tree = AttentionTree.build(
            starts, padded, segments.lengths, segments.prefixes, device
        )

    # For each token of each row: its index among this rank's tokens, or -1 on another rank.
    local_index = torch.full((len(segment),), -1)
    local_index[local] = torch.arange(len(local))
    row, step = (torch.arange(width) < counts[:, None]).nonzero(as_tuple=True)
    token_index = local_index[segments.packed_indices(starts, row, step)]
    is_local = token_index >= 0
    has_target = (token_index >= 0) & (step + 1 < counts[row])
    if expert_routing is not None:
        sequences.routing_replay = _build_routing_replay(
            token_index[has_target],
            len(local),
            expert_routing[rows[row[has_target]], step[has_target]],
            layout,
            device,
        )
    return PackedBatch(
        tokens=packed_tokens[local][None].to(device),
        positions=positions[local][None].to(device),
        sequences=sequences,
        token_index=token_index[is_local].to(device),
        token_rows=(row[is_local] * width + step[is_local]).to(device),
        target_index=token_index[has_target].to(device),
        targets=tokens[rows[row[has_target]], step[has_target] + 1].to(device),
        target_rows=(row[has_target] * (width - 1) + step[has_target]).to(device),
        batch_rows=rows,
        width=width,
    )


@dataclass(frozen=True)
class _Segments:
    """The M concatenated segments: shared prefixes, then the rest of each of N rows."""

    rows: Tensor
    """Index of a row that contains the segment, int64 [M]."""
    first_positions: Tensor
    """Position of the segment's first token in that row, int64 [M]."""
    lengths: Tensor
    """Number of tokens of the segment, int64 [M]."""
    prefixes: Tensor
    """Index of the segment that is the prefix of each row, int64 [N]; -1 if the row has no
    prefix."""

    def packed_indices(self, starts: Tensor, row: Tensor, step: Tensor) -> Tensor:
        """Return the packed indices of K tokens, int64 [K].

        Args:
            starts: Packed index of the first token of each segment, int64 [M or more].
            row: Row of each token, int64 [K].
            step: Position of each token in its row, int64 [K].
        """
        own_segment = row + len(self.rows) - len(self.prefixes)
        in_prefix = step < self.first_positions[own_segment]
        return starts[torch.where(in_prefix, self.prefixes[row], own_segment)] + torch.where(
            in_prefix, step, step - self.first_positions[own_segment]
        )


def _build_segments(bundles: Sequence[Bundle], rows: Tensor, counts: Tensor) -> _Segments:
    """Return the segments of the bundles' rows, whose lengths are `counts`, int64 [N]."""
    sizes = torch.tensor([len(bundle.rows) for bundle in bundles], dtype=torch.int64)
    shared = torch.tensor([bundle.shared_tokens for bundle in bundles], dtype=torch.int64)
    has_prefix = shared > 0
    prefix_number = torch.where(has_prefix, has_prefix.cumsum(0) - 1, -1)
    row_shared = shared.repeat_interleave(sizes)
    return _Segments(
        rows=torch.cat([(sizes.cumsum(0) - sizes)[has_prefix], torch.arange(len(rows))]),
        first_positions=torch.cat([torch.zeros_like(shared[has_prefix]), row_shared]),
        lengths=torch.cat([shared[has_prefix], counts - row_shared]),
        prefixes=prefix_number.repeat_interleave(sizes),
    )


def _padded_lengths(counts: Tensor, layout: PackingLayout) -> Tensor:
    """Return padded lengths of sequences that the layout can divide evenly.

    Padding that is required only by `total_multiple` is added to sequences that are shorter than
    the longest one. It does not increase the cost of attention, whose rows are as wide as the
    longest sequence. The remaining padding becomes an additional last sequence.

    Args:
        counts: Lengths of the sequences in tokens, int64 [N].
        layout: Division of the tokens.

    Returns:
        int64 [N], or [N+1] with the additional sequence.
    """
    unit = layout.sequence_multiple
    padded = -(-counts // unit) * unit
    total = max(-(-int(padded.sum()) // layout.total_multiple), 1) * layout.total_multiple
    spare = total - int(padded.sum())
    if len(padded):
        filled = (padded.max() - padded).cumsum(0).clamp(max=spare)
        padded = padded + filled.diff(prepend=filled.new_zeros(1))
        spare = total - int(padded.sum())
    return torch.cat([padded, padded.new_tensor([spare])]) if spare else padded


def _context_rank_indices(padded: Tensor, context_size: int, rank: int) -> Tensor:
    """Return the packed indices of the tokens of a context rank, int64 [T/C].

    The rank holds the chunks `rank` and 2C-1-`rank` of each sequence's 2C chunks.
    """
    if context_size == 1:
        return torch.arange(int(padded.sum()))
    chunk = torch.cat(
        [
            torch.arange(2 * context_size).repeat_interleave(int(length) // (2 * context_size))
            for length in padded
        ]
    )
    return ((chunk == rank) | (chunk == 2 * context_size - 1 - rank)).nonzero()[:, 0]


def _build_sequences(
    padded: Tensor,
    inside: Tensor,
    indices: list[Tensor],
    layout: PackingLayout,
    device: torch.device,
) -> PackedSequences:
    """Return megatron-core's description of the sequences, and their row layout for attention.

    Args:
        padded: Padded lengths of the sequences, int64 [N].
        inside: Mask of the row positions that have a token or padding of the sequence, bool [N, L].
        indices: Packed indices of each context rank's tokens, int64 [T/C] each.
        layout: Division of the tokens.
        device: Device of the result.
    """
    cumulative = torch.cat([padded.new_zeros(1), padded.cumsum(0)]).to(torch.int32).to(device)
    rows, max_length = inside.shape
    query_width = inside.shape[1] // layout.context_size
    row_index = inside.flatten().nonzero()[:, 0]
    key_index = row_index[torch.cat(indices)].to(device)
    query_index = key_index
    positions = None
    if layout.context_size > 1:
        query_row_index = (
            (torch.arange(query_width) < padded[:, None] // layout.context_size)
            .flatten()
            .nonzero()[:, 0]
        )
        query_positions = torch.zeros(rows * query_width, dtype=torch.int64)
        query_positions[query_row_index] = row_index[indices[layout.context_rank]] % max_length
        query_index = query_row_index.to(device)
        positions = query_positions.view(rows, query_width).to(device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=max_length,
        max_seqlen_kv=max_length,
        key_index=key_index,
        key_shape=(rows, max_length),
        query_index=query_index,
        query_shape=(rows, query_width),
        query_positions=positions,
        context_group=layout.context_group if layout.context_size > 1 else None,
    )


def _build_routing_replay(
    token_index: Tensor, count: int, experts: Tensor, layout: PackingLayout, device: torch.device
) -> RoutingReplay:
    """Return the recorded routing of this tensor rank's tokens.

    Args:
        token_index: Indices of A tokens among the context rank's tokens, int64 [A].
        count: Number of tokens of the context rank.
        experts: Recorded expert ids of the A tokens, [A, L, K].
        layout: Division of the tokens.
        device: Device of the indices.
    """
    tokens_per_rank = count // layout.sequence_size
    token_index = token_index - layout.sequence_rank * tokens_per_rank
    is_local = (token_index >= 0) & (token_index < tokens_per_rank)
    return RoutingReplay(token_index[is_local].to(device), experts[is_local])


def pack_micro_batches(
    tokens: Tensor,
    lengths: Tensor,
    *,
    data_rank: int,
    data_size: int,
    budget: int,
    device: torch.device,
    layout: PackingLayout | None = None,
    multiple: int = 1,
    group_size: int = 1,
    expert_routing: Tensor | None = None,
) -> list[PackedBatch]:
    """Return the micro-batches of one data rank, which contain its part of the rows.

    Each `group_size` consecutive rows are in one micro-batch, in their order. Every data rank gets
    the same number of micro-batches, because the ranks run megatron-core's schedules and reduce the
    gradients in lockstep. Fillers are added to reach this number.

    Args:
        tokens: Right-padded rows of the whole batch, int64 [B, S].
        lengths: Lengths of the rows in tokens, int64 [B].
        data_rank: Data-parallel rank.
        data_size: Data-parallel size.
        budget: Maximum number of tokens of a micro-batch, not counting padding.
        device: Device of the micro-batches.
        layout: Division of the tokens; None means that this rank holds all tokens of a micro-batch.
        multiple: Required divisor of the number of micro-batches.
        group_size: Number of consecutive rows that must be in one micro-batch.
        expert_routing: Recorded expert routing of the whole batch, uint8 or int16 [B, S-1, L, K].
    """
    layout = layout or PackingLayout()
    bundlings = [bundle_without_sharing(lengths, group_size)]
    if layout.should_share_prefixes:
        largest = bundle_rows(tokens, lengths, budget, group_size)
        # Bundles that are large compared with a rank's share may balance so badly over the data
        # ranks that splitting them, and computing their prefixes again, costs less.
        share = sum(bundle.computed_tokens for bundle in largest) // data_size
        prefix = max((bundle.shared_tokens for bundle in largest), default=0)
        smaller = (
            [min(budget, part + prefix) for part in (share, share // 2)] if data_size > 1 else []
        )
        bundlings = [
            largest,
            *(bundle_rows(tokens, lengths, max_tokens, group_size) for max_tokens in smaller),
        ]

    # Choose the bundling whose busiest data rank computes the fewest tokens.
    assignments = [
        (bundles, split_over_data_ranks([bundle.computed_tokens for bundle in bundles], data_size))
        for bundles in bundlings
    ]
    bundles, shares = min(
        assignments,
        key=lambda assignment: max(
            sum(assignment[0][index].computed_tokens for index in share) for share in assignment[1]
        ),
    )

    # Every data rank uses the largest number of micro-batches that any data rank needs.
    sizes = [bundle.computed_tokens for bundle in bundles]
    needed = max(
        len(split_into_micro_batches([sizes[index] for index in share], budget)) for share in shares
    )
    count = -(-needed // multiple) * multiple
    local_bundles = [bundles[index] for index in shares[data_rank]]
    batches = split_into_micro_batches(
        [bundle.computed_tokens for bundle in local_bundles],
        budget,
        count=min(count, len(local_bundles)),
    )
    batches += [[] for _ in range(count - len(batches))]
    return [
        pack(
            tokens,
            lengths,
            [local_bundles[index] for index in batch],
            device,
            layout,
            expert_routing,
        )
        for batch in batches
    ]


# Both functions below assign sequences in order of decreasing length, each to the rank or
# micro-batch with the fewest assigned tokens (longest-processing-time greedy, Graham 1969). Ties go
# to the lower index, so every rank computes the same result from equal lengths.


def split_into_micro_batches(
    lengths: Sequence[int], budget: int, count: int | None = None
) -> list[list[int]]:
    """Return the indices of the sequences of each micro-batch, with balanced token totals.

    No micro-batch is empty, and none has more than `budget` tokens.

    Args:
        lengths: Lengths of the sequences in tokens.
        budget: Maximum number of tokens of a micro-batch.
        count: Number of micro-batches; None means the smallest number for which the greedy
            algorithm succeeds. It also succeeds for any larger number, so the ranks can use the
            maximum of their smallest numbers.

    Raises:
        ValueError: If a length is not between 1 and `budget`, or if the sequences cannot fill
            exactly `count` micro-batches, or do not fit into them.
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= budget:
            raise ValueError(
                f"sequence {index} has {length} tokens; must have 1 to micro_batch_tokens={budget}"
            )
    if count is not None:
        if not min(1, len(lengths)) <= count <= len(lengths):
            raise ValueError(f"{len(lengths)} sequences cannot fill exactly {count} micro-batches")
        batches = _assign_to_least_loaded(lengths, count)
        if not _fits(batches, lengths, budget):
            raise ValueError(
                f"micro_batch_tokens={budget}: {len(lengths)} sequences with {sum(lengths)} tokens"
                f" do not fit into {count} micro-batches"
            )
        return batches
    lower_bound = -(-sum(lengths) // budget)
    # The search ends at the latest with one sequence in each micro-batch, which always fits.
    return next(
        batches
        for candidate in range(lower_bound, len(lengths) + 1)
        if _fits(batches := _assign_to_least_loaded(lengths, candidate), lengths, budget)
    )


def split_over_data_ranks(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the indices of each data rank's sequences, ascending, with balanced token totals.

    The numbers of sequences of two ranks differ by at most one, and rank 0 has a sequence if there
    is any. Of each `ranks` consecutive sequences in order of length, the rank with the fewest
    tokens gets the longest. If the number of sequences is a multiple of `ranks`, token totals
    therefore differ by at most the longest minus the shortest length.
    """
    order = _longest_first(lengths)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(order), ranks):
        emptiest_first = sorted(range(ranks), key=totals.__getitem__)
        for rank, index in zip(emptiest_first, order[start : start + ranks], strict=False):
            shares[rank].append(index)
            totals[rank] += lengths[index]
    return [sorted(share) for share in shares]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def _assign_to_least_loaded(lengths: Sequence[int], count: int) -> list[list[int]]:
    batches: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, batch) for batch in range(count)]
    for index in _longest_first(lengths):
        load, batch = loads[0]
        batches[batch].append(index)
        heapq.heapreplace(loads, (load + lengths[index], batch))
    return [sorted(batch) for batch in batches]


def _fits(batches: list[list[int]], lengths: Sequence[int], budget: int) -> bool:
    return all(sum(lengths[index] for index in batch) <= budget for batch in batches)
