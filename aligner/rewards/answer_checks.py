"""Checks of the answers of records before a run: can `gsm8k` and `math` compare responses with
them?"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aligner.errors import ConfigError
from aligner.rewards.answer_forms import exact_number, parse_choice, parse_clock, parse_words
from aligner.rewards.answer_text import is_comparable, normalized
from aligner.rewards.final_answers import gold_answer
from aligner.rewards.math_checker import MathChecker
from aligner.rewards.verifiers import Unverifiable, gsm8k, record_answer

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
