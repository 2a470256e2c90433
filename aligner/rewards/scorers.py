"""Scoring functions, which map texts to one number for each response.

The module contains the built-in scorers, the lookup of a scorer by its name, custom scoring
functions in child processes (`UserFunction`), and the calls that check a scorer's results.
"""

import inspect
import itertools
import logging
import math
import operator
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from aligner.child_function import ChildFunction, ChildLost, ChildRaised, ChildTooSlow
from aligner.errors import AlignerError, ConfigError, UnavailableError
from aligner.extras import describe_missing_modules
from aligner.rewards.function_forms import (
    FunctionForm,
    ScoringRequest,
    call_in_form,
    extract_score,
)
from aligner.rewards.math_checker import require_math_verify
from aligner.rewards.verifiers import Rule, Unverifiable, record_question
from aligner.schema.scoring_functions import (
    FUNCTIONS,
    RULES,
    find_function_problem,
    resolve_function_name,
)
from aligner.user_code import import_object
from aligner.values import split_callable_name

Scorer = Callable[[Sequence[ScoringRequest]], Sequence[float | None]]
"""Function that returns one finite score for each request, in order; None if it abstains."""
Steps = list[tuple[int, float]]
"""Steps of a response: for each step the number of characters after which it ends, and its
reward."""
StepScorer = Callable[[Sequence[ScoringRequest]], Sequence[Steps | None]]
"""Function that returns the steps of each request, in order; None if it abstains."""
ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)

# Characters of a prompt and of a response in the error of a timeout, which also contains a stack.
_TIMEOUT_TEXT_CHARACTERS = 150
# Characters of a stack in an error. gRPC limits an error to 1500 bytes.
_STACK_CHARACTERS = 600
# Consecutive timeouts after which a function counts as deadlocked, even if all of them contain the
# same prompt.
_MAX_CONSECUTIVE_TIMEOUTS = 5
# Timeouts of different prompts among recent calls after which a function counts as deadlocked. A
# function that deadlocks after every few calls of a new process has no consecutive timeouts.
_MAX_RECENT_TIMEOUTS = 4
_RECENT_CALLS = 16


class ScoringError(AlignerError):
    """A scorer raised an exception, or did not return one finite number for each request."""


class ScorerUnavailable(ScoringError, UnavailableError):
    """A scorer cannot be reached, regardless of the request."""


class WrongScores(ScoringError):
    """A function returned something that is not a list of scores.

    The message is the end of a sentence that begins with the function's name.
    """


class ScorerTimeout(ScoringError):
    """A call of a custom function timed out. The same call would probably time out again."""


class ScorerDeadlocked(ScoringError):
    """Several calls of a custom function timed out, so all further calls are refused."""


@lru_cache(maxsize=1)
def _sentiment_analyzer() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise ConfigError(
            f"reward.function=sentiment: {describe_missing_modules('sentiment') or error}"
        ) from error
    return SentimentIntensityAnalyzer()


def sentiment(requests: Sequence[ScoringRequest]) -> list[float]:
    """Return VADER's compound sentiment of each prompt with its response, in [-1, 1]."""
    analyzer = _sentiment_analyzer()
    return [
        analyzer.polarity_scores(request.prompt + request.response)["compound"]
        for request in requests
    ]


def digit_fraction(requests: Sequence[ScoringRequest]) -> list[float]:
    """Return the share of each response's characters that are digits 0-9, in [0, 1].

    The share of an empty response is 0.
    """
    return [
        sum(character in "0123456789" for character in request.response)
        / max(len(request.response), 1)
        for request in requests
    ]


def left_to_environment(requests: Sequence[ScoringRequest]) -> list[float]:
    """Return a score of 0 for each response.

    The rewards of the environment are added to each score elsewhere, so they become the score.
    """
    return [0.0] * len(requests)


def _build_rule_scorer(rule: Rule) -> Scorer:
    """Return a scorer that gives 1 to a response that satisfies the rule, and 0 otherwise."""

    def score(request: ScoringRequest) -> float:
        try:
            return float(rule(request.response, request.metadata))
        except Unverifiable as error:
            raise ScoringError(f"{error}; {_describe_first([request])}") from error

    return lambda requests: [score(request) for request in requests]


def call_scoring_function(
    function: Callable[..., Any], requests: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """Call a custom scoring function in its child process.

    Args:
        function: The custom function.
        requests: Fields of each `ScoringRequest`, because requests arrive as JSON.

    Returns:
        `{"scores": …}`, or `{"problem": …}` with the message of WrongScores.
    """
    return _call_and_convert(function, requests, lambda value: score_to_float(extract_score(value)))


def call_step_function(
    function: Callable[..., Any], requests: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """Call a custom function that rewards steps. See `call_scoring_function`."""
    return _call_and_convert(function, requests, _convert_steps)


def _call_and_convert(
    function: Callable[..., Any],
    requests: Sequence[Sequence[Any]],
    convert: Callable[[Any], Any],
) -> dict[str, Any]:
    batch = [ScoringRequest(*request) for request in requests]
    # The child converts the values, because most types of scores, such as tensors, are not JSON.
    try:
        results = resolve_awaitables(call_in_form(function, batch))
        return {"scores": _convert_results(results, batch, convert)}
    except WrongScores as error:
        return {"problem": str(error)}


def resolve_awaitables(result: Any) -> Any:
    """Return the result of a function, awaited if the function is `async`.

    The values of an async generator become a list, and awaitables within a list or tuple are
    awaited concurrently. All calls share one event loop, because connections that a function keeps
    between calls belong to a loop.
    """
    if inspect.isasyncgen(result):
        result = _collect_values(result)
    if inspect.isawaitable(result):
        result = _event_loop().run_until_complete(_await_value(result))
    if isinstance(result, list | tuple) and any(map(inspect.isawaitable, result)):
        result = _event_loop().run_until_complete(_await_values(result))
    return result


async def _collect_values(generator: AsyncIterator[Any]) -> list[Any]:
    return [value async for value in generator]


async def _await_value(awaitable: Any) -> Any:
    return await awaitable


async def _await_values(values: Sequence[Any]) -> list[Any]:
    import asyncio

    async def resolve(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    return list(await asyncio.gather(*map(resolve, values)))


@lru_cache(maxsize=1)
def _event_loop() -> Any:
    import asyncio

    return asyncio.new_event_loop()


class UserFunction:
    """A custom scoring function, called in a child process.

    A call that times out raises ScorerTimeout. If the next call times out too, and the two calls
    have no prompt in common, the function counts as deadlocked: this call and all later calls raise
    ScorerDeadlocked at once, so that a run does not wait for one timeout after the other.
    """

    def __init__(self, location: str, child: ChildFunction, form: FunctionForm) -> None:
        """Wrap a started child process.

        Args:
            location: The function with its configuration key, for error messages, for example
                `reward.function=module:callable`.
            child: The child process of the function.
            form: The form of the function.
        """
        self.location = location
        self.form = form
        self._child = child
        self._recent_timeouts: deque[frozenset[str] | None] = deque(maxlen=_RECENT_CALLS)
        """Prompts of each recent call that timed out; None for a call that returned."""
        self._deadlock: str | None = None
        """Message of ScorerDeadlocked; None if the function is not deadlocked."""

    def __call__(self, requests: Sequence[ScoringRequest]) -> list[Any]:
        """Return the function's scores, or steps, for the requests; None where it abstains.

        Raises:
            ScorerTimeout: The call timed out.
            ScorerDeadlocked: This call or an earlier one established a deadlock.
            WrongScores: The function returned something that is not a list of scores.
            ChildLost: The child process exited.
            ChildRaised: The function raised an exception.
        """
        if self._deadlock is not None:
            raise ScorerDeadlocked(self._deadlock)
        fields = [
            [request.prompt, request.response, dict(request.metadata)] for request in requests
        ]
        try:
            answer = self._child(fields)
        except ChildTooSlow as error:
            raise self._record_timeout(requests, error) from error
        except ChildRaised:
            self._recent_timeouts.append(None)
            raise
        self._recent_timeouts.append(None)
        if "problem" in answer:
            raise WrongScores(answer["problem"])
        return answer["scores"]

    def close(self) -> None:
        """Kill the child process."""
        self._child.close()

    def _is_deadlocked(self) -> bool:
        """Return whether the recent timeouts, of which the last call is one, are a deadlock."""
        newest_first = list(reversed(self._recent_timeouts))
        consecutive = list(itertools.takewhile(lambda prompts: prompts is not None, newest_first))
        timeouts = [prompts for prompts in newest_first if prompts is not None]
        if len(consecutive) >= _MAX_CONSECUTIVE_TIMEOUTS:
            return True
        # A prompt that all timeouts contain may be the cause instead of a deadlock.
        if len(timeouts) >= _MAX_RECENT_TIMEOUTS and not frozenset.intersection(*timeouts):
            return True
        return not frozenset.intersection(*timeouts[: len(consecutive)])

    def _record_timeout(
        self, requests: Sequence[ScoringRequest], error: ChildTooSlow
    ) -> ScoringError:
        """Record the timeout of a call, and return the error to raise."""
        self._recent_timeouts.append(frozenset(request.prompt for request in requests))
        _log.warning("%s %s; its Python stack:\n%s", self.location, error, error.stack or "(none)")
        problem = (
            f"{error} while scoring {len(requests)} requests ({self.location}); the first was"
            f" {_describe_first(requests, _TIMEOUT_TEXT_CHARACTERS)}"
        )
        stack = (
            f"Python stack of the function:\n{_truncate_stack(error.stack)}"
            if error.stack
            else "the process did not write its Python stack"
        )
        if not self._is_deadlocked():
            return ScorerTimeout(f"{problem}; {stack}")
        self._deadlock = (
            f"{problem}. Several calls for different prompts timed out, so the function is probably"
            f" deadlocked. Fix the function, or raise the timeout if it is only slow; {stack}"
        )
        return ScorerDeadlocked(self._deadlock)


def _truncate_stack(stack: str) -> str:
    """Return the first lines of a stack, which are the innermost calls."""
    lines: list[str] = []
    for line in stack.splitlines():
        if sum(map(len, lines)) + len(line) > _STACK_CHARACTERS:
            return "\n".join([*lines, "  ... (all of it is in the log)"])
        lines.append(line)
    return "\n".join(lines)


def _start_user_function(
    module: str,
    name: str,
    key: str,
    timeout_s: float | None,
    python: str | None,
    wrapper: str = "call_scoring_function",
) -> UserFunction:
    """Return a custom function whose child process has started.

    Args:
        module: Module of the function.
        name: Name of the function in the module.
        key: Configuration key that names the function.
        timeout_s: Timeout of a call, in seconds; None means no timeout.
        python: Python interpreter of the child process; None means the one of this process.
        wrapper: Function of this module that calls the custom function in the child.

    Raises:
        ConfigError: The function cannot be imported or called. The message is only the reason.
    """
    child = ChildFunction(
        module,
        name,
        wrapper=f"{__name__}:{wrapper}",
        check="aligner.rewards.function_forms:describe_form",
        deadline_s=timeout_s,
        python=python,
    )
    form = FunctionForm(**child.start())
    return UserFunction(f"{key}={module}:{name}", child, form)


def resolve_scorer(
    name: str,
    key: str = "reward.function",
    timeout_s: float | None = None,
    python: str | None = None,
) -> Scorer:
    """Return the built-in scorer `name`, or the custom scorer `module:callable`.

    Args:
        name: Name of the scorer.
        key: Configuration key that names the scorer, for error messages.
        timeout_s: Timeout of one call of a custom function, in seconds; None means no timeout.
        python: Python interpreter of the process of a custom function; None means the interpreter
            of this process.

    Raises:
        ConfigError: The scorer does not exist, or a package that it requires is not installed.
    """
    location = resolve_function_name(name)
    if location is None:
        raise ConfigError(f"{key}={name}: {find_function_problem(name)}")
    # Missing packages are reported now instead of at the first score.
    if name == "sentiment":
        _sentiment_analyzer()
    if name == "math":
        require_math_verify(key)

    module, attribute = location
    try:
        if name not in FUNCTIONS and name not in RULES:
            return _start_user_function(module, attribute, key, timeout_s, python)
        scorer = import_object(module, attribute)
    except AlignerError as error:
        raise ConfigError(
            f"{key}={name}: {error}; the module must be importable from the working directory or"
            f" PYTHONPATH, and must define a function {attribute!r}. docs/rewards.md describes the"
            " function's parameters"
        ) from error
    return _build_rule_scorer(scorer) if name in RULES else scorer


def resolve_step_scorer(
    name: str, key: str, timeout_s: float | None = None, python: str | None = None
) -> StepScorer:
    """Return the custom function `module:callable`, which rewards steps. See `resolve_scorer`."""
    location = split_callable_name(name)
    if location is None:
        raise ConfigError(f"{key}={name}: step rewards require a function given as module:callable")
    try:
        return _start_user_function(*location, key, timeout_s, python, wrapper="call_step_function")
    except AlignerError as error:
        raise ConfigError(
            f"{key}={name}: {error}; the module must be importable from the working directory or"
            " PYTHONPATH"
        ) from error


def call_scorer(
    name: str, scorer: Scorer, requests: Sequence[ScoringRequest]
) -> list[float | None]:
    """Return the checked scores of a scorer: one finite score for each request.

    Args:
        name: Name of the scorer in the configuration, for error messages.
        scorer: Scorer to call.
        requests: Responses to score.

    Returns:
        The scores, in the order of the requests; None where the scorer abstains.

    Raises:
        ScoringError: The scorer failed or returned wrong scores. See `_call_and_check`.
    """
    scores = _call_and_check(name, scorer, requests, score_to_float)
    require_finite(name, scores, requests, _location_note(scorer))
    return scores


def call_step_scorer(
    name: str, scorer: StepScorer, requests: Sequence[ScoringRequest]
) -> list[Steps | None]:
    """Return the checked steps of a step scorer.

    The rewards are finite, and each step ends within its response. The arguments and exceptions are
    those of `call_scorer`.

    Returns:
        The steps of each request, in order; None where the scorer abstains.
    """
    answers = _call_and_check(name, scorer, requests, _convert_steps)
    for request, steps in zip(requests, answers, strict=True):
        steps = steps or []
        require_finite(
            name, [reward for _, reward in steps], [request] * len(steps), _location_note(scorer)
        )
        for end, _ in steps:
            if not 1 <= end <= len(request.response):
                raise ScoringError(
                    f"the scorer {name} returned a step that ends at character {end}"
                    f" {_describe_first([request])}; must end at 1 to {len(request.response)}, the"
                    f" length of the response{_location_note(scorer)}"
                )
    return answers


def score_to_float(value: Any) -> float:
    """Return a number of any numeric type as a float.

    NumPy scalars and tensors with one element are numbers.

    Raises:
        TypeError: The value is no number; a text that contains a number is none either.
        ValueError: The value cannot be converted.
    """
    if isinstance(value, str | bytes):
        raise TypeError(f"must be a number, got {type(value).__name__}")
    return float(value)


def _convert_steps(steps: Iterable[Sequence[Any]]) -> Steps:
    return [(operator.index(end), score_to_float(reward)) for end, reward in steps]


def _convert_results(
    results: Any, requests: Sequence[ScoringRequest], convert: Callable[[Any], ResultT]
) -> list[ResultT | None]:
    """Return the converted results of a scorer, one for each request.

    Raises:
        WrongScores: The results are no list, have a wrong number, or cannot be converted.
    """
    is_list = isinstance(results, Iterable) and not isinstance(results, str | bytes | Mapping | set)
    # A tensor or array without dimensions is Iterable, but cannot be iterated.
    if not is_list or getattr(results, "ndim", 1) == 0:
        raise WrongScores(
            f"returned {type(results).__name__} for {len(requests)} responses; must return a list"
            " with one score for each response"
        )
    values = list(results)
    if len(values) != len(requests):
        raise WrongScores(
            f"returned {len(values)} scores for {len(requests)} responses; the first was"
            f" {_describe_first(requests)}"
        )
    converted: list[ResultT | None] = []
    for value, request in zip(values, requests, strict=True):
        try:
            converted.append(None if value is None else convert(value))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise WrongScores(
                f"returned {value!r:.80} {_describe_first([request])}; must be a number, or with"
                f" step_rewards a list of (end, reward), or None to abstain: {error}"
            ) from error
    return converted


def _call_and_check(
    name: str,
    scorer: Callable[..., Any],
    requests: Sequence[ScoringRequest],
    convert: Callable[[Any], ResultT],
) -> list[ResultT | None]:
    """Return the converted results of a scorer.

    Raises:
        ScoringError: The scorer failed. The message contains the scorer, and the prompt and
            response that caused the failure. If the scorer raises an exception for several
            requests, this function scores each request separately to find the cause; a ScoringError
            of the scorer already names it.
    """
    location = _location_note(scorer)
    try:
        return _convert_results(scorer(requests), requests, convert)
    except WrongScores as error:
        raise ScoringError(f"the scorer {name} {error}{location}") from error
    except (ScorerTimeout, ScorerDeadlocked) as error:
        raise type(error)(f"the scorer {name} {error}") from error
    except ScoringError as error:
        raise type(error)(f"the scorer {name}: {error}") from error
    except ChildLost as error:
        # The requests are not tried separately: each of them could take as long again.
        raise ScoringError(
            f"the scorer {name} {error} while scoring {len(requests)} requests; the first was"
            f" {_describe_first(requests)}{location}"
        ) from error
    except Exception as error:
        reason = (
            str(error) if isinstance(error, ChildRaised) else f"{type(error).__name__}: {error}"
        )
        problem = f"the scorer {name} raised {reason}"
        if len(requests) > 1:
            for request in requests:
                _call_and_check(name, scorer, [request], convert)
            raise ScoringError(
                f"{problem} on a batch of {len(requests)} requests, but not when each request was"
                f" scored separately{location}"
            ) from error
        raise ScoringError(f"{problem} {_describe_first(requests)}{location}") from error


def _location_note(scorer: Callable[..., Any]) -> str:
    """Return the configuration key of a custom function in parentheses; empty for other scorers."""
    return f" ({scorer.location})" if isinstance(scorer, UserFunction) else ""


def require_finite(
    name: str,
    scores: Sequence[float | None],
    requests: Sequence[ScoringRequest],
    location: str = "",
) -> None:
    """Raise ScoringError if a score is not finite; a score of None is allowed.

    The message contains the scorer, and the prompt and response of the first such score.
    """
    for request, score in zip(requests, scores, strict=True):
        if score is not None and not math.isfinite(score):
            raise ScoringError(
                f"the scorer {name} returned {score} {_describe_first([request])}; must be"
                f" finite{location}"
            )


def _describe_first(requests: Sequence[ScoringRequest], max_characters: int | None = None) -> str:
    """Return the first prompt and response for a message, each truncated to `max_characters`."""
    if not requests:
        return "for no request"
    prompt, response = (
        f"{text[:max_characters]!r}"
        f"{'' if max_characters is None or len(text) <= max_characters else '…'}"
        for text in (requests[0].prompt, requests[0].response)
    )
    return f"for prompt {prompt} and response {response}"


# Processor time of one call: recreating a question, which takes up to a second, and scoring the
# answer.
_REASONING_PROCESSOR_S = 20.0
_REASONING_MEMORY_BYTES = 4 << 30


@lru_cache(maxsize=1)
def _reasoning_verifier() -> ChildFunction:
    return ChildFunction(
        "aligner.data.reasoning_questions",
        "score",
        cpu_limit_s=_REASONING_PROCESSOR_S,
        memory_bytes=_REASONING_MEMORY_BYTES,
    )


def reasoning_scores(requests: Sequence[ScoringRequest]) -> list[float]:
    """Return the scores of reasoning_gym's verifiers, which run in a child process.

    The score is the result of `score_answer` of the question's task. An answer that takes too long
    to verify scores 0, with a warning in the log.

    Raises:
        AlignerError: A prompt is not a question of `data.tasks`, or a task raised an exception.
    """
    return [_score_reasoning(request) for request in requests]


def _score_reasoning(request: ScoringRequest) -> float:
    question = record_question(request.metadata)
    try:
        return _reasoning_verifier()(request.response, question)
    except ChildTooSlow as error:
        _log.warning(
            "reasoning_gym: scored 0 for the answer %.80r to %s: the verifier %s",
            request.response,
            question["made_of"],
            error,
        )
        return 0.0
