"""Token-budget batches and data-parallel shares of sequences: coverage, limits and balance."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.megatron.packing import split_into_micro_batches, split_over_data_ranks

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


def totals(groups: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[index] for index in group) for group in groups]


@given(LENGTHS, st.integers(50, 200))
def test_every_sequence_is_in_one_batch_within_the_budget(lengths, budget):
    batches = split_into_micro_batches(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(0 < total <= budget for total in totals(batches, lengths))


@given(LENGTHS.filter(bool), st.integers(50, 200), st.data())
def test_requested_batch_count_is_met_within_budget(lengths, budget, data):
    fewest = len(split_into_micro_batches(lengths, budget))
    count = data.draw(st.integers(fewest, len(lengths)))
    batches = split_into_micro_batches(lengths, budget, count=count)
    assert len(batches) == count
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(0 < total <= budget for total in totals(batches, lengths))


@given(LENGTHS, st.integers(50, 200))
def test_batch_totals_differ_by_at_most_longest_sequence(lengths, budget):
    sums = totals(split_into_micro_batches(lengths, budget), lengths)
    assert not sums or max(sums) - min(sums) <= max(lengths)


def test_equal_lengths_use_fewest_possible_batches():
    assert len(split_into_micro_batches([10] * 12, budget=40)) == 3


def test_empty_input_gives_no_batches():
    assert split_into_micro_batches([], budget=8) == []
    assert split_into_micro_batches([], budget=8, count=0) == []


@pytest.mark.parametrize(
    ("lengths", "budget", "count", "message"),
    [
        ([3, 9], 8, None, r"sequence 1 has 9 tokens; must have 1 to micro_batch_tokens=8"),
        ([3, 0], 8, None, r"sequence 1 has 0 tokens"),
        ([3, 3], 8, 3, r"2 sequences cannot fill exactly 3"),
        ([3, 3], 8, 0, r"2 sequences cannot fill exactly 0"),
        (
            [6, 6],
            8,
            1,
            r"micro_batch_tokens=8: 2 sequences with 12 tokens do not fit into 1 micro-batches",
        ),
    ],
)
def test_impossible_batches_are_refused(lengths, budget, count, message):
    with pytest.raises(ValueError, match=message):
        split_into_micro_batches(lengths, budget, count=count)


@settings(deadline=None)
@given(st.integers(1, 6), st.data())
def test_data_parallel_shares_are_balanced(ranks, data):
    per_rank = data.draw(st.integers(0, 8))
    lengths = data.draw(
        st.lists(st.integers(1, 500), min_size=ranks * per_rank, max_size=ranks * per_rank)
    )
    shares = split_over_data_ranks(lengths, ranks)
    assert [len(share) for share in shares] == [per_rank] * ranks
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    sums = totals(shares, lengths)
    assert max(sums) - min(sums) <= (max(lengths) - min(lengths) if lengths else 0)


@settings(deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(1, 500), max_size=20))
def test_uneven_shares_differ_by_at_most_one_sequence(ranks, lengths):
    shares = split_over_data_ranks(lengths, ranks)
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    assert counts[0] == max(counts) or len(lengths) > ranks
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
