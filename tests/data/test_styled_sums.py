"""Answers with attributes: what a record says of itself is so, and templates make prompts of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from aligner.data import styled_sums
from aligner.data.records import BadRecord, read_examples
from aligner.schema import DataConfig


def test_what_the_data_says_of_an_answer_is_so() -> None:
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
def test_attributes_are_read_off_an_answer(
    solution: str, total: str, attributes: str | None
) -> None:
    assert styled_sums.attributes_of(solution, total) == attributes


def test_a_field_may_be_a_text_with_others_in_it_and_then_has_no_tokens_of_another(
    tmp_path: Path,
) -> None:
    record = {
        "prompt": "1+1=",
        "prompt_tokens": [3],
        "response": "12",
        "response_tokens": [4, 5],
        "solution": "02",
        "n": 3,
    }
    file = tmp_path / "annotated.jsonl"
    file.write_text(json.dumps(record) + "\n")
    fields = {"prompt": "{response}:{prompt} {n} {}", "response": "solution"}
    ((found,),), _, _ = read_examples(
        DataConfig(path=str(file), fields=fields), lambda record: record
    )
    assert found.values == {"prompt": "12:1+1= 3 {}", "response": "02", "n": 3}
    fields = {"prompt": "{wish}:{prompt}"}
    with pytest.raises(
        BadRecord,
        match=r"annotated\.jsonl:1: needs a `wish` key for `prompt` \(fields\); it has prompt",
    ):
        read_examples(DataConfig(path=str(file), fields=fields), lambda record: record)
