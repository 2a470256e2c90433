"""Data for `experiment=steerlm`: answers to sums with attributes that can be verified.

A scripted writer answers half of the sums with the first summand instead of the total, and puts up
to two superfluous zeros before its answers. The attributes of an answer are two digits: 1 if the
answer is correct, else 0; then the number of superfluous zeros.
"""

import random
from collections.abc import Iterator

from aligner_examples import arithmetic

ZERO_COUNTS = 3
"""Number of different counts of superfluous zeros: 0, 1 and 2."""
ANSWER_PASSES = 3
"""Answers per sum. The first pass is labeled with attributes, the others are unlabeled."""


def labeled() -> Iterator[dict[str, str]]:
    """Yield the labeled answers to the sums of `arithmetic.prompts`, with their attributes as
    `answer`."""
    return _answers(range(1))


def unlabeled() -> Iterator[dict[str, str]]:
    """Yield the unlabeled answers. Their true attributes are in `answer` to measure the attribute
    model's predictions."""
    return _answers(range(1, ANSWER_PASSES))


def wished() -> Iterator[dict[str, str]]:
    """Yield each training sum with a request for a correct answer and a random number of zeros."""
    generator = random.Random(5)
    for record in arithmetic.prompts():
        attributes = f"1{generator.randrange(ZERO_COUNTS)}"
        yield wish(record["prompt"], record["answer"], attributes)


def held_out() -> Iterator[dict[str, str]]:
    """Yield each held-out sum once for each combination of requested attributes."""
    combinations = [f"{is_correct}{zeros}" for is_correct in (0, 1) for zeros in range(ZERO_COUNTS)]
    for record in arithmetic.held_out():
        for attributes in combinations:
            yield wish(record["prompt"], record["answer"], attributes)


def wish(question: str, total: str, attributes: str) -> dict[str, str]:
    """Return a sum with the attributes that its answer should have.

    `answer` is the correct total with the requested number of superfluous zeros.
    """
    zeros = "0" * int(attributes[1])
    return {
        "question": question,
        "total": total,
        "attributes": attributes,
        "answer": zeros + total,
    }


def attributes_of(solution: str, total: str) -> str | None:
    """Return the attributes of an answer to a sum; None if it is not a number or has too many
    superfluous zeros."""
    if not (solution.isascii() and solution.isdecimal()):
        return None
    zeros = len(solution) - len(str(int(solution)))
    if zeros >= ZERO_COUNTS:
        return None
    is_correct = int(solution) == int(total)
    return f"{int(is_correct)}{zeros}"


def _answers(passes: range) -> Iterator[dict[str, str]]:
    """Yield the writer's answers to all training sums, once for each pass."""
    for number in passes:
        generator = random.Random(number + 3)
        for record in arithmetic.prompts():
            question = record["prompt"]
            total = record["answer"]
            first_summand = question.partition("+")[0]
            is_diligent = generator.random() < 0.5
            zeros = generator.randrange(ZERO_COUNTS)
            answer = total if is_diligent else first_summand
            yield {
                "question": question,
                "solution": "0" * zeros + answer,
                "answer": f"{int(answer == total)}{zeros}",
            }
