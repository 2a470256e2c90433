"""What a user writes to have a model act: an environment. What it answers, and what is an
answer."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aligner.errors import AlignerError
from aligner.values import is_finite_number

Observation = str | list[dict[str, str]]
"""A text, or messages that each have a `role` and a `content`, a tool's also a `name` and the
`tool_call_id` it answers."""

_SHOWN_CHARACTERS = 200
_MUST = {"role", "content"}
_MAY = _MUST | {"name", "tool_call_id"}


class EpisodeEnvironment(Protocol):
    """An environment, named by `module:Class`; one object, made with the configuration's keyword
    arguments, is one episode.

    Many live in a process at once, on one asyncio loop: one that waits for something awaits it, and
    none changes what others see. What it answers is to follow from task, seed and actions alone:
    where its process is lost another one is asked the same again, and must answer the same. So it
    draws from a generator of its own, made of the seed. It may have `async def close(self) ->
    None`, which is called when the episode ends, whether that was its last step or not.
    """

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """Begin; `task` is JSON. The first observation, after the prompt; "" or [] where there is
        none."""

    async def step(self, action: str) -> tuple[Observation, float, bool]:
        """What the action leads to: an observation, a finite reward, and whether the episode is
        over."""


class EpisodeLost(AlignerError):
    """An episode that cannot go on: which one, in which call, and what happened."""


class WrongAnswer(AlignerError):
    """An environment's answer is none: what it is, and what is allowed."""


@dataclass(frozen=True)
class Outcome:
    """What an environment answers to one call."""

    observation: Observation
    reward: float = 0.0
    done: bool = False


async def asked_outcome(environment: Any, asked: Sequence[Any], most_characters: int) -> Outcome:
    """What an environment answers to `["reset", task, seed]` or `["step", action]`.

    Raises WrongAnswer, and whatever the environment does.
    """
    name, *arguments = asked
    called = getattr(environment, name)(*arguments)
    if not inspect.isawaitable(called):
        raise WrongAnswer(
            f"{name} returned {_shown(called)} without await; define it as `async def {name}`"
        )
    answer = await called
    if name == "reset":
        return Outcome(_observation(answer, name, most_characters))
    if not isinstance(answer, (tuple, list)) or len(answer) != 3:
        raise WrongAnswer(
            f"step returned {_shown(answer)}; must be a tuple (observation, reward, done)"
        )
    observation, reward, done = answer[0], _plain(answer[1]), _plain(answer[2])
    if not is_finite_number(reward):
        raise WrongAnswer(f"step returned reward={_shown(reward)}; must be a finite number")
    if not isinstance(done, bool):
        raise WrongAnswer(f"step returned done={_shown(done)}; must be True or False")
    return Outcome(_observation(observation, name, most_characters), float(reward), done)


def _observation(value: Any, name: str, most_characters: int) -> Observation:
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
    return type(value) is str and (
        value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
    )


def _plain(value: Any) -> Any:
    """A number of NumPy's or torch's as Python's own."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def _shown(value: Any) -> str:
    text = repr(value)
    return (
        text
        if len(text) <= _SHOWN_CHARACTERS
        else f"{text[:_SHOWN_CHARACTERS]}… ({len(text)} characters)"
    )
