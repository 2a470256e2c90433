"""Rules that tell whether a response is right, from what the data says about its prompt."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from aligner.child_function import ChildFunction, ChildLost
from aligner.errors import AlignerError, ConfigError
from aligner.rewards.answer_forms import exact_number, parse_choice, parse_clock, parse_words
from aligner.rewards.answer_text import is_comparable, normalized
from aligner.rewards.final_answers import final_number, gold_answer
from aligner.rewards.math_comparison import MathChecker

CHECKED_VERIFIERS = ("gsm8k", "math")
"""Verifiers whose answers are parsed."""
_LISTED = 5
_LONGEST_TEXT = 80
# math-verify takes about 5 ms for an answer; a launch should not take minutes.
_MOST_PARSED = 10_000


def check_answers(
    verifier: str, key: str, records: Iterable[tuple[str, Mapping[str, Any]]]
) -> list[str]:
    """Check the answers of records, given as pairs of their origin and their fields.

    Returns:
        A notice if `math` can compare some answers only as text.

    Raises:
        ConfigError: The answer of a record is missing, or has nothing to compare. The error lists
            the first records.
    """
    records = list(records)
    missing = [(origin, problem) for origin, problem in _problems(verifier, records) if problem]
    if missing:
        raise ConfigError(
            f"{key}: {len(missing)} of {len(records)} records have an answer that no response can"
            f" be compared with. Correct or remove these records:\n{_listed(missing)}"
        )
    if verifier != "math":
        return []

    as_text = _compared_as_text(records)
    if not as_text:
        return []
    return [
        f"{key}: the answers of {len(as_text)} of {len(records)} records cannot be parsed;"
        f" responses must have the same text:\n{_listed(as_text)}"
    ]


def _problems(
    verifier: str, records: Sequence[tuple[str, Mapping[str, Any]]]
) -> Iterable[tuple[str, str]]:
    for origin, metadata in records:
        problem = ""
        try:
            if verifier == "gsm8k":
                gsm8k("", metadata)
            elif not is_comparable(normalized(gold_answer(answer := record_answer(metadata)))):
                problem = f"field `answer` is {_shortened(answer)}, empty or with unclosed braces"
        except Unverifiable as error:
            problem = str(error)
        yield origin, problem


def _compared_as_text(records: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, str]]:
    checker = MathChecker()
    parsable: dict[str, bool] = {}
    remaining = _MOST_PARSED
    try:
        for _, metadata in records:
            answer = record_answer(metadata)
            if answer in parsable:
                continue
            if is_plain(answer) or remaining == 0:
                parsable[answer] = True
            else:
                parsable[answer] = checker.is_parsable(answer)
                remaining -= 1
    finally:
        checker.close()
    return [
        (origin, f"field `answer` is {_shortened(answer)}")
        for origin, metadata in records
        if not parsable[answer := record_answer(metadata)]
    ]


def _listed(problems: Sequence[tuple[str, str]]) -> str:
    lines = [f"  {origin}: {problem}" for origin, problem in problems[:_LISTED]]
    rest = len(problems) - _LISTED
    return "\n".join([*lines, f"  and {rest} more"] if rest > 0 else lines)


def _shortened(answer: str) -> str:
    shown = repr(answer)
    return shown if len(shown) <= _LONGEST_TEXT else f"{shown[:_LONGEST_TEXT]}…"


def is_plain(answer: str) -> bool:
    """Return whether an answer is a number, a time, an option letter or text.

    Such answers need no math-verify.
    """
    gold = normalized(gold_answer(answer))
    return (
        exact_number(gold) is not None
        or parse_choice(gold) is not None
        or parse_clock(gold) is not None
        or parse_words(gold) is not None
    )


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


_log = logging.getLogger(__name__)
