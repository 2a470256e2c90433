"""Built-in verifiers: exact_match, gsm8k, math, format and length."""

from __future__ import annotations

import threading
from decimal import Decimal

import pytest

from aligner.errors import AlignerError, ConfigError
from aligner.rewards.final_answers import extract_final_number
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.math_checker import MathChecker
from aligner.rewards.scorers import ScoringError, call_scorer, resolve_scorer


def score(name: str, response: str, **metadata) -> float:
    (value,) = call_scorer(
        name, resolve_scorer(name), [ScoringRequest("What?", response, metadata)]
    )
    return value


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("4", "4", 1),
        (" 4\n", "4 ", 1),
        ("4", 4, 1),
        ("4.0", 4, 0),
        ("it is 4", "4", 0),
        ("", "4", 0),
        ("Yes", "yes", 0),
    ],
)
def test_exact_match_ignores_outer_whitespace(response, answer, expected):
    assert score("exact_match", response, answer=answer) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16 - 3 - 4 = 9, so 9 * 2 = $<<9*2=18>>18 a day.\n#### 18", "18"),
        ("#### 1\nNo: #### $1,234.50 in 2 years", "1234.5"),
        ("#### none, but 7", "7"),
        ("#### none", None),
        (r"5 of them, \boxed{12} of 40", "12"),
        (r"\boxed{1} and then \boxed{\text{about } 2{,}000\%}.", "2000"),
        (r"\boxed{x} is 3", None),
        (r"\boxed{\frac{3}{4", "4"),
        ("The answer is 18.", "18"),
        ("18.00", "18"),
        ("In 2019 it was 75% more: 1,050,000 of them!", "1050000"),
        ("either 1,2 or 3,45", "45"),
        ("it fell to -5", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("from \u22123.50", "-3.5"),
        ("10-3", "3"),
        ("(4)-2", "2"),
        (".5 of it", "0.5"),
        ("1e5", "100000"),
        ("about -2.5E-3.", "-0.0025"),
        ("1e99999999 or 3e", "3"),
        ("3east", "3"),
        ("none", None),
        ("", None),
    ],
)
def test_final_number_follows_marker_or_box_or_is_last(text, number):
    assert extract_final_number(text) == (None if number is None else Decimal(number))


def test_gsm8k_compares_numbers_in_any_notation():
    assert score("gsm8k", "So it is 1,050,000.00 dollars", answer="long ago ...\n#### 1050000") == 1
    assert score("gsm8k", "#### 18", answer=18) == score("gsm8k", "18", answer=18.0) == 1
    assert score("gsm8k", "18 or 19", answer="18") == score("gsm8k", "no idea", answer="18") == 0
    # Neither side goes through floating point.
    assert score("gsm8k", "0.1000000000000000055", answer="0.1") == 0


@pytest.mark.parametrize(
    ("response", "pattern", "expected"),
    [
        ("<think>a\nb</think>4", "<think>.*</think>.+", 1),
        ("so <think>a</think>4", "<think>.*</think>.+", 0),
        ("<think>a</think>", "<think>.*</think>.+", 0),
        (" <think>a</think>4", "<think>.*</think>.+", 1),
        (" <think>a</think>4", " <think>.*</think>.+", 1),
        ("  <think>a</think>4", "<think>.*</think>.+", 0),
    ],
)
def test_format_matches_the_whole_response(response, pattern, expected):
    assert score("format", response, format=pattern) == expected


def test_length_bounds_are_inclusive():
    assert [score("length", text, max_length=3) for text in ("", "abc", "abcd", "ééé")] == [
        1,
        1,
        0,
        1,
    ]
    assert [score("length", text, max_length=3, min_length=2) for text in ("a", "ab")] == [0, 1]


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"so it is \boxed{0.5}", r"\frac{1}{2}", 1),
        ("It is $1+x^2$.", "x^2+1", 1),
        (r"$\sqrt{8}$", r"$2\sqrt2$", 1),
        ("3", 3, 1),
        ("$x^2$", "x^2+1", 0),
        ("I do not know", "3", 0),
        ("", "3", 0),
    ],
)
def test_math_compares_expressions_by_value(response, answer, expected):
    assert score("math", response, answer=answer) == expected


def test_math_timeout_in_thread_returns_false():
    checker, answers = MathChecker(cpu_limit_s=0.3), []

    def work() -> None:
        # The second answer is a number with 10^8 digits; the third one needs the process that
        # replaces the killed one.
        for response in (r"\boxed{4}", r"\boxed{(10^9)!}", r"\boxed{4}"):
            answers.append(checker.is_equal("4", response))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    checker.child.close()
    assert answers == [True, False, True]


def test_killed_math_process_raises_and_is_replaced():
    checker = MathChecker()
    assert checker.is_equal("1", "1") is True
    assert checker.child._process is not None
    checker.child._process.kill()
    with pytest.raises(AlignerError, match="math-verify was killed by SIGKILL: exit code -9"):
        checker.is_equal("1", "1")
    assert checker.is_equal("1", "2") is False
    checker.child.close()


def test_math_without_package_names_key_and_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=(
            r"reward\.sources\.sums\.function=math: requires the math-verify package.*"
            r"aligner\[verify\]"
        ),
    ):
        resolve_scorer("math", "reward.sources.sums.function")


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        (
            "exact_match",
            {},
            "record lacks field `answer` \\(a string or a number\\); other fields of the record: none",
        ),
        (
            "gsm8k",
            {"label": 3},
            "record lacks field `answer` \\(a string or a number\\); other fields of the record: label",
        ),
        ("gsm8k", {"answer": None}, "field `answer` is None, must be a string or a number"),
        ("gsm8k", {"answer": "four"}, "field `answer` is 'four', must contain a number"),
        ("math", {"answer": True}, "field `answer` is True"),
        (
            "math",
            {"answer": ""},
            "field `answer` is '', must contain an expression or text with closed braces",
        ),
        ("format", {"answer": "4"}, "record lacks field `format` \\(a regular expression\\)"),
        ("format", {"format": "("}, r"field `format` is '\(', not a valid regular expression"),
        (
            "length",
            {"max_length": "3"},
            "field `max_length` is '3', must be a number of characters",
        ),
    ],
)
def test_invalid_record_field_is_reported(name, metadata, message):
    with pytest.raises(
        ScoringError, match=f"the scorer {name}: {message}.*for prompt 'What\\?' and response '4'"
    ):
        score(name, "4", **metadata)


def test_slow_format_pattern_is_reported():
    pattern = "(a+)+b"
    with pytest.raises(
        ScoringError,
        match=r"the scorer format: field `format` is '\(a\+\)\+b'; the match used more than 2 s of CPU time",
    ):
        score("format", "a" * 40, format=pattern)
    assert score("format", "aab", format=pattern) == 1
