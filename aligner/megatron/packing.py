"""Right-padded rows to packed micro-batches and back. No other room sees the packing.

Sequences are laid end to end. Rows that begin alike share that beginning where attention runs over
a tree: it is a sequence of its own, and so is what is left of each of them; its tokens stand in all
of these rows, and what these hand back for it is added up. Where a layout cuts the tokens of a
micro-batch, every sequence is padded until the cut is even: context rank r of C holds the chunks r
and 2C-1-r of each sequence's 2C (which balances causal attention; it is what transformer-engine's
attention and megatron-core's rotary embedding expect), and sequence parallelism then cuts these
tokens evenly over the tensor ranks. Without either nothing is padded. Padding follows the tokens
that it pads, so causal attention never reads it, and it belongs to no data row.
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

from aligner.megatron.shared_prefixes import AttentionTree, Bundle, alone, bundles


@dataclass(frozen=True)
class Cut:
    """How a layout cuts the tokens of a packed micro-batch, and which part is this rank's."""

    sequence: int = 1
    """tensor ranks that hold a part each between attention and MLP (sequence parallelism)"""
    context: int = 1
    sequence_rank: int = 0
    context_rank: int = 0
    context_group: dist.ProcessGroup | None = None
    rows: int = 1
    """a rank's tokens are a multiple of so many"""
    tree: bool = False
    """attention runs over a tree: rows may share what they begin with"""

    @property
    def sequence_unit(self) -> int:
        """A padded sequence's length is a multiple of it."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def total_unit(self) -> int:
        """A micro-batch's padded length is a multiple of it."""
        return math.lcm(self.sequence_unit, self.context * self.sequence * self.rows)


@dataclass(frozen=True)
class Routes:
    """The experts that this rank's tokens of a micro-batch take: those with a successor; the others
    choose for themselves."""

    places: Tensor
    """int64 [M]: their places among the tokens between attention and MLP"""
    experts: Tensor
    """uint8 or int16 [M, L, K], in host memory: a pipeline stage needs its own layers' alone"""
    differing: list[Tensor] = field(default_factory=list)
    """For each pass of a layer, how many of the M the layer's router would have sent elsewhere:
    int64 []"""


@dataclass
class PackedSequences(PackedSeqParams):
    """megatron-core's description of a packed micro-batch, and the rows of our attention: N padded
    sequences of L tokens."""

    key_index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [T]: each key's place in the flattened rows [N·L]; keys in the order of the context
    ranks"""
    key_rows: tuple[int, int] = (0, 0)
    """(N, L)"""
    query_index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [T/C]: each of this rank's tokens' place in the flattened rows [N·L/C]"""
    query_rows: tuple[int, int] = (0, 0)
    """(N, L/C)"""
    query_positions: Tensor | None = None
    """int64 [N, L/C]: position of each query in its sequence; None where row and position are the
    same (C = 1)"""
    context_group: dist.ProcessGroup | None = None
    routes: Routes | None = None
    tree: AttentionTree | None = None
    """what attention runs over, in the place of the rows"""
    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64 [T/C]: position of each of this rank's tokens in its row"""
    rotation: tuple[Tensor, Tensor] | None = None
    """cosine and sine of the positions' angles, once a layer has asked for them"""


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch: N sequences, cut and padded to T tokens on this rank; N is 0 where it only
    fills the schedule."""

    tokens: Tensor
    """int64 [1, T]"""
    positions: Tensor
    """int64 [1, T]: restarts at every sequence; 0 at padding"""
    sequences: PackedSequences
    token_index: Tensor
    """int64 [K]: packed places of this rank's tokens that are not padding"""
    token_rows: Tensor
    """int64 [K]: their places in a flattened [N, L]"""
    target_index: Tensor
    """int64 [M]: packed places of this rank's tokens that have a successor"""
    targets: Tensor
    """int64 [M]: those successors"""
    target_rows: Tensor
    """int64 [M]: their places in a flattened [N, L-1]"""
    batch_rows: Tensor
    """int64 [N]: which rows of the whole batch these sequences are"""
    width: int
    """Length L of the longest sequence"""

    @property
    def is_filler(self) -> bool:
        """Whether it holds no sequence."""
        return len(self.batch_rows) == 0

    def unpack_targets(self, values: Tensor) -> Tensor:
        """[M, …] values about next tokens to [N, L-1, …], zeros elsewhere; differentiable, whole on
        every context rank."""
        return self._unpack(values, self.target_rows, self.width - 1)

    def unpack_tokens(self, values: Tensor) -> Tensor:
        """[T, …] values about tokens to [N, L, …], zeros elsewhere; differentiable, whole on every
        context rank."""
        return self._unpack(values.index_select(0, self.token_index), self.token_rows, self.width)

    def _unpack(self, values: Tensor, places: Tensor, width: int) -> Tensor:
        rows = len(self.batch_rows)
        mine = (
            values.new_zeros(rows * width, *values.shape[1:])
            .index_copy(0, places, values)
            .unflatten(0, (rows, width))
        )
        if self.sequences.context_group is None:
            return mine
        # Every context rank computes the same loss of the sum; the backward pass hands each its own
        # tokens' gradients.
        return reduce_from_tensor_model_parallel_region(mine, self.sequences.context_group)


def pack(
    tokens: Tensor,
    lengths: Tensor,
    bundled: Sequence[Bundle],
    device: torch.device,
    cut: Cut | None = None,
    routes: Tensor | None = None,
) -> PackedBatch:
    """Pack the bundled rows (none give a filler) of right-padded tokens [B, S] with lengths [B].

    Only where the cut has a tree do bundles share anything. `routes` [B, S-1, L, K] are the experts
    that the tokens are to take.
    """
    cut = cut or Cut()
    rows = torch.tensor([row for bundle in bundled for row in bundle.rows], dtype=torch.int64)
    counts = lengths[rows]
    width = int(counts.max()) if len(rows) else 1
    segments = _segments(bundled, rows, counts)
    padded = _padded_lengths(segments.lengths, cut)
    longest = int(padded.max())
    inside = torch.arange(longest) < padded[:, None]
    # For each packed token: its segment, its place there, and whether a data row has it.
    segment, place = inside.nonzero(as_tuple=True)
    missing = len(padded) - len(segments.lengths)
    real = place < torch.cat([segments.lengths, segments.lengths.new_zeros(missing)])[segment]
    first = torch.cat([segments.first, segments.first.new_zeros(missing)])
    chosen, position = torch.zeros_like(place), torch.zeros_like(place)
    position[real] = first[segment[real]] + place[real]
    chosen[real] = tokens[rows[segments.owners[segment[real]]], position[real]]
    places = [_context_places(padded, cut.context, rank) for rank in range(cut.context)]
    mine = places[cut.context_rank]
    sequences = _describe(padded, inside, places, cut, device)
    sequences.positions = position[mine].to(device)
    starts = padded.cumsum(0) - padded
    if cut.tree:
        sequences.tree = AttentionTree.build(
            starts, padded, segments.lengths, segments.stems, device
        )
    # For each token of each row: where it lies among this rank's.
    here = torch.full((len(segment),), -1)
    here[mine] = torch.arange(len(mine))
    row, step = (torch.arange(width) < counts[:, None]).nonzero(as_tuple=True)
    its = here[segments.packed_places(starts, row, step)]
    held, asked = its >= 0, (its >= 0) & (step + 1 < counts[row])
    if routes is not None:
        sequences.routes = _routes(
            its[asked], len(mine), routes[rows[row[asked]], step[asked]], cut, device
        )
    return PackedBatch(
        tokens=chosen[mine][None].to(device),
        positions=position[mine][None].to(device),
        sequences=sequences,
        token_index=its[held].to(device),
        token_rows=(row[held] * width + step[held]).to(device),
        target_index=its[asked].to(device),
        targets=tokens[rows[row[asked]], step[asked] + 1].to(device),
        target_rows=(row[asked] * (width - 1) + step[asked]).to(device),
        batch_rows=rows,
        width=width,
    )


@dataclass(frozen=True)
class _Segments:
    """What is laid end to end, M segments: the shared beginnings of some of N rows, and then what
    is left of each row."""

    owners: Tensor
    """int64 [M]: a row that has the segment"""
    first: Tensor
    """int64 [M]: the position in that row at which it begins"""
    lengths: Tensor
    """int64 [M]"""
    stems: Tensor
    """int64 [N]: the segment with which each row begins; -1 where it shares nothing"""

    def packed_places(self, starts: Tensor, row: Tensor, step: Tensor) -> Tensor:
        """Where the tokens at positions `step` [K] of rows `row` [K] lie, int64 [K]; `starts`:
        where segments begin."""
        own = row + len(self.owners) - len(self.stems)
        in_stem = step < self.first[own]
        return starts[torch.where(in_stem, self.stems[row], own)] + torch.where(
            in_stem, step, step - self.first[own]
        )


def _segments(bundled: Sequence[Bundle], rows: Tensor, counts: Tensor) -> _Segments:
    sizes = torch.tensor([len(bundle.rows) for bundle in bundled], dtype=torch.int64)
    shared = torch.tensor([bundle.shared for bundle in bundled], dtype=torch.int64)
    begin = shared > 0
    number = torch.where(begin, begin.cumsum(0) - 1, -1)
    left = shared.repeat_interleave(sizes)
    return _Segments(
        owners=torch.cat([(sizes.cumsum(0) - sizes)[begin], torch.arange(len(rows))]),
        first=torch.cat([torch.zeros_like(shared[begin]), left]),
        lengths=torch.cat([shared[begin], counts - left]),
        stems=number.repeat_interleave(sizes),
    )


def _padded_lengths(counts: Tensor, cut: Cut) -> Tensor:
    """Lengths [N or more] that the cut divides, at least `counts` [N]; what the total lacks goes to
    the shorter sequences.

    That costs attention nothing, whose rows are as wide as the longest; what does not fit becomes a
    last one of padding alone.
    """
    unit = cut.sequence_unit
    padded = -(-counts // unit) * unit
    total = max(-(-int(padded.sum()) // cut.total_unit), 1) * cut.total_unit
    spare = total - int(padded.sum())
    if len(padded):
        taken = (padded.max() - padded).cumsum(0).clamp(max=spare)
        padded = padded + taken.diff(prepend=taken.new_zeros(1))
        spare = total - int(padded.sum())
    return torch.cat([padded, padded.new_tensor([spare])]) if spare else padded


def _context_places(padded: Tensor, context: int, rank: int) -> Tensor:
    """Packed places [T/C] of the tokens that a context rank holds: chunks `rank` and 2C-1-rank of
    each sequence."""
    if context == 1:
        return torch.arange(int(padded.sum()))
    chunk = torch.cat(
        [
            torch.arange(2 * context).repeat_interleave(int(length) // (2 * context))
            for length in padded
        ]
    )
    return ((chunk == rank) | (chunk == 2 * context - 1 - rank)).nonzero()[:, 0]


def _describe(
    padded: Tensor, inside: Tensor, places: list[Tensor], cut: Cut, device: torch.device
) -> PackedSequences:
    cumulative = torch.cat([padded.new_zeros(1), padded.cumsum(0)]).to(torch.int32).to(device)
    (rows, longest), query_width = inside.shape, inside.shape[1] // cut.context
    in_rows = inside.flatten().nonzero()[:, 0]
    key_index = in_rows[torch.cat(places)].to(device)
    query_index, positions = key_index, None
    if cut.context > 1:
        in_query_rows = (
            (torch.arange(query_width) < padded[:, None] // cut.context).flatten().nonzero()[:, 0]
        )
        filled = torch.zeros(rows * query_width, dtype=torch.int64)
        filled[in_query_rows] = in_rows[places[cut.context_rank]] % longest
        query_index, positions = in_query_rows.to(device), filled.view(rows, query_width).to(device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        key_index=key_index,
        key_rows=(rows, longest),
        query_index=query_index,
        query_rows=(rows, query_width),
        query_positions=positions,
        context_group=cut.context_group if cut.context > 1 else None,
    )


def _routes(places: Tensor, count: int, experts: Tensor, cut: Cut, device: torch.device) -> Routes:
    """Of the experts [A, L, K] of tokens at `places` [A] among the context rank's `count`, those of
    this tensor rank's."""
    each = count // cut.sequence
    places = places - cut.sequence_rank * each
    mine = (places >= 0) & (places < each)
    return Routes(places[mine].to(device), experts[mine])


def pack_share(
    tokens: Tensor,
    lengths: Tensor,
    *,
    data_rank: int,
    data_size: int,
    budget: int,
    device: torch.device,
    cut: Cut | None = None,
    multiple: int = 1,
    group: int = 1,
    routes: Tensor | None = None,
) -> list[PackedBatch]:
    """The micro-batches of one data rank: its share of the rows, packed within a token budget
    (padding aside).

    Of every `group` rows in a row all are in one micro-batch, in their order. Every data rank gets
    as many micro-batches, a multiple of `multiple`, since schedules and gradient reductions go in
    step; fillers make up the number.
    """
    cut = cut or Cut()
    ways = [alone(lengths, group)]
    if cut.tree:
        whole = bundles(tokens, lengths, budget, group)
        # Bundles that are large beside a rank's share may be dealt so unevenly that cutting them
        # costs less.
        share, stem = (
            sum(unit.tokens for unit in whole) // data_size,
            max((unit.shared for unit in whole), default=0),
        )
        smaller = (
            [min(budget, part + stem) for part in (share, share // 2)] if data_size > 1 else []
        )
        ways = [whole, *(bundles(tokens, lengths, most, group) for most in smaller)]
    dealt = [
        (units, data_parallel_share([unit.tokens for unit in units], data_size)) for units in ways
    ]
    units, shares = min(
        dealt, key=lambda way: max(sum(way[0][unit].tokens for unit in share) for share in way[1])
    )
    sizes = [unit.tokens for unit in units]
    fewest = max(
        len(token_budget_batches([sizes[unit] for unit in share], budget)) for share in shares
    )
    count = -(-fewest // multiple) * multiple
    mine = [units[unit] for unit in shares[data_rank]]
    batches = token_budget_batches(
        [unit.tokens for unit in mine], budget, count=min(count, len(mine))
    )
    batches += [[] for _ in range(count - len(batches))]
    return [
        pack(tokens, lengths, [mine[unit] for unit in batch], device, cut, routes)
        for batch in batches
    ]


# Sequences are dealt longest first, each to whoever has the fewest tokens (longest-processing-time
# greedy, Graham 1969). Ties go to the lower index, so equal lengths give equal answers on every
# rank.


def token_budget_batches(
    lengths: Sequence[int], budget: int, count: int | None = None
) -> list[list[int]]:
    """Indices of the sequences of each micro-batch: balanced, none empty, none above `budget`
    tokens.

    As few batches as the greedy fits, or exactly `count` of them; a `count` at or above the fewest
    always fits, so ranks agree by taking the largest of their fewest. Raises ValueError for a
    length outside [1, budget], and for a count that the sequences cannot fill or the budget does
    not allow.
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= budget:
            raise ValueError(
                f"sequence {index} has {length} tokens; must have 1 to micro_batch_tokens={budget}"
            )
    if count is not None:
        if not min(1, len(lengths)) <= count <= len(lengths):
            raise ValueError(f"{len(lengths)} sequences cannot fill exactly {count} micro-batches")
        batches = _least_loaded(lengths, count)
        if not _fits(batches, lengths, budget):
            raise ValueError(
                f"micro_batch_tokens={budget}: {len(lengths)} sequences with {sum(lengths)} tokens"
                f" do not fit into {count} micro-batches"
            )
        return batches
    fewest = -(-sum(lengths) // budget)
    # With as many batches as sequences each is alone, which fits.
    return next(
        batches
        for candidate in range(fewest, len(lengths) + 1)
        if _fits(batches := _least_loaded(lengths, candidate), lengths, budget)
    )


def data_parallel_share(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of each rank's sequences: equally many a rank, or one less, in ascending order, with
    balanced token totals.

    Of every `ranks` sequences in order of length, the rank with the fewest tokens takes the
    longest: where the count divides, totals differ by at most the longest minus the shortest
    length. Rank 0 has a sequence if there is one.
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


def _least_loaded(lengths: Sequence[int], count: int) -> list[list[int]]:
    batches: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, batch) for batch in range(count)]
    for index in _longest_first(lengths):
        load, batch = loads[0]
        batches[batch].append(index)
        heapq.heapreplace(loads, (load + lengths[index], batch))
    return [sorted(batch) for batch in batches]


def _fits(batches: list[list[int]], lengths: Sequence[int], budget: int) -> bool:
    return all(sum(lengths[index] for index in batch) <= budget for batch in batches)
