"""Environment and data for `experiment=calculator`: products of two-digit numbers with a
calculator.

The prompt is `47*83=`. The policy either answers or calls the calculator with `[47*83]`, which
returns `3901;`. A tiny model cannot compute these products, but it learns to call the calculator.
The demonstrations come from a scripted teacher who mostly guesses and rarely calls the calculator;
`experiment=calculator` reinforces the calls.
"""

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

LOWER_BOUND = 10
UPPER_BOUND = 100
HELD_OUT_COUNT = 512
CALL_PROBABILITY = 0.04
"""Probability with which the scripted teacher calls the calculator instead of guessing."""
_CALL = re.compile(r"\[(\d{1,4})\*(\d{1,4})\]")


class Calculator:
    """Environment that answers `[a*b]` with the product, and any other turn in brackets with `?`.

    A turn that does not end with a bracket ends the episode. Its reward is 1 if it is the correct
    product, else 0.
    """

    async def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Start an episode; the prompt is the only observation."""
        self._answer = str(task["answer"])
        return ""

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Return the calculator's output, the reward, and whether the episode is over."""
        if not action.endswith("]"):
            is_correct = action.strip() == self._answer
            return "", float(is_correct), True
        call = _CALL.fullmatch(action)
        if call is None:
            return "?;", 0.0, False
        product = int(call[1]) * int(call[2])
        return f"{product};", 0.0, False


def prompts() -> Iterator[dict[str, str]]:
    """Yield the training products with their answers; none of them is in `held_out`."""
    for left, right in _shuffled_products()[HELD_OUT_COUNT:]:
        yield _record(left, right)


def held_out() -> Iterator[dict[str, str]]:
    """Yield the evaluation products with their answers."""
    for left, right in _shuffled_products()[:HELD_OUT_COUNT]:
        yield _record(left, right)


def demonstrations() -> Iterator[dict[str, str]]:
    """Yield three demonstrations per product of `prompts`: the teacher's first turn, the rest of a
    calculator call after its opening bracket, and the answer after the calculator's output."""
    generator = random.Random(2)
    for left, right in _shuffled_products()[HELD_OUT_COUNT:]:
        prompt = f"{left}*{right}="
        product = left * right
        call = f"[{left}*{right}]"
        guess = generator.randrange(LOWER_BOUND**2, (UPPER_BOUND - 1) ** 2)
        first_turn = call if generator.random() < CALL_PROBABILITY else str(guess)

        yield {"prompt": prompt, "response": first_turn}
        yield {"prompt": f"{prompt}[", "response": call[1:]}
        yield {"prompt": f"{prompt}{call}{product};", "response": str(product)}


def _shuffled_products() -> list[tuple[int, int]]:
    """Return all pairs of factors in a random order that is the same in every process."""
    factors = range(LOWER_BOUND, UPPER_BOUND)
    pairs = [(left, right) for left in factors for right in factors]
    random.Random(1).shuffle(pairs)
    return pairs


def _record(left: int, right: int) -> dict[str, str]:
    return {"prompt": f"{left}*{right}=", "answer": str(left * right)}
