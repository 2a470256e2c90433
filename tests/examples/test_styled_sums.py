"""The data of `experiment=steerlm`."""

from __future__ import annotations

from collections import Counter

import pytest

from aligner_examples import styled_sums


def test_recorded_attributes_match_the_answers() -> None:
    every = [*styled_sums.labeled(), *styled_sums.unlabeled()]
    for record in every:
        one, other = record["question"].removesuffix("=").split("+")
        total, attributes = int(one) + int(other), record["answer"]
        assert (int(record["solution"]) == total) == (attributes[0] == "1")
        assert record["solution"] in (
            f"{'0' * int(attributes[1])}{given}" for given in (total, int(one))
        )
    counts = Counter(record["answer"] for record in every)
    assert (
        set(counts) == {"00", "01", "02", "10", "11", "12"}
        and min(counts.values()) > 0.9 * len(every) / 6
    )
    held_out = {record["question"] for record in styled_sums.held_out()}
    assert held_out.isdisjoint(record["question"] for record in every)


@pytest.mark.parametrize(
    ("solution", "total", "attributes"),
    [
        ("46", "46", "10"),
        ("0046", "46", "12"),
        ("047", "46", "01"),
        ("0", "0", "10"),
        ("00", "0", "11"),
        ("00046", "46", None),
    ],
)
def test_attributes_follow_from_solution_and_total(
    solution: str, total: str, attributes: str | None
) -> None:
    assert styled_sums.attributes_of(solution, total) == attributes
