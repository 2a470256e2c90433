"""Rules that tell whether a response is right, from what the data says about its prompt."""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

from aligner.child_function import ChildFunction, ChildLost
from aligner.errors import AlignerError
from aligner.rewards.math_checker import MathChecker

Rule = Callable[[str, Mapping[str, Any]], bool]
"""Whether a response is right, by its prompt's metadata. Raises Unverifiable."""

# Commas within a number, once those between thousands are gone, end it.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,6}(?!\w))?")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,)(?=\d{3}(?!\d))")

_PATTERN_S = 2.0
"""Processor time for one response and its pattern."""


class Unverifiable(AlignerError):
    """A prompt's metadata does not say what to compare a response with."""


def exact_match(response: str, metadata: Mapping[str, Any]) -> bool:
    """Whether the response is the `answer`, letter by letter, but for space around either."""
    return response.strip() == _answer(metadata).strip()


def gsm8k(response: str, metadata: Mapping[str, Any]) -> bool:
    """Whether `final_number` of the response and of the `answer`, which may be a whole solution,
    are equal."""
    answer = _answer(metadata)
    expected = final_number(answer)
    if expected is None:
        raise Unverifiable(f"field `answer` is {answer!r}, must contain a number")
    return final_number(response) == expected


def final_number(text: str) -> Decimal | None:
    r"""The number that a solution ends with: the first after the last `####`, else in the last
    `\boxed{}`, else the last.

    Thousands separators, `$`, `%`, trailing zeros and powers of ten as in 1e5 make no difference.
    None where there is none.
    """
    if "####" in text:
        numbers = _numbers(text.rpartition("####")[2])
        return numbers[0] if numbers else None
    boxed = _last_boxed(text)
    numbers = _numbers(text if boxed is None else boxed)
    return numbers[-1] if numbers else None


def _numbers(text: str) -> list[Decimal]:
    plain = _THOUSANDS.sub("", text.replace("\\$", "").replace("$", "").replace("\u2212", "-"))
    return [Decimal(number) for number in _NUMBER.findall(plain)]


def _last_boxed(text: str) -> str | None:
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for place, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:place]
    return rest if found else None


def math(response: str, metadata: Mapping[str, Any]) -> bool:
    r"""Whether the response's last mathematical expression and the `answer` are equal, as
    math-verify finds.

    Either is LaTeX, plain, in `$…$` or in `\boxed{}`. A response that takes too long to check is
    not right.
    """
    answer = _answer(metadata)
    equal = _math_checker().equal(answer, response)
    if equal is None:
        raise Unverifiable(
            f"field `answer` is {answer!r}, must contain an expression that math-verify can parse"
        )
    return equal


_math_checker = lru_cache(maxsize=1)(MathChecker)


def format_matches(response: str, metadata: Mapping[str, Any]) -> bool:
    """Whether the whole response matches the regular expression `format`, in which `.` is any
    character, line ends too."""
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
    """Whether a regular expression matches all of a response."""
    return re.fullmatch(pattern, response, re.DOTALL) is not None


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


def _answer(metadata: Mapping[str, Any]) -> str:
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
