"""Kinds of questions to a judge, with their templates.

The checks of a configuration use this module, so that it does not import the judge's client.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from aligner.schema.templates import template_fields

COMPARISONS = ("pairwise", "ranking")
"""Kinds of questions that compare the samples of a prompt, and so need several samples."""


@dataclass(frozen=True)
class Asking:
    """A kind of question to a judge."""

    template: str
    """Default template of the question."""
    needs: tuple[str, ...]
    """Fields that every template of this kind must contain."""
    offers: tuple[str, ...]
    """Fields that the judge's client fills in; all other fields come from the prompt's record."""


# Beginning of all default templates.
_SHOWN = "A user wrote:\n\n<prompt>\n{prompt}\n</prompt>\n\n"

ASKINGS: Mapping[str, Asking] = {
    "score": Asking(
        _SHOWN
        + "The response to it was:\n\n<response>\n{response}\n</response>\n\n"
        + "Judge how good the response is. Give your reasons in a few sentences, and end with a"
        " line `SCORE: N`, where N is a"
        + " number from {lowest}, the worst, to {highest}, the best.",
        ("response",),
        ("prompt", "response", "lowest", "highest"),
    ),
    "yes_no": Asking(
        _SHOWN
        + "The response to it was:\n\n<response>\n{response}\n</response>\n\n"
        + "Is that a good response? Answer with one word, Yes or No.",
        ("response",),
        ("prompt", "response"),
    ),
    "pairwise": Asking(
        _SHOWN
        + "Two responses to it were:\n\n<response_a>\n{response_a}\n</response_a>\n\n"
        + "<response_b>\n{response_b}\n</response_b>"
        + "\n\nWhich response is better? Give your reasons in a few sentences, and end with a line"
        " `VERDICT: A`, `VERDICT: B`" + " or `VERDICT: tie`.",
        ("response_a", "response_b"),
        ("prompt", "response_a", "response_b"),
    ),
    "ranking": Asking(
        _SHOWN
        + "{count} responses to it were:\n\n{responses}\n\n"
        + "Rank all of them. Give your reasons in a few sentences, and end with a line such as"
        " `RANKING: 2 > 1 > 3`, which has" + " the number of each response once, the best first.",
        ("responses",),
        ("prompt", "responses", "count"),
    ),
}
"""Kinds of questions by the value of `reward.judge_asks`."""


def record_fields(asks: str, template: str) -> tuple[str, ...]:
    """Return the fields of a template that the prompt's record must have."""
    return tuple(field for field in template_fields(template) if field not in ASKINGS[asks].offers)


def template_problem(asks: str, template: str) -> str | None:
    """Return the problem of a template for a kind of question; None if there is no problem."""
    missing = [
        f"{{{field}}}" for field in ASKINGS[asks].needs if field not in template_fields(template)
    ]
    offered = ", ".join(f"{{{field}}}" for field in ASKINGS[asks].offers)
    if not missing:
        return None
    return (
        f"must contain {' and '.join(missing)} with judge_asks={asks}; available fields:"
        f" {offered}, and the fields of the record"
    )


def pattern_problem(pattern: str) -> str | None:
    """Return the problem of a regular expression that extracts a score from a judge's answer.

    Returns None if the expression is valid and has a group.
    """
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        return f"invalid regular expression: {error}"
    return None if groups else "must contain a group, in parentheses, that matches the score"
