"""Kinds of questions to a judge, with their templates.

The checks of a configuration use this module, so that it does not import the judge's client.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from aligner.schema.templates import find_required_fields

COMPARISONS = ("pairwise", "ranking")
"""Kinds of questions that compare the samples of a prompt, and so need several samples."""


@dataclass(frozen=True)
class JudgeQuestion:
    """A kind of question to a judge."""

    template: str
    """Default template of the question."""
    required_fields: tuple[str, ...]
    """Fields that every template of this kind must contain."""
    available_fields: tuple[str, ...]
    """Fields that the judge's client fills in; all other fields come from the prompt's record."""


# Beginning of all default templates.
_INTRODUCTION = "A user wrote:\n\n<prompt>\n{prompt}\n</prompt>\n\n"

JUDGE_QUESTIONS: Mapping[str, JudgeQuestion] = {
    "score": JudgeQuestion(
        _INTRODUCTION
        + "The response to it was:\n\n<response>\n{response}\n</response>\n\n"
        + "Judge how good the response is. Give your reasons in a few sentences, and end with a"
        " line `SCORE: N`, where N is a"
        + " number from {lowest}, the worst, to {highest}, the best.",
        ("response",),
        ("prompt", "response", "lowest", "highest"),
    ),
    "yes_no": JudgeQuestion(
        _INTRODUCTION
        + "The response to it was:\n\n<response>\n{response}\n</response>\n\n"
        + "Is that a good response? Answer with one word, Yes or No.",
        ("response",),
        ("prompt", "response"),
    ),
    "pairwise": JudgeQuestion(
        _INTRODUCTION
        + "Two responses to it were:\n\n<response_a>\n{response_a}\n</response_a>\n\n"
        + "<response_b>\n{response_b}\n</response_b>"
        + "\n\nWhich response is better? Give your reasons in a few sentences, and end with a line"
        " `VERDICT: A`, `VERDICT: B`" + " or `VERDICT: tie`.",
        ("response_a", "response_b"),
        ("prompt", "response_a", "response_b"),
    ),
    "ranking": JudgeQuestion(
        _INTRODUCTION
        + "{count} responses to it were:\n\n{responses}\n\n"
        + "Rank all of them. Give your reasons in a few sentences, and end with a line such as"
        " `RANKING: 2 > 1 > 3`, which has" + " the number of each response once, the best first.",
        ("responses",),
        ("prompt", "responses", "count"),
    ),
}
"""Kinds of questions by the value of `reward.judge_asks`."""


def find_record_fields(kind: str, template: str) -> tuple[str, ...]:
    """Return the fields of a template that the prompt's record must have."""
    return tuple(
        field
        for field in find_required_fields(template)
        if field not in JUDGE_QUESTIONS[kind].available_fields
    )


def find_template_problem(kind: str, template: str) -> str | None:
    """Return the problem of a template for a kind of question; None if there is no problem."""
    missing_fields = [
        f"{{{field}}}"
        for field in JUDGE_QUESTIONS[kind].required_fields
        if field not in find_required_fields(template)
    ]
    available_text = ", ".join(f"{{{field}}}" for field in JUDGE_QUESTIONS[kind].available_fields)
    if not missing_fields:
        return None
    return (
        f"must contain {' and '.join(missing_fields)} with judge_asks={kind}; available fields:"
        f" {available_text}, and the fields of the record"
    )


def find_pattern_problem(pattern: str) -> str | None:
    """Return the problem of a regular expression that extracts a score from a judge's answer.

    Returns None if the expression is valid and has a group.
    """
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        return f"invalid regular expression: {error}"
    return None if groups else "must contain a group, in parentheses, that matches the score"
