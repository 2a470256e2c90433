"""Interface of an environment, which users implement, and the validation of its answers."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aligner.errors import AlignerError
from aligner.values import is_finite_number

Observation = str | list[dict[str, str]]
"""A text, or chat messages with the fields `role` and `content`. A tool's message may also have
`name` and `tool_call_id`, the id of the call that it answers."""

# maximum number of characters of a value in an error message
_SHOWN_CHARACTERS = 200
# required and allowed fields of a message
_MUST = {"role", "content"}
_MAY = _MUST | {"name", "tool_call_id"}


class EpisodeEnvironment(Protocol):
    """Environment of one episode.

    A configuration names the class as `module:Class`. aligner creates one object per episode, with
    the configuration's keyword arguments.

    Many environments share a process and its asyncio loop. An environment must therefore `await`
    whatever it waits for, and must not change state that other environments see.

    The answers must depend only on task, seed and actions. If the process is lost, aligner replays
    the calls in a new environment, which must return the same answers. Random numbers must come
    from a generator of the environment's own, which it creates from the seed.

    An environment may define `async def close(self) -> None`, which is called at the end of the
    episode, whether its last step returned `done` or not.

    Example:
        >>> class GuessNumber:
        ...     async def reset(self, task, seed):
        ...         self.number = random.Random(seed).randint(1, 10)
        ...         return "Guess a number from 1 to 10."
        ...
        ...     async def step(self, action):
        ...         is_correct = action.strip() == str(self.number)
        ...         return "", float(is_correct), True
    """

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """Start the episode, and return the observation that follows the prompt.

        Args:
            task: Metadata and text of the prompt, as JSON values.
            seed: Seed of the environment's random choices.

        Returns:
            The first observation; "" or [] for none.
        """

    async def step(self, action: str) -> tuple[Observation, float, bool]:
        """Execute an action: the text that the policy generated in its last turn.

        Returns:
            The observation, a finite reward, and whether the episode is done.
        """


class EpisodeLost(AlignerError):
    """An episode cannot continue; the message contains its name, the call and the reason."""


class WrongAnswer(AlignerError):
    """An environment returned an invalid answer; the message says what is allowed."""


@dataclass(frozen=True)
class Outcome:
    """Answer of an environment to one call."""

    observation: Observation
    reward: float = 0.0
    """Finite reward of the step; 0 for a reset."""
    done: bool = False
    """Whether the episode is over."""


async def asked_outcome(environment: Any, asked: Sequence[Any], most_characters: int) -> Outcome:
    """Call an environment, and return its validated answer.

    Args:
        environment: The environment.
        asked: The call: `["reset", task, seed]` or `["step", action]`.
        most_characters: Maximum number of characters of the observation.

    Raises:
        WrongAnswer: The answer is invalid.
        Exception: Any exception that the environment raises.
    """
    name, *arguments = asked
    result = getattr(environment, name)(*arguments)
    if not inspect.isawaitable(result):
        raise WrongAnswer(
            f"{name} returned {_shown(result)} without await; define it as `async def {name}`"
        )

    answer = await result
    if name == "reset":
        return Outcome(_observation(answer, name, most_characters))
    if not isinstance(answer, (tuple, list)) or len(answer) != 3:
        raise WrongAnswer(
            f"step returned {_shown(answer)}; must be a tuple (observation, reward, done)"
        )

    observation = answer[0]
    reward = _plain(answer[1])
    done = _plain(answer[2])
    if not is_finite_number(reward):
        raise WrongAnswer(f"step returned reward={_shown(reward)}; must be a finite number")
    if not isinstance(done, bool):
        raise WrongAnswer(f"step returned done={_shown(done)}; must be True or False")
    return Outcome(_observation(observation, name, most_characters), float(reward), done)


def _observation(value: Any, name: str, most_characters: int) -> Observation:
    """Return a valid observation; `name` is the method that returned it. Raises WrongAnswer."""
    messages = value if isinstance(value, list) else [{"role": "", "content": value}]
    for message in messages:
        if (
            not isinstance(message, dict)
            or not _MUST <= {*message} <= _MAY
            or not all(map(_is_text, message.values()))
        ):
            raise WrongAnswer(
                f"{name} returned the observation {_shown(value)}; must be a string or a list of"
                " messages with exactly `role` and `content` (a tool message may also have `name`"
                " and `tool_call_id`); all values must be strings that can be encoded as UTF-8"
            )
    if (
        characters := sum(len(text) for message in messages for text in message.values())
    ) > most_characters:
        raise WrongAnswer(
            f"{name} returned an observation of {characters} characters; must have at most"
            f" {most_characters} characters"
        )
    if len(messages) > max(most_characters, 1):
        raise WrongAnswer(
            f"{name} returned {len(messages)} messages; must return at most {most_characters}"
        )
    return value if isinstance(value, str) else [dict(message) for message in messages]


def _is_text(value: Any) -> bool:
    """Return whether a value is a string that UTF-8 can encode: one without surrogates."""
    return type(value) is str and (
        value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
    )


def _plain(value: Any) -> Any:
    """Return a NumPy or torch scalar as a Python value, and any other value unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def _shown(value: Any) -> str:
    """Return the representation of a value, with limited length, for an error message."""
    text = repr(value)
    return (
        text
        if len(text) <= _SHOWN_CHARACTERS
        else f"{text[:_SHOWN_CHARACTERS]}… ({len(text)} characters)"
    )
