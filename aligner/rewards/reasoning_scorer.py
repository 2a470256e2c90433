"""The reward of reasoning_gym's tasks: their own verifiers, in a process of their own."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from aligner.child_function import ChildFunction, ChildTooSlow
from aligner.errors import AlignerError

if TYPE_CHECKING:
    from aligner.rewards.scorers import ScoringRequest

_log = logging.getLogger(__name__)

_PROCESSOR_S = 20.0
"""For making a question again, which takes up to a second, and reading the answer."""
_MEMORY_BYTES = 4 << 30


@lru_cache(maxsize=1)
def _child() -> ChildFunction:
    return ChildFunction(
        "aligner.data.reasoning_questions",
        "score",
        processor_s=_PROCESSOR_S,
        memory_bytes=_MEMORY_BYTES,
    )


def reasoning_scores(requests: Sequence["ScoringRequest"]) -> list[float]:
    """What each task's `score_answer` says of the answer; 0, with a warning, for one that takes too
    long to read.

    Raises AlignerError for a prompt that is none of `data.tasks`, and as the task does for any
    answer.
    """
    return [_score(request) for request in requests]


def _score(request: "ScoringRequest") -> float:
    question = request.metadata.get("question")
    if not isinstance(question, dict) or "made_of" not in question:
        raise AlignerError(
            "record lacks field `question`, which the reward function reasoning_gym requires; use"
            " prompts of data.tasks"
        )
    try:
        return _child()(request.response, question)
    except ChildTooSlow as error:
        _log.warning(
            "reasoning_gym: scored 0 for the answer %.80r to %s: the verifier %s",
            request.response,
            question["made_of"],
            error,
        )
        return 0.0
