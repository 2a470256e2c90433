"""Data for `experiment=arithmetic`: sums of two numbers below 100.

A tiny model learns the task in minutes, and every answer can be verified. The demonstrations come
from a scripted teacher who often forgets to carry and writes 7+5=2 or 38+24=52. A model trained on
them answers sums without a carry correctly, and the other sums about as often as the teacher. An
online algorithm then reinforces the correct answers.
"""

import random
from collections.abc import Iterator

UPPER_BOUND = 100
HELD_OUT_COUNT = 512
FORGET_PROBABILITY = 0.6
"""Probability with which the scripted teacher forgets to carry in a sum."""
DEMONSTRATION_PASSES = 4
"""Demonstrations per sum; the teacher is wrong about different sums in each pass."""


def prompts() -> Iterator[dict[str, str]]:
    """Yield the training sums with their answers; none of them is in `held_out`."""
    for left, right in _shuffled_sums()[HELD_OUT_COUNT:]:
        yield _record(left, right)


def held_out() -> Iterator[dict[str, str]]:
    """Yield the evaluation sums with their answers."""
    for left, right in _shuffled_sums()[:HELD_OUT_COUNT]:
        yield _record(left, right)


def solutions() -> Iterator[dict[str, str]]:
    """Yield the sums of `prompts` with the correct answer as the response."""
    for record in prompts():
        yield record | {"response": record["answer"]}


def demonstrations() -> Iterator[dict[str, str]]:
    """Yield the teacher's responses to the sums of `prompts`."""
    generator = random.Random(2)
    for _ in range(DEMONSTRATION_PASSES):
        for left, right in _shuffled_sums()[HELD_OUT_COUNT:]:
            if generator.random() < FORGET_PROBABILITY:
                total = _add_without_carry(left, right)
            else:
                total = left + right
            yield {"prompt": f"{left}+{right}=", "response": str(total)}


def _shuffled_sums() -> list[tuple[int, int]]:
    """Return all pairs of summands in a random order that is the same in every process."""
    pairs = [(left, right) for left in range(UPPER_BOUND) for right in range(UPPER_BOUND)]
    random.Random(1).shuffle(pairs)
    return pairs


def _record(left: int, right: int) -> dict[str, str]:
    return {"prompt": f"{left}+{right}=", "answer": str(left + right)}


def _add_without_carry(left: int, right: int) -> int:
    """Add two numbers digit by digit, each digit modulo 10."""
    tens = (left // 10 + right // 10) % 10
    ones = (left + right) % 10
    return tens * 10 + ones
