"""Environments of Gymnasium for a policy of text: actions are read from what it says, observations
are written."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from aligner.errors import ConfigError
from aligner.user_code import import_object

_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_SHOWN_CHARACTERS = 80


class GymnasiumEnvironment:
    """An environment by its `id`, such as `FrozenLake-v1`, or `module:NAME-v0`, where importing the
    module registers it.

    The last line of a turn is the action: of a Discrete space its number, or one of `actions`,
    which are names in the order of the numbers. Of a Text space all of the turn is. A `parser`,
    `module:callable`, makes an action of a turn for any space, and raises ValueError for one that
    is none. What is no action is told to the policy, with what is allowed, gives
    `bad_action_reward`, and leaves the environment as it was.

    What is said of an observation is what the environment renders as text, made with `render_mode:
    ansi`, else the observation itself, both in the text `wording`. An episode ends where the
    environment ends or truncates it. The environment is seeded with the episode's seed, and reset
    with `options` of the prompt's record, if it has any.
    """

    def __init__(
        self,
        id: str,
        arguments: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        parser: str | None = None,
        bad_action_reward: float = 0.0,
        wording: str = "\n{observation}\n",
    ) -> None:
        """`arguments` are the environment's own. Raises ConfigError for what cannot be made, or
        acted in by text."""
        self._id, self._environment = id, _made(id, arguments or {})
        self._actions, self._bad_action_reward, self._wording = (
            list(actions),
            bad_action_reward,
            wording,
        )
        self._parser = None if parser is None else import_object(*parser.split(":", 1))
        space = self._environment.action_space
        kind = type(space).__name__
        if parser is None and kind not in ("Discrete", "Text"):
            raise ConfigError(
                f"id={id}: the action space is {space}, must be Discrete or Text; for"
                " any other action space, set parser=module:callable"
            )
        self._numbers = (
            range(int(space.start), int(space.start + space.n)) if kind == "Discrete" else None
        )
        if self._actions and (self._numbers is None or len(self._numbers) != len(self._actions)):
            raise ConfigError(
                f"actions={self._actions}: must name each action of {space}, in numerical order"
            )

    async def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """The first observation."""
        observation, _ = self._environment.reset(seed=seed, options=task.get("options"))
        return self._worded(observation)

    async def step(self, action: str) -> tuple[str, float, bool]:
        """What the action leads to, or why it is none."""
        try:
            chosen = self._action(action)
        except ValueError as error:
            return (
                self._wording.replace("{observation}", str(error)),
                self._bad_action_reward,
                False,
            )
        observation, reward, terminated, truncated, _ = self._environment.step(chosen)
        return self._worded(observation), float(reward), bool(terminated or truncated)

    async def close(self) -> None:
        """Close it."""
        self._environment.close()

    def _action(self, text: str) -> Any:
        """The action that a turn is. Raises ValueError with what is allowed."""
        space = self._environment.action_space
        if self._parser is not None:
            action, allowed = self._parser(text), str(space)
        elif self._numbers is None:
            action, allowed = text if space.contains(text) else text.strip(), str(space)
        else:
            action = _number(
                (text.strip().splitlines() or [""])[-1].strip(), self._numbers, self._actions
            )
            allowed = ", ".join(self._actions) or f"{self._numbers[0]} to {self._numbers[-1]}"
        if action is None or not space.contains(action):
            raise ValueError(
                f"{text.strip()[-_SHOWN_CHARACTERS:]!r} is no action; actions are {allowed}"
            )
        return action

    def _worded(self, observation: Any) -> str:
        shown = (
            self._environment.render() if self._environment.render_mode == "ansi" else observation
        )
        return self._wording.replace("{observation}", _COLOURS.sub("", str(shown)).strip("\n"))


def _number(said: str, numbers: range, names: Sequence[str]) -> int | None:
    """The number of an action by its name, or as it is said; None where there is no such action."""
    for number, name in zip(numbers, names, strict=False):
        if said.casefold() == name.casefold():
            return number
    return next((number for number in numbers if said == str(number)), None)


def _made(id: str, arguments: Mapping[str, Any]) -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            f"requires Gymnasium; install it with pip install 'aligner[gymnasium]': {error}"
        ) from error
    try:
        return gymnasium.make(id, **arguments)
    except (gymnasium.error.Error, ImportError) as error:
        near = difflib.get_close_matches(id, gymnasium.registry, n=3)
        raise ConfigError(
            f"id={id}: {error}" + (f"; similar ids: {', '.join(near)}" if near else "")
        ) from error
