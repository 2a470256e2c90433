"""Records of a dry run in place of data that is not on this machine: sums of two numbers."""

import itertools
from collections.abc import Iterator

UPPER_BOUND = 100


def prompts() -> Iterator[dict[str, str]]:
    """Yield prompts with their answers."""
    for left, right in _summands():
        yield {"prompt": f"{left}+{right}=", "answer": str(left + right)}


def demonstrations() -> Iterator[dict[str, str]]:
    """Yield prompts with a response."""
    for left, right in _summands():
        yield {"prompt": f"{left}+{right}=", "response": str(left + right)}


def preferences() -> Iterator[dict[str, str | float]]:
    """Yield prompts with a chosen and a rejected response and their margin."""
    for left, right in _summands():
        yield {
            "prompt": f"{left}+{right}=",
            "chosen": str(left + right),
            "rejected": str(left + right + 1),
            "margin": 1.0,
        }


def labeled_answers() -> Iterator[dict[str, str | bool]]:
    """Yield prompts with a response and whether it is desirable."""
    for left, right in _summands():
        for error in (0, 1):
            yield {
                "prompt": f"{left}+{right}=",
                "response": str(left + right + error),
                "label": error == 0,
            }


def _summands() -> Iterator[tuple[int, int]]:
    return itertools.product(range(UPPER_BOUND), range(UPPER_BOUND))
