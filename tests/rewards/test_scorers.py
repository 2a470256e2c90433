"""Scoring functions: lookup by name, and errors that name the scorer, prompt and response."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from aligner.errors import ConfigError
from aligner.rewards import scorers
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.scorers import ScoringError, call_scorer, digit_fraction, resolve_scorer
from aligner.schema.scoring_functions import FUNCTIONS, RULES


def requests(*responses: str) -> list[ScoringRequest]:
    return [ScoringRequest("Count: ", response) for response in responses]


def fails_on_seven(batch):
    if any("7" in request.response for request in batch):
        raise KeyError("seven")
    return [1.0] * len(batch)


def not_a_number(batch):
    return [0.0] * (len(batch) - 1) + [float("nan")]


def one_too_few(batch):
    return [0.0] * (len(batch) - 1)


def test_digit_fraction_counts_ascii_digits_of_response():
    assert digit_fraction(
        [
            ScoringRequest("123", "a1b2"),
            ScoringRequest("9", ""),
            ScoringRequest("", "42"),
            ScoringRequest("", "²x"),
        ]
    ) == [
        0.5,
        0.0,
        1.0,
        0.0,
    ]


def test_sentiment_score_has_the_sign_of_the_text():
    scorer = resolve_scorer("sentiment")
    kind, unkind = scorer(
        [
            ScoringRequest("The movie was", " wonderful, I loved it"),
            ScoringRequest("The movie was", " awful"),
        ]
    )
    assert kind > 0.5 > 0 > unkind


def test_missing_sentiment_package_names_the_extra(monkeypatch):
    scorers._sentiment_analyzer.cache_clear()
    for module in ("vaderSentiment", "vaderSentiment.vaderSentiment"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ConfigError,
        match=r"reward\.function=sentiment: vaderSentiment is not.*aligner\[sentiment\]",
    ):
        resolve_scorer("sentiment")


@pytest.mark.parametrize(
    "name", [name for name in (*FUNCTIONS, *RULES) if name not in ("math", "reasoning_gym")]
)
def test_built_in_scorers_score_a_response(name):
    (score,) = resolve_scorer(name)(
        [ScoringRequest("2+2=", "4", {"answer": "4", "format": "[0-9]", "max_length": 1})]
    )
    assert score == {"environment": 0.0, "sentiment": 0.0}.get(name, 1.0)


def test_scorer_is_imported_by_path():
    assert resolve_scorer(f"{__name__}:fails_on_seven")(requests("1")) == [1.0]


@pytest.mark.parametrize(
    "name", ["no_such", "no.such.module:f", f"{__name__}:no_such", "math:pi", "math:", ":f"]
)
def test_unknown_scorer_is_refused_with_key(name):
    with pytest.raises(ConfigError, match=r"reward\.function="):
        resolve_scorer(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("def f(:", r"broken_scorer\.py:2: SyntaxError: invalid syntax;"),
        (
            "raise SystemExit(3)",
            r"importing broken_scorer failed with SystemExit in broken_scorer.py:\d+: 3;",
        ),
        (
            "table = {}['gold']",
            r"importing broken_scorer failed with KeyError in broken_scorer.py:\d+: 'gold';",
        ),
        ("import no_such_package", r"No module named 'no_such_package';"),
    ],
)
def test_failed_scorer_import_names_its_cause(tmp_path, monkeypatch, content, message):
    (tmp_path / "broken_scorer.py").write_text(f"# mine\n{content}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"^reward\.function=broken_scorer:f: .*{message}"):
        resolve_scorer("broken_scorer:f")
    assert "broken_scorer" not in sys.modules


def test_scorer_with_wrong_signature_is_refused(tmp_path, monkeypatch):
    (tmp_path / "others.py").write_text(
        "def score(texts, answers): return [0.0]\ndef one(requests): return [1.0]"
    )
    monkeypatch.syspath_prepend(tmp_path)
    message = (
        r"score\(texts, answers\): the parameters must be aligner's \(requests\), TRL's"
        r" \(prompts, completions, \*\*kwargs\), or verl's"
    )
    with pytest.raises(ConfigError, match=rf"^reward\.function=others:score: {message}"):
        resolve_scorer("others:score")
    assert resolve_scorer("others:one")(requests("1")) == [1.0]


def test_scorer_exception_names_prompt_and_response():
    with pytest.raises(
        ScoringError, match="lengths raised KeyError: 'seven' for prompt 'Count: ' and response '7'"
    ):
        call_scorer("lengths", fails_on_seven, requests("1", "2", "7", "3"))


def test_non_finite_score_names_prompt_and_response():
    with pytest.raises(
        ScoringError, match="returned nan for prompt 'Count: ' and response 'b'; must be finite"
    ):
        call_scorer("lengths", not_a_number, requests("a", "b"))


def test_wrong_number_of_scores_is_refused():
    with pytest.raises(ScoringError, match="returned 1 scores for 2 responses"):
        call_scorer("lengths", one_too_few, requests("a", "b"))


def hangs_on_seven(batch):
    print("what a function prints is no score")
    if any("7" in request.response for request in batch):
        threading.Event().wait()
    return [float(request.metadata["answer"]) for request in batch]


def is_killed(batch):
    os.kill(os.getpid(), signal.SIGKILL)


def test_timeout_or_kill_of_scorer_is_reported():
    name = f"{__name__}:hangs_on_seven"
    scorer = resolve_scorer(name, timeout_s=1)
    about = {"answer": 2}
    with pytest.raises(
        ScoringError,
        match=f"the scorer {name} returned no result within 1 s and was killed while scoring 2 requests",
    ):
        call_scorer(
            name, scorer, [ScoringRequest("?", "7", about), ScoringRequest("?", "1", about)]
        )
    assert call_scorer(name, scorer, [ScoringRequest("?", "1", about)]) == [2.0]
    with pytest.raises(
        ScoringError,
        match=r"raised KeyError in test_scorers.py:\d+: 'answer' for prompt '\?' and response '1'",
    ):
        call_scorer(name, scorer, [ScoringRequest("?", "1")])
    killed = f"{__name__}:is_killed"
    with pytest.raises(
        ScoringError,
        match=f"the scorer {killed} was killed by SIGKILL: exit code -9 \\(perhaps out of memory\\).*for prompt 'Count: ' and response 'a'",
    ):
        call_scorer(killed, resolve_scorer(killed), requests("a"))
