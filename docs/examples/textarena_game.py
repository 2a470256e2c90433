"""Train a policy on the single-player games of `textarena` 0.7 that need no downloads.

Write the instructions of the game with 64 seeds as prompts, then train:

    python textarena_game.py GuessTheNumber-v0 64 > games.jsonl

    environment.target=textarena_game:TextArenaGame
    +environment.arguments.game=GuessTheNumber-v0
"""

import contextlib
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import textarena


class TextArenaGame:
    """Environment of one game.

    An observation is a user message with the game's messages since the policy's last turn. The
    reward is the result of the game, and applies to the last turn.
    """

    def __init__(self, game: str) -> None:
        """Create the game with this id, such as `GuessTheNumber-v0`."""
        # without the wrappers of the id, which repeat all earlier messages in each observation
        self._game = textarena.make(f"{game}-raw")
        self._random_state = random.getstate()

    async def reset(self, task: dict[str, Any], seed: int) -> list[dict[str, str]]:
        """Start the game with the seed of the record, whose message contains the instructions."""
        self.start(task["game_seed"])
        return []

    async def step(self, action: str) -> tuple[list[dict[str, str]], float, bool]:
        """Make a move, and return the game's answer."""
        with self._own_random_numbers():
            done, _ = self._game.step(action)
        text = self._get_text()
        reward = 0.0
        if done:
            rewards, _ = self._game.close()
            reward = float(rewards[0])
        return [{"role": "user", "content": text}] if text else [], reward, done

    def start(self, seed: int) -> str:
        """Start the game, and return its instructions."""
        with self._own_random_numbers():
            self._game.reset(num_players=1, seed=seed)
        return self._get_text()

    def _get_text(self) -> str:
        """Return the messages of the game since the last call, without the policy's own."""
        _, messages = self._game.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in messages if kind != own)

    @contextlib.contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Use this game's random numbers: games share Python's global generator, but an episode
        must not depend on the other episodes in its process."""
        other_state = random.getstate()
        random.setstate(self._random_state)
        try:
            yield
        finally:
            self._random_state = random.getstate()
            random.setstate(other_state)


def write_games(game: str, count: int) -> None:
    """Print one record per seed."""
    for seed in range(count):
        message = {"role": "user", "content": TextArenaGame(game).start(seed)}
        print(json.dumps({"messages": [message], "game_seed": seed}))


if __name__ == "__main__":
    write_games(sys.argv[1], int(sys.argv[2]))
