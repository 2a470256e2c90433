"""Scoring functions: text in, one number a response out."""

import inspect
import itertools
import logging
import math
import operator
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from aligner.child_function import ChildFunction, ChildLost, ChildRaised, ChildTooSlow
from aligner.errors import AlignerError, ConfigError, UnavailableError
from aligner.extras import lacking
from aligner.rewards.math_checker import require_math_verify
from aligner.rewards.verifiers import Rule, Unverifiable
from aligner.schema.scoring_functions import FUNCTIONS, RULES, function_place, function_problem
from aligner.user_code import imported
from aligner.values import callable_place


@dataclass(frozen=True)
class ScoringRequest:
    """One response to score."""

    prompt: str
    response: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


Scorer = Callable[[Sequence[ScoringRequest]], Sequence[float | None]]
"""One finite score per request, in order; None where the scorer abstains."""
Steps = list[tuple[int, float]]
"""The steps of a response: the number of characters after which each step ends, and its reward."""
StepScorer = Callable[[Sequence[ScoringRequest]], Sequence[Steps | None]]
"""The steps of each request, in order; None where the scorer abstains."""
Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 150
"""Of a prompt and of a response in the error of a timeout, which also contains a stack."""
_SHOWN_STACK = 600
"""Characters of a stack in an error, which gRPC limits to 1500 bytes."""
_CONSECUTIVE_TIMEOUTS = 5
"""Consecutive timeouts after which a function counts as deadlocked, even if one prompt explains
them all."""
_RECENT_TIMEOUTS, _RECENT_CALLS = 4, 16
"""Timeouts of different prompts among so many calls, after which a function counts as deadlocked:
one that deadlocks after every few calls of a new process has no consecutive timeouts."""


class ScoringError(AlignerError):
    """A scorer raised, or returned something that is not one finite number a request."""


class ScorerUnavailable(ScoringError, UnavailableError):
    """A scorer does not answer, whatever it is asked."""


class WrongScores(ScoringError):
    """A function returned something that is not a list of scores. The message is the end of a
    sentence that begins with the function's name."""


class ScorerTimeout(ScoringError):
    """A call of the user's function timed out. The same call would probably time out again."""


class ScorerDeadlocked(ScoringError):
    """Consecutive calls of the user's function timed out, so all further calls are refused."""


@lru_cache(maxsize=1)
def _sentiment_analyzer() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise ConfigError(f"reward.function=sentiment: {lacking('sentiment') or error}") from error
    return SentimentIntensityAnalyzer()


def sentiment(requests: Sequence[ScoringRequest]) -> list[float]:
    """VADER's compound sentiment of prompt and response together, in [-1, 1]."""
    analyzer = _sentiment_analyzer()
    return [
        analyzer.polarity_scores(request.prompt + request.response)["compound"]
        for request in requests
    ]


def digit_fraction(requests: Sequence[ScoringRequest]) -> list[float]:
    """The share of the response's characters that are the digits 0-9, in [0, 1]; 0 for an empty
    response."""
    return [
        sum(character in "0123456789" for character in r.response) / max(len(r.response), 1)
        for r in requests
    ]


def left_to_environment(requests: Sequence[ScoringRequest]) -> list[float]:
    """Nothing for any: what an environment gave for an episode is added to each score."""
    return [0.0] * len(requests)


def _verifier(rule: Rule) -> Scorer:
    """A scorer that gives 1 for a response that a rule finds right, else 0."""

    def score(request: ScoringRequest) -> float:
        try:
            return float(rule(request.response, request.metadata))
        except Unverifiable as error:
            raise ScoringError(f"{error}; {_shown([request])}") from error

    return lambda requests: [score(request) for request in requests]


def scored(function: Callable[..., Any], requests: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Call a scoring function in its child process, for requests given by their fields.

    Returns `scores`, or `problem` with the message of WrongScores.
    """
    return _called(function, requests, read_score)


def stepped(function: Callable[..., Any], requests: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Call a function that rewards steps; otherwise like `scored`."""
    return _called(function, requests, _read_steps)


def _called(
    function: Callable[..., Any],
    requests: Sequence[Sequence[Any]],
    read: Callable[[Any], Any],
) -> dict[str, Any]:
    batch = [ScoringRequest(*request) for request in requests]
    # Values are read here because most types of scores, such as tensors, are not JSON.
    try:
        return {"scores": _read_all(awaited(function(batch)), batch, read)}
    except WrongScores as error:
        return {"problem": str(error)}


def awaited(result: Any) -> Any:
    """Return what an `async` function returns or yields, and await the scores in a list.

    All calls share one event loop, because connections that a function keeps belong to a loop.
    """
    if inspect.isasyncgen(result):
        result = _collected(result)
    if inspect.isawaitable(result):
        result = _event_loop().run_until_complete(_outcome(result))
    if isinstance(result, list | tuple) and any(map(inspect.isawaitable, result)):
        result = _event_loop().run_until_complete(_outcomes(result))
    return result


async def _collected(generator: AsyncIterator[Any]) -> list[Any]:
    return [value async for value in generator]


async def _outcome(awaitable: Any) -> Any:
    return await awaitable


async def _outcomes(values: Sequence[Any]) -> list[Any]:
    import asyncio

    async def value(each: Any) -> Any:
        return await each if inspect.isawaitable(each) else each

    return list(await asyncio.gather(*map(value, values)))


@lru_cache(maxsize=1)
def _event_loop() -> Any:
    import asyncio

    return asyncio.new_event_loop()


class UserFunction:
    """A scoring function of the user, called in a child process.

    A call that times out raises ScorerTimeout. If the next call times out too, and no single
    prompt explains both timeouts, the function counts as deadlocked: this call and all later calls
    raise ScorerDeadlocked at once, so that a run does not wait for one timeout after the other.
    """

    def __init__(self, place: str, child: ChildFunction) -> None:
        """`place` is the function with its configuration key, `reward.function=module:callable`,
        for error messages."""
        self.place = place
        self._child = child
        self._recent: deque[frozenset[str] | None] = deque(maxlen=_RECENT_CALLS)
        """The prompts of each recent call that timed out, None for a call that returned."""
        self._deadlock: str | None = None

    def __call__(self, requests: Sequence[ScoringRequest]) -> list[Any]:
        """Return the function's scores, or steps, for the requests; None where it abstains."""
        if self._deadlock is not None:
            raise ScorerDeadlocked(self._deadlock)
        fields = [[each.prompt, each.response, dict(each.metadata)] for each in requests]
        try:
            answer = self._child(fields)
        except ChildTooSlow as error:
            raise self._timed_out(requests, error) from error
        except ChildRaised:
            self._recent.append(None)
            raise
        self._recent.append(None)
        if "problem" in answer:
            raise WrongScores(answer["problem"])
        return answer["scores"]

    def _is_deadlocked(self) -> bool:
        """Return whether the recent timeouts, of which the last call is one, are a deadlock."""
        backwards = list(reversed(self._recent))
        consecutive = list(itertools.takewhile(lambda prompts: prompts is not None, backwards))
        timeouts = [prompts for prompts in backwards if prompts is not None]
        if len(consecutive) >= _CONSECUTIVE_TIMEOUTS:
            return True
        if len(timeouts) >= _RECENT_TIMEOUTS and not frozenset.intersection(*timeouts):
            return True
        return not frozenset.intersection(*timeouts[: len(consecutive)])

    def _timed_out(self, requests: Sequence[ScoringRequest], error: ChildTooSlow) -> ScoringError:
        self._recent.append(frozenset(each.prompt for each in requests))
        _log.warning("%s %s; its Python stack:\n%s", self.place, error, error.stack or "(none)")
        told = (
            f"{error} while scoring {len(requests)} requests ({self.place}); the first was"
            f" {_shown(requests, _SHOWN_CHARACTERS)}"
        )
        stack = (
            f"Python stack of the function:\n{_beginning(error.stack)}"
            if error.stack
            else "the process did not write its Python stack"
        )
        if not self._is_deadlocked():
            return ScorerTimeout(f"{told}; {stack}")
        self._deadlock = (
            f"{told}. Several calls for different prompts timed out, so the function is probably"
            f" deadlocked. Fix the function, or raise the timeout if it is only slow; {stack}"
        )
        return ScorerDeadlocked(self._deadlock)


def _beginning(stack: str) -> str:
    """Return the first lines of a stack, which are the innermost calls."""
    lines: list[str] = []
    for line in stack.splitlines():
        if sum(map(len, lines)) + len(line) > _SHOWN_STACK:
            return "\n".join([*lines, "  ... (all of it is in the log)"])
        lines.append(line)
    return "\n".join(lines)


def _elsewhere(
    module: str, name: str, key: str, timeout_s: float | None, through: str = "scored"
) -> UserFunction:
    """Start a function of the user in a child process. Raises ConfigError with the reason
    alone."""
    child = ChildFunction(
        module, name, through=f"{__name__}:{through}", takes=1, deadline_s=timeout_s
    )
    child.start()
    return UserFunction(f"{key}={module}:{name}", child)


def resolve_scorer(
    name: str, key: str = "reward.function", timeout_s: float | None = None
) -> Scorer:
    """A built-in scorer by its name, or any other by `module:callable`, which has `timeout_s` for a
    call.

    Raises ConfigError naming `key`, its place in the configuration, when there is no such scorer or
    what it needs is not installed.
    """
    place = function_place(name)
    if place is None:
        raise ConfigError(f"{key}={name}: {function_problem(name)}")
    if name == "sentiment":
        _sentiment_analyzer()
    if name == "math":
        require_math_verify(key)
    module, attribute = place
    try:
        if name not in FUNCTIONS and name not in RULES:
            return _elsewhere(module, attribute, key, timeout_s)
        scorer = imported(module, attribute)
    except AlignerError as error:
        raise ConfigError(
            f"{key}={name}: {error}; the module must be importable from the working directory or"
            f" PYTHONPATH, and must define a function {attribute!r}. The function takes a list of"
            " requests, each with prompt, response and metadata (docs/rewards.md)"
        ) from error
    return _verifier(scorer) if name in RULES else scorer


def resolve_step_scorer(name: str, key: str, timeout_s: float | None = None) -> StepScorer:
    """A function of the user's own, `module:callable`, that rewards steps; otherwise as
    `resolve_scorer`."""
    place = callable_place(name)
    if place is None:
        raise ConfigError(f"{key}={name}: step rewards require a function given as module:callable")
    try:
        return _elsewhere(*place, key, timeout_s, through="stepped")
    except AlignerError as error:
        raise ConfigError(
            f"{key}={name}: {error}; the module must be importable from the working directory or"
            " PYTHONPATH"
        ) from error


def checked_scores(
    name: str, scorer: Scorer, requests: Sequence[ScoringRequest]
) -> list[float | None]:
    """Return one finite score per request, None where the scorer abstains.

    `name` is the scorer's name in the configuration. Raises as `_answers`.
    """
    scores = _answers(name, scorer, requests, read_score)
    require_finite(name, scores, requests, _place(scorer))
    return scores


def checked_steps(
    name: str, scorer: StepScorer, requests: Sequence[ScoringRequest]
) -> list[Steps | None]:
    """Return each request's steps, with finite rewards and ends within the response; None where
    the scorer abstains. Raises as `_answers`."""
    answers = _answers(name, scorer, requests, _read_steps)
    for request, steps in zip(requests, answers, strict=True):
        steps = steps or []
        require_finite(
            name, [reward for _, reward in steps], [request] * len(steps), _place(scorer)
        )
        for end, _ in steps:
            if not 1 <= end <= len(request.response):
                raise ScoringError(
                    f"the scorer {name} returned a step that ends at character {end}"
                    f" {_shown([request])}; must end at 1 to {len(request.response)}, the length of"
                    f" the response{_place(scorer)}"
                )
    return answers


def read_score(value: Any) -> float:
    """Return a number of any type as a float, also of NumPy or a tensor with one element.

    Raises TypeError or ValueError for anything else, texts that contain numbers included.
    """
    if isinstance(value, str | bytes):
        raise TypeError(f"must be a number, got {type(value).__name__}")
    return float(value)


def _read_steps(steps: Iterable[Sequence[Any]]) -> Steps:
    return [(operator.index(end), read_score(reward)) for end, reward in steps]


def _read_all(
    answers: Any, requests: Sequence[ScoringRequest], read: Callable[[Any], Answer]
) -> list[Answer | None]:
    """Read what a scorer returned, one value per request. Raises WrongScores."""
    is_list = isinstance(answers, Iterable) and not isinstance(answers, str | bytes | Mapping | set)
    if not is_list or getattr(answers, "ndim", 1) == 0:
        raise WrongScores(
            f"returned {type(answers).__name__} for {len(requests)} responses; must return a list"
            " with one score for each response"
        )
    values = list(answers)
    if len(values) != len(requests):
        raise WrongScores(
            f"returned {len(values)} scores for {len(requests)} responses; the first was"
            f" {_shown(requests)}"
        )
    found: list[Answer | None] = []
    for value, request in zip(values, requests, strict=True):
        try:
            found.append(None if value is None else read(value))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise WrongScores(
                f"returned {value!r:.80} {_shown([request])}; must be a number, or with"
                f" step_rewards a list of (end, reward), or None to abstain: {error}"
            ) from error
    return found


def _answers(
    name: str,
    scorer: Callable[..., Any],
    requests: Sequence[ScoringRequest],
    read: Callable[[Any], Answer],
) -> list[Answer | None]:
    """Return what a scorer says of each request, as `read` takes it.

    Raises ScoringError with the scorer, and the prompt and response at fault. If the scorer raises
    an exception for several requests, each is scored alone to find the one at fault; a
    ScoringError of the scorer already names it.
    """
    place = _place(scorer)
    try:
        return _read_all(scorer(requests), requests, read)
    except WrongScores as error:
        raise ScoringError(f"the scorer {name} {error}{place}") from error
    except (ScorerTimeout, ScorerDeadlocked) as error:
        raise type(error)(f"the scorer {name} {error}") from error
    except ScoringError as error:
        raise type(error)(f"the scorer {name}: {error}") from error
    except ChildLost as error:  # to find which of them it was would take as long for each
        raise ScoringError(
            f"the scorer {name} {error} while scoring {len(requests)} requests; the first was"
            f" {_shown(requests)}{place}"
        ) from error
    except Exception as error:
        what = str(error) if isinstance(error, ChildRaised) else f"{type(error).__name__}: {error}"
        raised = f"the scorer {name} raised {what}"
        if len(requests) > 1:
            for request in requests:
                _answers(name, scorer, [request], read)
            raise ScoringError(
                f"{raised} on a batch of {len(requests)} requests, but not when each request was"
                f" scored separately{place}"
            ) from error
        raise ScoringError(f"{raised} {_shown(requests)}{place}") from error


def _place(scorer: Callable[..., Any]) -> str:
    """Return where the configuration names the user's function, in brackets; empty for others."""
    return f" ({scorer.place})" if isinstance(scorer, UserFunction) else ""


def require_finite(
    name: str,
    scores: Sequence[float | None],
    requests: Sequence[ScoringRequest],
    place: str = "",
) -> None:
    """Raise ScoringError with the scorer, prompt and response of the first score that is not
    finite."""
    for request, score in zip(requests, scores, strict=True):
        if score is not None and not math.isfinite(score):
            raise ScoringError(
                f"the scorer {name} returned {score} {_shown([request])}; must be finite{place}"
            )


def _shown(requests: Sequence[ScoringRequest], longest: int | None = None) -> str:
    """Return the first prompt and response, each cut to `longest` characters, for a message."""
    if not requests:
        return "for no request"
    prompt, response = (
        f"{text[:longest]!r}{'' if longest is None or len(text) <= longest else '…'}"
        for text in (requests[0].prompt, requests[0].response)
    )
    return f"for prompt {prompt} and response {response}"
