"""Adapter for Gymnasium environments: parses actions from text and renders observations as text."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from aligner.errors import ConfigError
from aligner.user_code import import_object

# ANSI color sequences, which the text rendering of some environments contains
_COLOR_SEQUENCES = re.compile(r"\x1b\[[\d;]*m")
_MAX_SHOWN_CHARACTERS = 80


class GymnasiumEnvironment:
    """Environment with text actions and observations that wraps a Gymnasium environment.

    **Actions.** For a Discrete action space, the last line of a turn is the action: its number, or
    its name from `actions`. For a Text space, the whole turn is the action. For any space, `parser`
    converts a turn to an action, and raises ValueError for an invalid one. After an invalid action,
    the policy reads which actions are allowed, the reward is `bad_action_reward`, and the
    environment keeps its state.

    **Observations.** With `render_mode: ansi` in `arguments`, an observation is the text that the
    environment renders; otherwise it is the observation itself, converted by `str`. `wording` is
    the text around the observation.

    An episode ends when the environment terminates or truncates it. The environment is seeded with
    the episode's seed, and reset with the field `options` of the prompt's record, if it has one.
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
        """Create the environment.

        Args:
            id: Id of the environment, such as `FrozenLake-v1`, or `module:NAME-v0` if an import of
                the module registers it.
            arguments: Keyword arguments of `gymnasium.make`.
            actions: Names of a Discrete space's actions, in the order of their numbers.
            parser: Function, as `module:callable`, that converts the text of a turn to an action.
            bad_action_reward: Reward of a turn that is not a valid action.
            wording: Text of an observation, with the placeholder `{observation}`.

        Raises:
            ConfigError: The environment cannot be created, its action space needs a parser, or
                `actions` does not name each action.
        """
        self._id = id
        self._environment = _make_environment(id, arguments or {})
        self._actions = list(actions)
        self._bad_action_reward = bad_action_reward
        self._wording = wording
        self._parser = None if parser is None else import_object(*parser.split(":", 1))

        space = self._environment.action_space
        kind = type(space).__name__
        if parser is None and kind not in ("Discrete", "Text"):
            raise ConfigError(
                f"id={id}: the action space is {space}, must be Discrete or Text; for"
                " any other action space, set parser=module:callable"
            )
        # Discrete spaces may start at a number other than 0.
        self._numbers = (
            range(int(space.start), int(space.start + space.n)) if kind == "Discrete" else None
        )
        if self._actions and (self._numbers is None or len(self._numbers) != len(self._actions)):
            raise ConfigError(
                f"actions={self._actions}: must name each action of {space}, in numerical order"
            )

    async def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Reset the environment, and return the first observation."""
        observation, _ = self._environment.reset(seed=seed, options=task.get("options"))
        return self._render(observation)

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Execute an action; for an invalid action, return the allowed actions."""
        try:
            parsed_action = self._parse_action(action)
        except ValueError as error:
            message = self._wording.replace("{observation}", str(error))
            return message, self._bad_action_reward, False
        observation, reward, terminated, truncated, _ = self._environment.step(parsed_action)
        return self._render(observation), float(reward), bool(terminated or truncated)

    async def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _parse_action(self, text: str) -> Any:
        """Parse the action of a turn. Raises ValueError, with the allowed actions, if invalid."""
        space = self._environment.action_space
        if self._parser is not None:
            action = self._parser(text)
            allowed = str(space)
        elif self._numbers is None:
            # Models often add whitespace around an action, but it may belong to the action.
            action = text if space.contains(text) else text.strip()
            allowed = str(space)
        else:
            # the model may reason in the lines before the last one
            last_line = (text.strip().splitlines() or [""])[-1].strip()
            action = _find_action_number(last_line, self._numbers, self._actions)
            allowed = ", ".join(self._actions) or f"{self._numbers[0]} to {self._numbers[-1]}"
        if action is None or not space.contains(action):
            raise ValueError(
                f"{text.strip()[-_MAX_SHOWN_CHARACTERS:]!r} is no action; actions are {allowed}"
            )
        return action

    def _render(self, observation: Any) -> str:
        """Return the text of an observation, in `wording`."""
        rendered = (
            self._environment.render() if self._environment.render_mode == "ansi" else observation
        )
        text = _COLOR_SEQUENCES.sub("", str(rendered)).strip("\n")
        # not `str.format`, because the text and the user's wording may contain other braces
        return self._wording.replace("{observation}", text)


def _find_action_number(text: str, numbers: range, names: Sequence[str]) -> int | None:
    """Return the number of the action with this name or number; None if there is none."""
    # Names have priority, because a name may look like the number of another action.
    for number, name in zip(numbers, names, strict=False):
        if text.casefold() == name.casefold():
            return number
    return next((number for number in numbers if text == str(number)), None)


def _make_environment(id: str, arguments: Mapping[str, Any]) -> Any:
    """Create a Gymnasium environment. Raises ConfigError, with similar ids, if that fails."""
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            f"requires Gymnasium; install it with pip install 'aligner[gymnasium]': {error}"
        ) from error
    try:
        return gymnasium.make(id, **arguments)
    except (gymnasium.error.Error, ImportError) as error:
        similar_ids = difflib.get_close_matches(id, gymnasium.registry, n=3)
        suggestion = f"; similar ids: {', '.join(similar_ids)}" if similar_ids else ""
        raise ConfigError(f"id={id}: {error}{suggestion}") from error
