"""Interface of an environment, which users implement, and the validation of its answers."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aligner.data.episode_reports import FailureKind
from aligner.errors import AlignerError
from aligner.values import is_finite_number

Observation = str | list[dict[str, str]]
"""A text, or chat messages with the fields `role` and `content`. A tool's message may also have
`name` and `tool_call_id`, the id of the call that it answers."""

# maximum number of characters of a value in an error message
_MAX_SHOWN_CHARACTERS = 200
# required and allowed fields of a message
_REQUIRED_FIELDS = {"role", "content"}
_ALLOWED_FIELDS = _REQUIRED_FIELDS | {"name", "tool_call_id"}


class EpisodeEnvironment(Protocol):
    """Environment of one episode.

    A configuration names the class as `module:Class`. aligner creates one object per episode, with
    the configuration's keyword arguments.

    Many environments share a process and its asyncio loop. An environment must therefore `await`
    every operation that it waits for, and must not change state that other environments use.

    The answers must depend only on task, seed and actions. If the process is lost, aligner replays
    the calls in a new environment, which must return the same answers. Random numbers must come
    from the environment's own generator, which it creates from the seed.

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
            The first observation; "" or [] if there is none.
        """

    async def step(self, action: str) -> tuple[Observation, float, bool]:
        """Execute an action: the text that the policy generated in its last turn.

        Returns:
            The observation, a finite reward, and whether the episode is done.
        """


class EpisodeLost(AlignerError):
    """An episode cannot continue; the message contains its name, the call and the reason."""

    def __init__(self, message: str, kind: FailureKind = FailureKind.INFRASTRUCTURE) -> None:
        super().__init__(message)
        self.kind = kind


class InvalidAnswer(AlignerError):
    """An environment returned an invalid answer; the message says what is allowed."""


@dataclass(frozen=True)
class Outcome:
    """Answer of an environment to one call."""

    observation: Observation
    reward: float = 0.0
    """Finite reward of the step; 0 for a reset."""
    done: bool = False
    """Whether the episode is over."""
    failure: FailureKind | None = None
    """Failure of the environment that has ended the episode; None if the environment answered."""


async def call_environment(
    environment: Any, request: Sequence[Any], max_characters: int
) -> Outcome:
    """Call an environment, and return its validated answer.

    Args:
        environment: The environment.
        request: The call: `["reset", task, seed]` or `["step", action]`.
        max_characters: Maximum number of characters of the observation.

    Raises:
        InvalidAnswer: The answer is invalid.
        Exception: Any exception that the environment raises.
    """
    name, *arguments = request
    result = getattr(environment, name)(*arguments)
    if not inspect.isawaitable(result):
        raise InvalidAnswer(
            f"{name} returned {_format_value(result)} without await; define it as"
            f" `async def {name}`"
        )

    answer = await result
    if name == "reset":
        return Outcome(_validate_observation(answer, name, max_characters))
    if not isinstance(answer, (tuple, list)) or len(answer) != 3:
        raise InvalidAnswer(
            f"step returned {_format_value(answer)}; must be a tuple (observation, reward, done)"
        )

    # Gymnasium and NumPy environments return the reward and the flag as NumPy scalars.
    observation = answer[0]
    reward = _to_python(answer[1])
    done = _to_python(answer[2])
    if not is_finite_number(reward):
        raise InvalidAnswer(
            f"step returned reward={_format_value(reward)}; must be a finite number"
        )
    if not isinstance(done, bool):
        raise InvalidAnswer(f"step returned done={_format_value(done)}; must be True or False")
    return Outcome(_validate_observation(observation, name, max_characters), float(reward), done)


def _validate_observation(value: Any, name: str, max_characters: int) -> Observation:
    """Return a valid observation; `name` is the method that returned it. Raises InvalidAnswer."""
    # A text is checked like the content of a single message.
    messages = value if isinstance(value, list) else [{"role": "", "content": value}]
    for message in messages:
        if (
            not isinstance(message, dict)
            or not _REQUIRED_FIELDS <= {*message} <= _ALLOWED_FIELDS
            or not all(map(_is_encodable, message.values()))
        ):
            raise InvalidAnswer(
                f"{name} returned the observation {_format_value(value)}; must be a string or a"
                " list of messages with exactly `role` and `content` (a tool message may also have"
                " `name` and `tool_call_id`); all values must be strings that can be encoded as"
                " UTF-8"
            )

    characters = sum(len(text) for message in messages for text in message.values())
    if characters > max_characters:
        raise InvalidAnswer(
            f"{name} returned an observation of {characters} characters; must have at most"
            f" {max_characters} characters"
        )
    # Empty messages have no characters, but each of them costs tokens of the chat template.
    if len(messages) > max(max_characters, 1):
        raise InvalidAnswer(
            f"{name} returned {len(messages)} messages; must return at most {max_characters}"
        )
    return value if isinstance(value, str) else [dict(message) for message in messages]


def _is_encodable(value: Any) -> bool:
    """Return whether a value is a string that UTF-8 can encode: one without surrogates."""
    # JSON can transport lone surrogates, but the tokenizer and the sample files need UTF-8.
    return type(value) is str and (
        value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
    )


def _to_python(value: Any) -> Any:
    """Return a NumPy or torch scalar as a Python value, and any other value unchanged."""
    is_scalar = hasattr(value, "item") and getattr(value, "ndim", 1) == 0
    return value.item() if is_scalar else value


def _format_value(value: Any) -> str:
    """Return the representation of a value, with limited length, for an error message."""
    text = repr(value)
    if len(text) <= _MAX_SHOWN_CHARACTERS:
        return text
    return f"{text[:_MAX_SHOWN_CHARACTERS]}… ({len(text)} characters)"
