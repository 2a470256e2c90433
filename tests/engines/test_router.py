"""The router assigns each sample to one replica, keeps prompts together, and balances the load."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from aligner.engines.router import Router


def prompts_of(*sizes: int) -> list[int]:
    """Return the prompt of each sample, for prompts with these numbers of samples."""
    return [prompt for prompt, size in enumerate(sizes) for _ in range(size)]


def test_replicas_get_equal_shares_if_all_samples_fit() -> None:
    router = Router(prompts_of(4, 4, 4), replicas=2, batch_size=8)
    assert router.assign([True, True]) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert not router.waiting


def test_waiting_prompts_go_undivided_to_the_least_loaded_replica() -> None:
    router = Router(prompts_of(*[2] * 8), replicas=2, batch_size=2)
    assert router.assign([True, True]) == [[0, 1], [2, 3]]
    router.complete([2])
    assert router.assign([True, True]) == [[], [4, 5]]
    router.complete([0, 1, 3, 4])
    assert router.assign([True, True]) == [[6, 7], [8, 9]]
    assert [*router.waiting] == [10, 11, 12, 13, 14, 15]


def test_last_samples_are_divided_between_replicas() -> None:
    router = Router(prompts_of(4, 4, 4), replicas=2, batch_size=4)
    assert router.assign([True, True]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    router.complete([0, 1, 4, 5])
    assert router.assign([True, True]) == [[8, 9], [10, 11]]


def test_samples_of_a_lost_replica_are_assigned_next() -> None:
    router = Router(prompts_of(2, 2, 2), replicas=2, batch_size=4)
    router.assign([True, True])
    router.complete([0])
    assert router.withdraw(0) == 2
    assert router.assign([False, True]) == [[], [1]]
    assert router.get_assigned(0) == [0] and router.get_assigned(1) == [3, 4, 5, 1]
    assert [*router.waiting] == [2]


def test_replica_that_comes_back_gets_waiting_samples() -> None:
    router = Router(prompts_of(*[1] * 6), replicas=2, batch_size=1)
    assert router.assign([True, False]) == [[0], []]
    assert router.assign([True, True]) == [[], [1]]


@pytest.mark.promise("samples-do-not-depend-on-replicas")
@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), max_size=12),
    replicas=st.integers(1, 4),
    batch_size=st.none() | st.integers(1, 8),
    draw=st.data(),
)
def test_every_sample_is_completed_by_one_replica(
    sizes: list[int], replicas: int, batch_size: int | None, draw: st.DataObject
) -> None:
    prompts = prompts_of(*sizes)
    router = Router(prompts, replicas, batch_size)
    completed = Counter[int]()
    in_flight: list[set[int]] = [set() for _ in range(replicas)]
    for _ in range(1000):
        if len(completed) == len(prompts):
            break
        is_available = draw.draw(st.lists(st.booleans(), min_size=replicas, max_size=replicas))
        if not any(is_available):
            is_available[0] = True
        for replica, new in enumerate(router.assign(is_available)):
            assert not new or is_available[replica]
            in_flight[replica] |= {*new}
            if batch_size is not None:
                assert len(in_flight[replica]) < batch_size + max(sizes) or not router.waiting
        lost = draw.draw(st.none() | st.integers(0, replicas - 1))
        if lost is not None:
            assert router.withdraw(lost) == len(in_flight[lost])
            in_flight[lost].clear()
        # At least one sample is completed, so that the loop ends.
        for samples in in_flight:
            done = {*sorted(samples)[: 1 + len(samples) // 2]}
            samples -= done
            completed.update(done)
            router.complete(done)
    assert [*completed.values()] == [1] * len(prompts)
    owners = [sample for replica in range(replicas) for sample in router.get_assigned(replica)]
    assert sorted(owners) == [*range(len(prompts))]
