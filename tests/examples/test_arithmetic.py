"""The data of `experiment=arithmetic`."""

from __future__ import annotations

import pytest

from aligner_examples import arithmetic


def evaluate(prompt: str) -> int:
    left, right = prompt.removesuffix("=").split("+")
    return int(left) + int(right)


def has_carry(prompt: str) -> bool:
    left, right = map(int, prompt.removesuffix("=").split("+"))
    return left % 10 + right % 10 > 9 or left // 10 + right // 10 > 9


def test_held_out_sums_are_not_in_the_training_data() -> None:
    training = {record["prompt"] for record in arithmetic.prompts()}
    held_out = {record["prompt"] for record in arithmetic.held_out()}
    assert len(held_out) == 512 and len(training | held_out) == 100 * 100
    demonstrated = {record["prompt"] for record in arithmetic.demonstrations()}
    assert demonstrated == training


def test_answers_and_solutions_are_correct() -> None:
    for record in [*arithmetic.solutions(), *arithmetic.held_out()]:
        assert int(record["answer"]) == evaluate(record["prompt"])
        assert record.get("response", record["answer"]) == record["answer"]


def test_teacher_is_wrong_only_about_sums_with_a_carry() -> None:
    correct = {True: 0, False: 0}
    count = {True: 0, False: 0}
    for record in arithmetic.demonstrations():
        carry = has_carry(record["prompt"])
        count[carry] += 1
        correct[carry] += int(record["response"]) == evaluate(record["prompt"])
    assert correct[False] == count[False]
    assert correct[True] / count[True] == pytest.approx(0.4, abs=0.01)
