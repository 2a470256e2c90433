"""Order and mix of example streams."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.data.prompts import ExampleStream
from aligner.errors import ConfigError


def stream(*sizes: int, weights=None, seed=1, shuffle=True) -> ExampleStream[tuple[int, int]]:
    """Build a stream whose examples are pairs of source number and index in the source."""
    sources = [[(source, index) for index in range(size)] for source, size in enumerate(sizes)]
    return ExampleStream(sources, weights, seed=seed, shuffle=shuffle)


SHARES = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


@settings(deadline=None)
@given(SHARES, st.integers(0, 10**6), st.integers(1, 30), st.data())
def test_examples_depend_only_on_stream_position(weights, start, count, data):
    examples = stream(*range(3, 3 + len(weights)), weights=weights)
    cut = data.draw(st.integers(0, count))
    whole = examples.take(start, count)
    assert len(whole) == count
    assert examples.take(start, cut) + examples.take(start + cut, count - cut) == whole


def test_origin_returns_example_number_and_pass():
    examples = stream(3, 2)
    every = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    origins = [examples.locate(position) for position in range(12)]
    assert [every[number] for number, _ in origins] == examples.take(0, 12)
    seen = Counter[int]()
    for number, in_pass in origins:
        assert in_pass == seen[number]
        seen[number] += 1


@settings(deadline=None, max_examples=30)
@given(SHARES)
def test_stream_prefixes_mix_sources_by_weight(weights):
    taken = Counter[int]()
    for position, (source, _) in enumerate(
        stream(*[7] * len(weights), weights=weights).take(0, 300), start=1
    ):
        taken[source] += 1
        for index, weight in enumerate(weights):
            assert abs(taken[index] - position * weight / sum(weights)) < len(weights)


def test_source_counts_are_exact_for_integer_shares():
    for start in (0, 1000, 10**12):
        taken = Counter(
            source for source, _ in stream(3, 5, 2, weights=[0.7, 0.2, 0.1]).take(start, 1000)
        )
        assert taken == {0: 700, 1: 200, 2: 100}


def test_each_pass_has_all_examples_of_its_source():
    taken = stream(6, 4, weights=[3, 1]).take(0, 48)
    for source, size, weight in ((0, 6, 36), (1, 4, 12)):
        own = [index for name, index in taken if name == source]
        passes = [tuple(own[start : start + size]) for start in range(0, weight, size)]
        assert all(sorted(order) == list(range(size)) for order in passes)
        assert len(set(passes)) > 1


def test_added_source_does_not_change_order_of_others():
    def first(examples: ExampleStream) -> list[tuple[int, int]]:
        return [example for example in examples.take(0, 60) if example[0] == 0][:20]

    assert first(stream(20)) == first(stream(20, 9)) == first(stream(20, 9, 30, weights=[5, 1, 2]))


def test_shuffle_order_depends_on_source_and_seed():
    taken = stream(20, 20).take(0, 40)
    orders = [[index for name, index in taken if name == source] for source in (0, 1)]
    assert orders[0] != orders[1]
    assert taken != stream(20, 20, seed=2).take(0, 40)
    in_order = stream(20, 20, shuffle=False).take(0, 40)
    assert [index for name, index in in_order if name == 0] == list(range(20))


def test_examples_returns_each_example_once():
    assert sorted(stream(2, 3).iterate_examples()) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


@pytest.mark.promise("held-out-rows-are-never-trained")
def test_held_out_rows_are_a_seeded_choice_per_source():
    examples = stream(1000, 500)
    rest, kept = examples.hold_out(100)
    assert Counter(source for source, _ in kept) == {0: 100, 1: 100} and len(rest) == 1300
    assert not set(kept) & set(rest.take(0, 3000)) and len(set(kept)) == 200
    for source, size in ((0, 1000), (1, 500)):
        places = [place for name, place in kept if name == source]
        # The bound is three standard deviations of the mean.
        assert abs(sum(places) / 100 - size / 2) < 0.1 * size
    assert kept == stream(1000, 500).hold_out(100)[1] != stream(1000, 500, seed=2).hold_out(100)[1]
    assert set(examples.hold_out(40)[1]) < set(kept)
    assert kept == [each for each in stream(1000, 500, 700).hold_out(100)[1] if each[0] < 2]
    assert stream(6, shuffle=False).hold_out(2)[1] == [(0, 4), (0, 5)]


def test_stream_length_counts_all_sources_and_none_is_empty():
    assert len(stream(3, 4)) == 7
    for sources in ([], [[]], [[1], []]):
        with pytest.raises(ConfigError, match="every data source must have at least one record"):
            ExampleStream(sources, seed=1, shuffle=True)
