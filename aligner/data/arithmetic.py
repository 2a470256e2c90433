"""Sums of two numbers below 100: a task that a tiny model learns in minutes, and whose answers can
be checked.

Its demonstrations come from a teacher who often forgets to carry, as 7+5=2 or 38+24=52. A model
that imitates the teacher is right where there is nothing to carry, and elsewhere as often as the
teacher: an online algorithm can find and strengthen what is right, which is what
`experiment=arithmetic` shows.
"""

import random
from collections.abc import Iterator

_BELOW = 100
_HELD_OUT = 512
_FORGETS = 0.6
_PASSES = 4
"""Demonstrations of each sum: the teacher is not always wrong about the same ones."""


def prompts() -> Iterator[dict[str, str]]:
    """Sums to train on, with their answers; none is in `held_out`."""
    return (_record(one, other) for one, other in _sums()[_HELD_OUT:])


def solutions() -> Iterator[dict[str, str]]:
    """The sums of `prompts` with their answers as responses, too."""
    return (record | {"response": record["answer"]} for record in prompts())


def held_out() -> Iterator[dict[str, str]]:
    """Sums to evaluate on, with their answers."""
    return (_record(one, other) for one, other in _sums()[:_HELD_OUT])


def demonstrations() -> Iterator[dict[str, str]]:
    """The teacher's answers to the sums of `prompts`."""
    draw = random.Random(2)
    for _ in range(_PASSES):
        for one, other in _sums()[_HELD_OUT:]:
            total = _without_carrying(one, other) if draw.random() < _FORGETS else one + other
            yield {"prompt": f"{one}+{other}=", "response": str(total)}


def preferences() -> Iterator[dict[str, str | float]]:
    """The right answer to each sum of `prompts` that has something to carry, over the one that
    forgets it."""
    for one, other in _sums()[_HELD_OUT:]:
        if one + other != _without_carrying(one, other):
            answers = {"chosen": str(one + other), "rejected": str(_without_carrying(one, other))}
            yield {"prompt": f"{one}+{other}=", **answers, "margin": 1.0}


def labeled_answers() -> Iterator[dict[str, str | bool]]:
    """Both answers of each of the `preferences`, one by one: the right one is desirable."""
    for pair in preferences():
        for answer in ("chosen", "rejected"):
            yield {
                "prompt": str(pair["prompt"]),
                "response": str(pair[answer]),
                "label": answer == "chosen",
            }


def _sums() -> list[tuple[int, int]]:
    """All of them, in an order of no meaning that is always the same."""
    sums = [(one, other) for one in range(_BELOW) for other in range(_BELOW)]
    random.Random(1).shuffle(sums)
    return sums


def _record(one: int, other: int) -> dict[str, str]:
    return {"prompt": f"{one}+{other}=", "answer": str(one + other)}


def _without_carrying(one: int, other: int) -> int:
    """The sum digit by digit, each modulo ten."""
    return (one // 10 + other // 10) % 10 * 10 + (one + other) % 10
