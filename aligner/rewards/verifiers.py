"""Rules that tell whether a response is right, from what the data says about its prompt."""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from aligner.child_function import ChildFunction, ChildLost
from aligner.errors import AlignerError
from aligner.rewards.final_number import final_number
from aligner.rewards.math_checker import MathChecker

Rule = Callable[[str, Mapping[str, Any]], bool]
"""Whether a response is right, by its prompt's metadata. Raises Unverifiable."""

_PATTERN_S = 2.0
"""Processor time for one response and its pattern."""


class Unverifiable(AlignerError):
    """A prompt's metadata does not say what to compare a response with."""


def exact_match(response: str, metadata: Mapping[str, Any]) -> bool:
    """Whether the response is the `answer`, letter by letter, but for space around either."""
    return response.strip() == record_answer(metadata).strip()


def gsm8k(response: str, metadata: Mapping[str, Any]) -> bool:
    """Return whether a response and the record's `answer`, which may be a whole solution, have the
    same `final_number`."""
    answer = record_answer(metadata)
    expected = final_number(answer)
    if expected is None:
        raise Unverifiable(f"field `answer` is {answer!r}, must contain a number")
    return final_number(response) == expected


def math(response: str, metadata: Mapping[str, Any]) -> bool:
    r"""Return whether the answer of a response and the record's `answer` are equal.

    docs/rewards.md describes the rules. A response that takes too long to compare is wrong. Raises
    Unverifiable if the record's answer is empty or has unclosed braces.
    """
    answer = record_answer(metadata)
    equal = _math_checker().equal(answer, response)
    if equal is None:
        raise Unverifiable(
            f"field `answer` is {answer!r}, must contain an expression or text with closed braces"
        )
    return equal


_math_checker = lru_cache(maxsize=1)(MathChecker)


def format_matches(response: str, metadata: Mapping[str, Any]) -> bool:
    """Return whether the whole response matches the regular expression `format`.

    `.` also matches line breaks; one space before the response need not match.
    """
    pattern = _entry(metadata, "format", str, "a regular expression")
    try:
        re.compile(pattern, re.DOTALL)
        return bool(_pattern_matcher()(pattern, response))
    except re.error as error:
        raise Unverifiable(
            f"field `format` is {pattern!r}, not a valid regular expression: {error}"
        ) from error
    except ChildLost as error:
        raise Unverifiable(f"field `format` is {pattern!r}; the match {error}") from error


def whole_match(pattern: str, response: str) -> bool:
    """Return whether a regular expression matches all of a response, or all but its first space.

    SentencePiece tokenizers write that space between a prompt and a response.
    """
    texts = [response] if not response.startswith(" ") else [response, response[1:]]
    return any(re.fullmatch(pattern, text, re.DOTALL) is not None for text in texts)


@lru_cache(maxsize=1)
def _pattern_matcher() -> ChildFunction:
    """`whole_match` elsewhere: the time that a pattern takes may double with every character, and
    nothing else ends it."""
    return ChildFunction(__name__, "whole_match", processor_s=_PATTERN_S)


def length(response: str, metadata: Mapping[str, Any]) -> bool:
    """Whether the response has at most `max_length` characters, and at least `min_length` where
    that is given."""
    longest = _entry(metadata, "max_length", int, "a number of characters")
    shortest = (
        _entry(metadata, "min_length", int, "a number of characters")
        if "min_length" in metadata
        else 0
    )
    return shortest <= len(response) <= longest


def record_answer(metadata: Mapping[str, Any]) -> str:
    """Return the answer of a record as text. Raises Unverifiable if it has none."""
    return str(_entry(metadata, "answer", (str, int, float), "a string or a number"))


def _entry(
    metadata: Mapping[str, Any], name: str, kinds: type | tuple[type, ...], wanted: str
) -> Any:
    if name not in metadata:
        found = ", ".join(metadata) or "none"
        raise Unverifiable(
            f"record lacks field `{name}` ({wanted}); other fields of the record: {found}"
        )
    value = metadata[name]
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise Unverifiable(f"field `{name}` is {value!r}, must be {wanted}")
    return value
