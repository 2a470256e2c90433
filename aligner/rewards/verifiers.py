"""Verifiers: rules that decide from a prompt's metadata whether a response is correct.

The module also checks the answers of records before a run: `check_answers` reports answers that the
verifiers `gsm8k` and `math` could not compare with any response.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from aligner.child_function import ChildFunction, ChildLost
from aligner.errors import AlignerError, ConfigError
from aligner.rewards.answer_forms import parse_choice, parse_clock, parse_exact_number, parse_words
from aligner.rewards.answer_text import is_comparable, normalize_answer
from aligner.rewards.final_answers import extract_final_number, extract_gold_answer
from aligner.rewards.function_forms import FunctionForm
from aligner.rewards.math_checker import MathChecker

CHECKED_VERIFIERS = ("exact_match", "format", "gsm8k", "length", "math", "reasoning_gym")
"""Functions that read fields of the records, so that `check_answers` can check the records."""
# Records in an error message.
_LISTED_RECORDS = 5
# Characters of an answer in an error message.
_MAX_SHOWN_CHARACTERS = 80
# math-verify takes about 5 ms for an answer; a launch should not take minutes.
_MAX_PARSED_ANSWERS = 10_000


def check_answers(
    verifier: str,
    key: str,
    records: Iterable[tuple[str, Mapping[str, Any]]],
    python: str | None = None,
) -> list[str]:
    """Check that records have the fields that a verifier compares responses with.

    Args:
        verifier: Element of CHECKED_VERIFIERS.
        key: Configuration key that names the verifier, for messages.
        records: Origin and fields of each record.
        python: Python interpreter of an environment with the verifier's packages; None means the
            interpreter of this process.

    Returns:
        A notice if `math` can compare some answers only as text.

    Raises:
        ConfigError: See `require_fields`.
    """
    records = list(records)
    require_fields(verifier, key, records)
    if verifier != "math":
        return []

    unparsable = _find_unparsable_answers(records, python)
    if not unparsable:
        return []
    return [
        f"{key}: the answers of {len(unparsable)} of {len(records)} records cannot be parsed;"
        f" responses must have the same text:\n{_format_list(unparsable)}"
    ]


def require_fields(
    verifier: str, key: str, records: Sequence[tuple[str, Mapping[str, Any]]]
) -> None:
    """Raise ConfigError if a record lacks a field of a verifier, or its value cannot be compared.

    The error lists the first such records. The arguments are those of `check_answers`.
    """
    invalid = [
        (origin, problem) for origin, problem in _find_problems(verifier, records) if problem
    ]
    if invalid:
        problem = (
            "have an answer that no response can be compared with"
            if verifier in ("gsm8k", "math")
            else "lack a valid value of a field that the function requires"
        )
        raise ConfigError(
            f"{key}: {len(invalid)} of {len(records)} records {problem}. Correct or remove these"
            f" records:\n{_format_list(invalid)}"
        )


def require_form_fields(
    form: FunctionForm, key: str, records: Iterable[tuple[str, Mapping[str, Any]]]
) -> None:
    """Raise ConfigError if a record lacks a field that a custom function requires.

    Args:
        form: The form of the function.
        key: Configuration key with the function, for messages.
        records: Origin and fields of each record.
    """
    if not form.required_fields:
        return  # without reading the records
    count = 0
    invalid = []
    for origin, metadata in records:
        count += 1
        if field := form.find_missing_field(metadata):
            fields = ", ".join(metadata) or "none"
            invalid.append((origin, f"record lacks field {field}; other fields: {fields}"))
    if invalid:
        raise ConfigError(
            f"{key}: {len(invalid)} of {count} records lack a field that the function requires as a"
            " parameter. Add the field (null where it has no value), map it with data.fields, or"
            f" give the parameter a default value:\n{_format_list(invalid)}"
        )


def _find_problems(
    verifier: str, records: Sequence[tuple[str, Mapping[str, Any]]]
) -> Iterable[tuple[str, str]]:
    """Yield the origin of each record, and the problem of its fields; "" if they are valid."""
    for origin, metadata in records:
        problem = ""
        try:
            if verifier == "gsm8k":
                gsm8k("", metadata)
            elif verifier == "exact_match":
                record_answer(metadata)
            elif verifier == "format":
                _read_pattern(metadata)
            elif verifier == "length":
                length("", metadata)
            elif verifier == "reasoning_gym":
                record_question(metadata)
            elif not is_comparable(
                normalize_answer(extract_gold_answer(answer := record_answer(metadata)))
            ):
                problem = f"field `answer` is {_shorten(answer)}, empty or with unclosed braces"
        except Unverifiable as error:
            problem = str(error)
        yield origin, problem


def _find_unparsable_answers(
    records: Sequence[tuple[str, Mapping[str, Any]]], python: str | None
) -> list[tuple[str, str]]:
    """Return the origins of records whose answers math-verify cannot parse, with a description.

    Only the first _MAX_PARSED_ANSWERS different answers that require math-verify are parsed.
    """
    checker = MathChecker(python=python)
    is_parsable: dict[str, bool] = {}
    remaining = _MAX_PARSED_ANSWERS
    try:
        for _, metadata in records:
            answer = record_answer(metadata)
            if answer in is_parsable:
                continue
            if is_plain(answer) or remaining == 0:
                is_parsable[answer] = True
            else:
                is_parsable[answer] = checker.is_parsable(answer)
                remaining -= 1
    finally:
        checker.close()
    return [
        (origin, f"field `answer` is {_shorten(answer)}")
        for origin, metadata in records
        if not is_parsable[answer := record_answer(metadata)]
    ]


def _format_list(problems: Sequence[tuple[str, str]]) -> str:
    lines = [f"  {origin}: {problem}" for origin, problem in problems[:_LISTED_RECORDS]]
    more = len(problems) - _LISTED_RECORDS
    return "\n".join([*lines, f"  and {more} more"] if more > 0 else lines)


def _shorten(answer: str) -> str:
    shown = repr(answer)
    return shown if len(shown) <= _MAX_SHOWN_CHARACTERS else f"{shown[:_MAX_SHOWN_CHARACTERS]}…"


def is_plain(answer: str) -> bool:
    """Return whether an answer is a number, a time, an option letter or text.

    Such answers need no math-verify.
    """
    gold = normalize_answer(extract_gold_answer(answer))
    return (
        parse_exact_number(gold) is not None
        or parse_choice(gold) is not None
        or parse_clock(gold) is not None
        or parse_words(gold) is not None
    )


Rule = Callable[[str, Mapping[str, Any]], bool]
"""Function from a response and its prompt's metadata to whether the response is correct. It raises
Unverifiable."""

# Processor time to match one response with its regular expression, in seconds.
_PATTERN_PROCESSOR_S = 2.0


class Unverifiable(AlignerError):
    """The metadata of a prompt does not contain what a verifier compares responses with."""


def exact_match(response: str, metadata: Mapping[str, Any]) -> bool:
    """Return whether the response equals the field `answer`, except for surrounding whitespace."""
    return response.strip() == record_answer(metadata).strip()


def gsm8k(response: str, metadata: Mapping[str, Any]) -> bool:
    """Return whether the final numbers of the response and of the field `answer` are equal.

    The answer may be a whole solution. See `extract_final_number`.

    Raises:
        Unverifiable: The answer contains no number.
    """
    answer = record_answer(metadata)
    expected = extract_final_number(answer)
    if expected is None:
        raise Unverifiable(f"field `answer` is {answer!r}, must contain a number")
    return extract_final_number(response) == expected


def math(response: str, metadata: Mapping[str, Any]) -> bool:
    r"""Return whether the answer of a response equals the field `answer` mathematically.

    docs/rewards.md describes the rules. A response that takes too long to compare is incorrect.

    Raises:
        Unverifiable: The field `answer` is empty or has unclosed braces.
    """
    answer = record_answer(metadata)
    is_equal = _math_checker().is_equal(answer, response)
    if is_equal is None:
        raise Unverifiable(
            f"field `answer` is {answer!r}, must contain an expression or text with closed braces"
        )
    return is_equal


_math_checker = lru_cache(maxsize=1)(MathChecker)


def format_matches(response: str, metadata: Mapping[str, Any]) -> bool:
    """Return whether the whole response matches the regular expression `format`.

    `.` also matches line breaks; one space before the response need not match.

    Raises:
        Unverifiable: The regular expression is invalid, or matching takes too long.
    """
    # An invalid pattern is reported as such, not as an exception of the child process.
    pattern = _read_pattern(metadata)
    try:
        return bool(_pattern_matcher()(pattern, response))
    except ChildLost as error:
        raise Unverifiable(f"field `format` is {pattern!r}; the match {error}") from error


def _read_pattern(metadata: Mapping[str, Any]) -> str:
    """Return the field `format` of a record; raise Unverifiable if it is no regular expression."""
    pattern: str = _get_field(metadata, "format", str, "a regular expression")
    try:
        re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise Unverifiable(
            f"field `format` is {pattern!r}, not a valid regular expression: {error}"
        ) from error
    return pattern


def matches_whole_response(pattern: str, response: str) -> bool:
    """Return whether a regular expression matches the whole response.

    One space at the start of the response need not match, because SentencePiece tokenizers write
    that space between a prompt and a response.
    """
    texts = [response] if not response.startswith(" ") else [response, response[1:]]
    return any(re.fullmatch(pattern, text, re.DOTALL) is not None for text in texts)


@lru_cache(maxsize=1)
def _pattern_matcher() -> ChildFunction:
    """Return `matches_whole_response` in a child process.

    The time of a match may double with every character, and only ending a process stops it.
    """
    return ChildFunction(__name__, "matches_whole_response", cpu_limit_s=_PATTERN_PROCESSOR_S)


def length(response: str, metadata: Mapping[str, Any]) -> bool:
    """Return whether the response has `min_length` to `max_length` characters.

    The field `min_length` is optional.
    """
    max_length = _get_field(metadata, "max_length", int, "a number of characters")
    min_length = (
        _get_field(metadata, "min_length", int, "a number of characters")
        if "min_length" in metadata
        else 0
    )
    return min_length <= len(response) <= max_length


def record_answer(metadata: Mapping[str, Any]) -> str:
    """Return the field `answer` of a record as text.

    Raises:
        Unverifiable: The record has no answer, or the answer is no string or number.
    """
    return str(_get_field(metadata, "answer", (str, int, float), "a string or a number"))


def record_question(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the field `question` of a record of `data.tasks`.

    Raises:
        Unverifiable: The record has no such field.
    """
    question: Mapping[str, Any] = _get_field(
        metadata, "question", dict, "an object of data.tasks, which reasoning_gym requires"
    )
    if not {"made_of", "checksum"} <= question.keys():
        raise Unverifiable(
            f"field `question` has the entries {', '.join(question) or 'none'}, must have `made_of`"
            " and `checksum`, as in the records of data.tasks"
        )
    return question


def _get_field(
    metadata: Mapping[str, Any], name: str, types: type | tuple[type, ...], expected: str
) -> Any:
    """Return a field of a record.

    Args:
        metadata: Fields of the record.
        name: Name of the field.
        types: Allowed types of the value; bool is never allowed.
        expected: Description of the allowed values, for error messages.
    """
    if name not in metadata:
        other_fields = ", ".join(metadata) or "none"
        raise Unverifiable(
            f"record lacks field `{name}` ({expected}); other fields of the record: {other_fields}"
        )
    value = metadata[name]
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, types):
        raise Unverifiable(f"field `{name}` is {value!r}, must be {expected}")
    return value
