"""Products of two-digit numbers with a calculator at hand: what a tiny model cannot work out, it
learns to ask for.

The policy is asked `47*83=`. It may answer, or write `[47*83]`, and is told `3901;`. Demonstrations
come from a teacher who mostly guesses, and seldom asks: `experiment=calculator` finds and
strengthens asking.
"""

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

_FIRST, _BELOW = 10, 100
_HELD_OUT = 512
_ASKS = 0.04
_QUESTION = re.compile(r"\[(\d{1,4})\*(\d{1,4})\]")


class Calculator:
    """Answers `[a*b]` with the product and a semicolon, and anything else in brackets with `?;`;
    what is not ends the episode.

    The reward is 1 for the right product at the end, and 0 for any other end.
    """

    async def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Nothing but the prompt."""
        self._answer = str(task["answer"])
        return ""

    async def step(self, action: str) -> tuple[str, float, bool]:
        """What the calculator shows, or the end."""
        if not action.endswith("]"):
            return "", float(action.strip() == self._answer), True
        asked = _QUESTION.fullmatch(action)
        return (f"{int(asked[1]) * int(asked[2])};" if asked else "?;"), 0.0, False


def prompts() -> Iterator[dict[str, str]]:
    """Products to train on, with their answers; none is in `held_out`."""
    return (_record(one, other) for one, other in _products()[_HELD_OUT:])


def held_out() -> Iterator[dict[str, str]]:
    """Products to evaluate on, with their answers."""
    return (_record(one, other) for one, other in _products()[:_HELD_OUT])


def demonstrations() -> Iterator[dict[str, str]]:
    """A teacher's turns: guesses, and few questions, after products of `prompts`; how each question
    goes on once it is begun; and the answers after what the calculator shows.
    """
    draw = random.Random(2)
    for one, other in _products()[_HELD_OUT:]:
        asked, product = f"{one}*{other}=", one * other
        question = f"[{one}*{other}]"
        guess = draw.randrange(_FIRST**2, (_BELOW - 1) ** 2)
        yield {"prompt": asked, "response": question if draw.random() < _ASKS else str(guess)}
        yield {"prompt": f"{asked}[", "response": question[1:]}
        yield {"prompt": f"{asked}{question}{product};", "response": str(product)}


def _products() -> list[tuple[int, int]]:
    """All of them, in an order of no meaning that is always the same."""
    products = [(one, other) for one in range(_FIRST, _BELOW) for other in range(_FIRST, _BELOW)]
    random.Random(1).shuffle(products)
    return products


def _record(one: int, other: int) -> dict[str, str]:
    return {"prompt": f"{one}*{other}=", "answer": str(one * other)}
