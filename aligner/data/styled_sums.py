"""Sums whose answers have attributes that can be checked: what `experiment=steerlm` is steered by.

A writer is lazy half of the time and answers with the first number, and begins answers with up to
two zeros too many. An answer's attributes are two digits: 1 for a right one, else 0, and how many
zeros too many it has.
"""

import random
from collections.abc import Iterator

from aligner.data import arithmetic

_ZEROS = 3
_PASSES = 3
"""Answers to each sum; people have told the attributes of those of the first pass."""


def labeled() -> Iterator[dict[str, str]]:
    """Answers to the sums of `arithmetic.prompts`, with the attributes that people have told."""
    return _answers(0, 1)


def unlabeled() -> Iterator[dict[str, str]]:
    """Others, of which nobody has told anything; `attributes` are there to measure those that a
    model tells."""
    return _answers(1, _PASSES)


def wished() -> Iterator[dict[str, str]]:
    """The sums, each with the attributes of a right answer, and that answer."""
    draw = random.Random(5)
    return (
        wish(record["prompt"], record["answer"], f"1{draw.randrange(_ZEROS)}")
        for record in arithmetic.prompts()
    )


def held_out() -> Iterator[dict[str, str]]:
    """Held-out sums with every wish."""
    wishes = [f"{right}{zeros}" for right in (0, 1) for zeros in range(_ZEROS)]
    return (
        wish(each["prompt"], each["answer"], attributes)
        for each in arithmetic.held_out()
        for attributes in wishes
    )


def wish(question: str, total: str, attributes: str) -> dict[str, str]:
    """A sum and the attributes that its answer is to have; `answer` is the right one with so many
    zeros."""
    return {
        "question": question,
        "total": total,
        "attributes": attributes,
        "answer": "0" * int(attributes[1]) + total,
    }


def attributes_of(solution: str, total: str) -> str | None:
    """What attributes an answer to a sum has; None for what is no number, or has more zeros."""
    if not (solution.isascii() and solution.isdecimal()):
        return None
    zeros = len(solution) - len(str(int(solution)))
    return None if zeros >= _ZEROS else f"{int(int(solution) == int(total))}{zeros}"


def _answers(first: int, last: int) -> Iterator[dict[str, str]]:
    for number in range(first, last):
        draw = random.Random(number + 3)
        for record in arithmetic.prompts():
            total, is_right, zeros = record["answer"], draw.random() < 0.5, draw.randrange(_ZEROS)
            given = total if is_right else record["prompt"].partition("+")[0]
            solution = "0" * zeros + given
            yield {
                "question": record["prompt"],
                "solution": solution,
                "answer": f"{int(given == total)}{zeros}",
            }
