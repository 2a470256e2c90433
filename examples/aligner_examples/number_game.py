"""Environment and data for `experiment=number_game`: guess a number within a few turns.

After each wrong guess the environment says `higher` or `lower`. With N turns, a policy that always
halves the remaining range finds any of 2^N - 1 numbers. The prompt contains an example game, so
that a pretrained base model follows the format.
"""

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

LARGEST_NUMBER = 15
PROMPT_COUNT = 64
_GUESS = re.compile(r"\s*(\d{1,4})\s*")
_EXAMPLE_GAME = (
    "Guess a number from 1 to 15.\nGuess: 9\nlower\nGuess: 4\nhigher\nGuess: 6\ncorrect\n\n"
)


class NumberGame:
    """Environment with a number from 1 to `largest`, which the episode's seed determines.

    A correct guess gives reward 1 and ends the episode.
    """

    def __init__(self, largest: int = LARGEST_NUMBER) -> None:
        self._largest = largest

    async def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Choose the number; the prompt is the only observation."""
        self._number = random.Random(seed).randint(1, self._largest)
        return ""

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Return a hint, the reward, and whether the episode is over."""
        match = _GUESS.fullmatch(action)
        if match is None:
            return f"a number from 1 to {self._largest}\nGuess:", 0.0, False
        guess = int(match[1])
        if guess == self._number:
            return "", 1.0, True
        hint = "higher" if guess < self._number else "lower"
        return f"{hint}\nGuess:", 0.0, False


def prompts() -> Iterator[dict[str, str]]:
    """Yield the same prompt many times; each episode has its own seed and therefore its own
    number."""
    for _ in range(PROMPT_COUNT):
        yield {"prompt": f"{_EXAMPLE_GAME}Guess a number from 1 to {LARGEST_NUMBER}.\nGuess:"}
