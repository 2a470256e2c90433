"""What a judge can be asked, and the templates of the questions: known before any of them is
asked."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from aligner.schema.templates import template_fields

COMPARISONS = ("pairwise", "ranking")
"""What compares the samples of a prompt with each other, and so needs several of them."""


@dataclass(frozen=True)
class Asking:
    """A way to ask."""

    template: str
    """The question where the configuration has none."""
    needs: tuple[str, ...]
    """Fields that any template of it must have."""
    offers: tuple[str, ...]
    """Fields that it fills; all others are the record's."""


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
"""By the value of `reward.judge_asks`."""


def record_fields(asks: str, template: str) -> tuple[str, ...]:
    """Those of a template's fields that a prompt's record must have."""
    return tuple(field for field in template_fields(template) if field not in ASKINGS[asks].offers)


def template_problem(asks: str, template: str) -> str | None:
    """What is wrong with a template of this way to ask."""
    lacking = [
        f"{{{field}}}" for field in ASKINGS[asks].needs if field not in template_fields(template)
    ]
    offered = ", ".join(f"{{{field}}}" for field in ASKINGS[asks].offers)
    if not lacking:
        return None
    return (
        f"must contain {' and '.join(lacking)} with judge_asks={asks}; available fields:"
        f" {offered}, and the fields of the record"
    )


def pattern_problem(pattern: str) -> str | None:
    """What is wrong with a regular expression that is to find a score."""
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        return f"invalid regular expression: {error}"
    return None if groups else "must contain a group, in parentheses, that matches the score"
