"""Records that replace data that is not on this machine in a dry run: additions of two numbers."""

import itertools
from collections.abc import Iterator

UPPER_BOUND = 100
"""Summands are below this number."""


def prompts() -> Iterator[dict[str, str]]:
    """Yield prompts with their answers."""
    for left, right in _iterate_summands():
        yield {"prompt": f"{left}+{right}=", "answer": str(left + right)}


def demonstrations() -> Iterator[dict[str, str]]:
    """Yield prompts with the correct response."""
    for left, right in _iterate_summands():
        yield {"prompt": f"{left}+{right}=", "response": str(left + right)}


def preferences() -> Iterator[dict[str, str | float]]:
    """Yield prompts with a correct response as chosen, a wrong one as rejected, and a margin."""
    for left, right in _iterate_summands():
        yield {
            "prompt": f"{left}+{right}=",
            "chosen": str(left + right),
            "rejected": str(left + right + 1),
            "margin": 1.0,
        }


def labeled_answers() -> Iterator[dict[str, str | bool]]:
    """Yield each prompt twice: with the correct response, and with a wrong one labeled false."""
    for left, right in _iterate_summands():
        for error in (0, 1):
            yield {
                "prompt": f"{left}+{right}=",
                "response": str(left + right + error),
                "label": error == 0,
            }


def _iterate_summands() -> Iterator[tuple[int, int]]:
    """Return all pairs of summands."""
    return itertools.product(range(UPPER_BOUND), range(UPPER_BOUND))
