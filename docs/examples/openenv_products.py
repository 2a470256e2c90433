"""An environment server of `openenv-core`: multiplication with a calculator.

uvicorn openenv_products:app --port 8000
"""

import re
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Turn(Action):
    """The text of a turn."""

    text: str


class Reply(Observation):
    """The question, or the calculator's result."""

    text: str = ""


class Products(Environment[Turn, Reply, State]):
    """Asks for a product. `[a*b]` calls the calculator; any other turn is the answer."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, a: int = 2, b: int = 3
    ) -> Reply:
        """Ask for the product of `a` and `b`."""
        self._product = a * b
        return Reply(text=f"{a}*{b}?")

    def step(self, action: Turn, timeout_s: float | None = None, **arguments: Any) -> Reply:
        """Compute a product, or compare the answer."""
        call = re.fullmatch(r"\[(\d{1,4})\*(\d{1,4})\]", action.text.strip())
        if call:
            return Reply(text=str(int(call[1]) * int(call[2])), reward=0.0)
        is_correct = action.text.strip() == str(self._product)
        return Reply(reward=float(is_correct), done=True)

    @property
    def state(self) -> State:
        """The state of the episode, which is not used."""
        return State()


app = create_app(Products, Turn, Reply, env_name="products", max_concurrent_envs=64)
