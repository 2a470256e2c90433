"""Trial calls of custom scoring functions before a run starts.

A bug in a function would otherwise appear only after the servers have started and samples have been
generated.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from aligner.child_function import ChildRaised, ChildTooSlow
from aligner.errors import ConfigError
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.scorers import (
    ScorerTimeout,
    ScoringError,
    Steps,
    UserFunction,
    call_scorer,
    call_step_scorer,
)

CauseT = TypeVar("CauseT", bound=BaseException)

TRIAL_TIMEOUT_S = 20.0
"""Maximum duration of one trial call in seconds."""
# Fields that may contain a correct response, most preferred first.
_REFERENCE_FIELDS = ("reference", "response", "answer", "ground_truth", "solution")
# Responses like those of an untrained model. A function must return a score for any text.
_PLACEHOLDERS = ("This is a placeholder response.", "1")


def try_function(
    name: str, function: UserFunction, request: ScoringRequest, origin: str, *, has_steps: bool
) -> str:
    """Call a custom scoring function with two responses to a real prompt.

    The first response is the reference answer of the record, if it has one. The second one is a
    placeholder, so that the call also finds functions that cannot parse a wrong response, and
    functions that return one score instead of a list.

    Args:
        name: The function as `module:callable`.
        function: The function, with a timeout of at most `TRIAL_TIMEOUT_S`.
        request: The prompt and its metadata; its response is ignored.
        origin: Origin of the prompt's record, for messages.
        has_steps: Whether the function rewards steps.

    Returns:
        One line with the form of the function, and the scores or the reason why there are none.

    Raises:
        ConfigError: The function raised an exception, exited or returned wrong scores. The message
            contains the traceback of the function.
    """
    metadata = request.metadata
    responses = [*_find_reference_answers(metadata), *_PLACEHOLDERS][: len(_PLACEHOLDERS)]
    requests = [ScoringRequest(request.prompt, response, metadata) for response in responses]
    description = f"reward function {name}: {function.form.description}; trial call on {origin}"
    started_at = time.monotonic()
    try:
        scores: Sequence[Any]
        if has_steps:
            scores = call_step_scorer(name, function, requests)
        else:
            scores = call_scorer(name, function, requests)
    except ScorerTimeout as error:
        # The cause says after which time the function was killed; its stack is in the log.
        return f"{description} {_find_cause(error, ChildTooSlow)}; the run starts anyway"
    except ScoringError as error:
        raised = _find_cause(error, ChildRaised)
        if raised is not None and raised.is_connection_error:
            return (
                f"{description} reached no service: {raised}; the run starts anyway, and requires"
                " the service when the first responses are scored"
            )
        problem = str(error).removesuffix(f" ({function.location})")
        traceback = f"\n{raised.traceback}" if raised else ""
        raise ConfigError(
            f"{function.location}: the trial call on {origin} failed: {problem}. Correct the"
            " function: it must return a score, or None, for each text that a model may"
            f" write{traceback}"
        ) from error

    duration_ms = 1_000 * (time.monotonic() - started_at)
    return f"{description} returned {_format_scores(scores)} in {duration_ms:.1f} ms"


def _find_reference_answers(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield the correct response of a record, if it has one."""
    reward_model = metadata.get("reward_model")
    nested = reward_model if isinstance(reward_model, Mapping) else {}
    for value in (*map(metadata.get, _REFERENCE_FIELDS), nested.get("ground_truth")):
        is_text = isinstance(value, str | int | float) and not isinstance(value, bool)
        if is_text and str(value).strip():
            yield str(value)
            return


def _find_cause(error: BaseException, kind: type[CauseT]) -> CauseT | None:
    """Return the cause of an error that has a type; None if there is none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, kind):
        cause = cause.__cause__
    return cause


def _format_scores(scores: Sequence[float | Steps | None]) -> str:
    """Return the scores of the two responses as text."""
    texts = []
    for score in scores:
        if score is None:
            texts.append("None (abstained)")
        elif isinstance(score, list):
            texts.append(f"{len(score)} step{'s' * (len(score) != 1)}")
        else:
            texts.append(f"{score:g}")
    return " and ".join(texts)
