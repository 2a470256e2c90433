"""Scoring functions: text in, one number a response out."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from aligner.child_function import ChildFunction, ChildLost, ChildRaised
from aligner.errors import AlignerError, ConfigError, UnavailableError
from aligner.extras import lacking
from aligner.rewards.math_checker import require_math_verify
from aligner.rewards.verifiers import Rule, Unverifiable
from aligner.schema.options import callable_place
from aligner.schema.scoring_functions import FUNCTIONS, RULES, function_place, function_problem
from aligner.user_code import imported


@dataclass(frozen=True)
class ScoringRequest:
    """One response to score."""

    prompt: str
    response: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


Scorer = Callable[[Sequence[ScoringRequest]], Sequence[float]]
"""One finite score a request, in order."""
Steps = list[tuple[int, float]]
"""Of a response behind how many of its characters steps end, and their rewards."""
StepScorer = Callable[[Sequence[ScoringRequest]], Sequence[Steps]]
"""The steps of each request, in order."""
Answer = TypeVar("Answer")


class ScoringError(AlignerError):
    """A scorer raised, or returned something that is not one finite number a request."""


class ScorerUnavailable(ScoringError, UnavailableError):
    """A scorer does not answer, whatever it is asked."""


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


def scored(function: Scorer, requests: Sequence[Sequence[Any]]) -> list[float]:
    """What a scoring function says of requests, each given by its fields: how a child process calls
    one."""
    return [float(score) for score in function([ScoringRequest(*request) for request in requests])]


def stepped(function: Callable[..., Any], requests: Sequence[Sequence[Any]]) -> list[Steps]:
    """As `scored`, of a function that rewards the steps of a response."""
    return [
        _read_steps(steps) for steps in function([ScoringRequest(*request) for request in requests])
    ]


def _elsewhere(
    module: str, name: str, timeout_s: float | None, through: str = "scored"
) -> Callable[..., Any]:
    """A scorer of the user's own, in a process of its own. Raises ConfigError with the reason
    alone."""
    child = ChildFunction(
        module, name, through=f"{__name__}:{through}", takes=1, deadline_s=timeout_s
    )
    child.start()
    return lambda requests: child(
        [[each.prompt, each.response, dict(each.metadata)] for each in requests]
    )


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
            return _elsewhere(module, attribute, timeout_s)
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
        return _elsewhere(*place, timeout_s, through="stepped")
    except AlignerError as error:
        raise ConfigError(
            f"{key}={name}: {error}; the module must be importable from the working directory or"
            " PYTHONPATH"
        ) from error


def checked_scores(name: str, scorer: Scorer, requests: Sequence[ScoringRequest]) -> list[float]:
    """The finite scores, one a request, of the scorer that the configuration calls `name`. Raises
    as `_answers`."""
    scores = _answers(name, scorer, requests, float)
    require_finite(name, scores, requests)
    return scores


def checked_steps(name: str, scorer: StepScorer, requests: Sequence[ScoringRequest]) -> list[Steps]:
    """Each request's steps, with finite rewards and ends within the response. Raises as
    `_answers`."""
    answers = _answers(name, scorer, requests, _read_steps)
    for request, steps in zip(requests, answers, strict=True):
        require_finite(name, [reward for _, reward in steps], [request] * len(steps))
        for end, _ in steps:
            if not 1 <= end <= len(request.response):
                raise ScoringError(
                    f"the scorer {name} returned a step that ends at character {end}"
                    f" {_shown([request])}; must end at 1 to {len(request.response)}, the length of"
                    " the response"
                )
    return answers


def _read_steps(steps: Iterable[Sequence[Any]]) -> Steps:
    return [(operator.index(end), float(reward)) for end, reward in steps]


def _answers(
    name: str,
    scorer: Callable[..., Iterable[Any]],
    requests: Sequence[ScoringRequest],
    read: Callable[[Any], Answer],
) -> list[Answer]:
    """What a scorer says of each request, as `read` takes it.

    Raises ScoringError with the scorer, and the prompt and response at fault. When it raises for
    several requests at once, each is scored alone to find the one, but for a ScoringError of its
    own, which says what there is to say.
    """
    try:
        scores = [read(score) for score in scorer(requests)]
    except ScoringError as error:
        raise type(error)(f"the scorer {name}: {error}") from error
    except ChildLost as error:  # to find which of them it was would take as long for each
        raise ScoringError(
            f"the scorer {name} {error} while scoring {len(requests)} requests; the first was"
            f" {_shown(requests)}"
        ) from error
    except Exception as error:
        what = str(error) if isinstance(error, ChildRaised) else f"{type(error).__name__}: {error}"
        raised = f"the scorer {name} raised {what}"
        if len(requests) > 1:
            for request in requests:
                _answers(name, scorer, [request], read)
            raise ScoringError(
                f"{raised} on a batch of {len(requests)} requests, but not when each request was"
                " scored separately"
            ) from error
        raise ScoringError(f"{raised} {_shown(requests)}") from error
    if len(scores) != len(requests):
        raise ScoringError(
            f"the scorer {name} returned {len(scores)} scores for {len(requests)} requests; the"
            f" first was {_shown(requests)}"
        )
    return scores


def require_finite(name: str, scores: Sequence[float], requests: Sequence[ScoringRequest]) -> None:
    """Raise ScoringError with the scorer, prompt and response of the first score that is not
    finite."""
    for request, score in zip(requests, scores, strict=True):
        if not math.isfinite(score):
            raise ScoringError(
                f"the scorer {name} returned {score} {_shown([request])}; must be finite"
            )


def _shown(requests: Sequence[ScoringRequest]) -> str:
    if not requests:
        return "for no request"
    return f"for prompt {requests[0].prompt!r} and response {requests[0].response!r}"
