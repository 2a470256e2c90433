"""Packing into micro-batches keeps each token exactly once, for every split of the tokens."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.megatron.packing import PackedBatch, PackingLayout, pack, pack_micro_batches
from aligner.megatron.shared_prefixes import bundle_without_sharing

CPU = torch.device("cpu")
CUTS = st.builds(
    lambda context, sequence: (context, sequence),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 4, 8]),
)
LENGTHS = st.lists(st.integers(1, 17), min_size=1, max_size=6)


def rows_of(lengths: list[int], first: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded rows, whose tokens are all different, and their lengths."""
    inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    tokens = torch.zeros(inside.shape, dtype=torch.int64)
    tokens[inside] = torch.arange(first, first + int(inside.sum()))
    return tokens, torch.tensor(lengths)


def parts(
    tokens: torch.Tensor, lengths: torch.Tensor, rows: list[int], context: int, sequence: int
) -> list[PackedBatch]:
    """Return the parts of a micro-batch of all context ranks."""
    chosen = [single for single in bundle_without_sharing(lengths) if single.rows[0] in rows]
    return [
        pack(tokens, lengths, chosen, CPU, PackingLayout(sequence, context, context_rank=rank))
        for rank in range(context)
    ]


@settings(deadline=None)
@given(LENGTHS, CUTS)
def test_context_rank_parts_unpack_to_original_rows(lengths, cut):
    tokens, counts = rows_of(lengths)
    ranks = parts(tokens, counts, list(range(len(lengths))), *cut)
    assert torch.equal(sum(part.unpack_tokens(part.tokens[0]) for part in ranks), tokens)
    steps = torch.where(tokens > 0, torch.arange(max(lengths)), 0)
    assert torch.equal(sum(part.unpack_tokens(part.positions[0]) for part in ranks), steps)
    # Each target is the token after the position that predicts it.
    assert torch.equal(sum(part.unpack_targets(part.targets) for part in ranks), tokens[:, 1:])
    asked = sum(part.unpack_targets(part.tokens[0, part.target_index]) for part in ranks)
    assert torch.equal(asked, torch.where(tokens[:, 1:] > 0, tokens[:, :-1], 0))


@settings(deadline=None)
@given(LENGTHS, CUTS)
def test_expert_routing_of_each_token_is_on_one_rank(lengths, cut):
    (tokens, counts), (context, sequence) = rows_of(lengths), cut
    # A token's expert ids are its token id.
    routes = tokens[:, :-1, None, None].expand(-1, -1, 2, 3)
    seen = []
    for context_rank in range(context):
        for rank in range(sequence):
            place = PackingLayout(sequence, context, sequence_rank=rank, context_rank=context_rank)
            part = pack(tokens, counts, bundle_without_sharing(counts), CPU, place, routes)
            mine = part.tokens[0].chunk(sequence)[rank]
            routing = part.sequences.routing_replay
            assert torch.equal(
                routing.experts, mine[routing.token_index, None, None].expand(-1, 2, 3)
            )
            seen += mine[routing.token_index].tolist()
    assert sorted(seen) == sorted(tokens[:, :-1][tokens[:, 1:] > 0].tolist())


@settings(deadline=None)
@given(LENGTHS, CUTS)
def test_packed_parts_are_even_with_bounded_padding(lengths, cut):
    context, sequence = cut
    ranks = parts(*rows_of(lengths), list(range(len(lengths))), context, sequence)
    cumulative = ranks[0].sequences.cu_seqlens_q
    total = int(cumulative[-1])
    assert {part.tokens.shape[1] for part in ranks} == {total // context}
    assert total % (context * sequence) == 0
    if context > 1:
        assert (cumulative.diff() % (2 * context) == 0).all()
    if cut == (1, 1):
        assert cumulative.diff().tolist() == lengths
    assert total - sum(lengths) < len(lengths) * 2 * context + 2 * context * sequence


@settings(deadline=None)
@given(LENGTHS, st.integers(2, 4))
def test_context_rank_holds_mirrored_chunks(lengths, context):
    tokens, counts = rows_of(lengths)
    for rank, part in enumerate(parts(tokens, counts, list(range(len(lengths))), context, 1)):
        held = part.unpack_tokens(part.tokens[0]) > 0
        for row, length in enumerate(lengths):
            size = int(part.sequences.cu_seqlens_q.diff()[row]) // (2 * context)
            chunks = torch.arange(length) // size
            expected = (chunks == rank) | (chunks == 2 * context - 1 - rank)
            assert torch.equal(held[row, :length], expected)


@settings(deadline=None)
@given(CUTS)
def test_filler_batch_contains_only_padding(cut):
    tokens, counts = rows_of([3, 5])
    for part in parts(tokens, counts, [], *cut):
        assert part.is_filler
        assert len(part.token_index) == len(part.target_index) == 0
        assert part.tokens.shape[1] % cut[1] == 0
        assert part.tokens.shape[1] > 0
        assert part.unpack_tokens(part.tokens[0]).numel() == 0


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(17, 40))
def test_data_ranks_have_equal_micro_batch_counts(lengths, ranks, multiple, budget):
    tokens, counts = rows_of(lengths)
    shares = [
        pack_micro_batches(
            tokens,
            counts,
            data_rank=rank,
            data_size=ranks,
            budget=budget,
            device=CPU,
            multiple=multiple,
        )
        for rank in range(ranks)
    ]
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) % multiple == 0
    batches = [batch for share in shares for batch in share]
    assert sorted(row for batch in batches for row in batch.batch_rows.tolist()) == list(
        range(len(lengths))
    )
    assert all(len(batch.token_index) <= budget for batch in batches)


@settings(deadline=None)
@given(LENGTHS, st.integers(2, 4), st.integers(1, 3))
def test_rows_of_a_group_stay_ordered_in_one_micro_batch(lengths, group, ranks):
    tokens, counts = rows_of([length for length in lengths for _ in range(group)])
    budget = group * max(lengths) + 8
    seen = []
    for rank in range(ranks):
        for batch in pack_micro_batches(
            tokens,
            counts,
            data_rank=rank,
            data_size=ranks,
            budget=budget,
            device=CPU,
            group_size=group,
        ):
            units = batch.batch_rows.view(-1, group)
            assert torch.equal(units, units[:, :1] + torch.arange(group))
            assert (units[:, 0] % group == 0).all()
            assert int(counts[batch.batch_rows].sum()) <= budget
            seen += batch.batch_rows.tolist()
    assert sorted(seen) == list(range(len(counts)))
