"""A number to guess: the policy guesses, and is told `higher` or `lower` until it has it, or has
had its turns.

The prompt shows a game, so that a model that has never been asked plays along. With N turns a
policy that halves what is left finds any of 2^N - 1 numbers.
"""

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

_LARGEST, _PROMPTS = 15, 64
_GUESS = re.compile(r"\s*(\d{1,4})\s*")


class NumberGame:
    """A number from 1 to `largest`, drawn from the seed. Finding it gives 1 and ends the game."""

    def __init__(self, largest: int = _LARGEST) -> None:
        self._largest = largest

    async def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Nothing but the prompt."""
        self._number = random.Random(seed).randint(1, self._largest)
        return ""

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Where the number lies from the guess, what a guess is, or the end."""
        guess = _GUESS.fullmatch(action)
        if guess is None:
            return f"a number from 1 to {self._largest}\nGuess:", 0.0, False
        if (guessed := int(guess[1])) == self._number:
            return "", 1.0, True
        return ("higher" if guessed < self._number else "lower") + "\nGuess:", 0.0, False


def prompts() -> Iterator[dict[str, str]]:
    """The same prompt many times; each episode has a seed, and so a number, of its own."""
    shown = "Guess a number from 1 to 15.\nGuess: 9\nlower\nGuess: 4\nhigher\nGuess: 6\ncorrect\n\n"
    for _ in range(_PROMPTS):
        yield {"prompt": f"{shown}Guess a number from 1 to {_LARGEST}.\nGuess:"}
