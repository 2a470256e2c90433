"""Scores of `gsm8k` and `math` for answers in the formats of GSM8K, MATH, AIME and NuminaMath."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.errors import ConfigError
from aligner.rewards import verifiers
from aligner.rewards.answer_forms import split_unit, units_agree
from aligner.rewards.answer_text import normalize_answer
from aligner.rewards.final_answers import (
    extract_final_answer,
    extract_final_number,
    extract_gold_answer,
)
from aligner.rewards.math_checker import MathChecker
from aligner.rewards.verifiers import check_answers, gsm8k, is_plain, math

TABLE = [json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").open()]
KINDS = {
    kind: [row for row in TABLE if row["kind"] == kind]
    for kind in dict.fromkeys(row["kind"] for row in TABLE)
}
VERIFIERS = {"gsm8k": gsm8k, "math": math}


@pytest.mark.promise("answer-table")
@pytest.mark.parametrize("kind", KINDS)
def test_gsm8k_and_math_scores_equal_answer_table(kind):
    wrong = [
        row
        for row in KINDS[kind]
        if VERIFIERS[row["reward"]](row["response"], {"answer": row["answer"]}) != row["score"]
    ]
    assert wrong == []


@pytest.mark.promise("answer-table")
def test_answer_table_has_enough_wrong_answers():
    assert len(TABLE) >= 200
    assert sum(row["score"] == 0 for row in TABLE) >= 60
    assert sum(map(len, KINDS.values())) == len(TABLE)


def test_gold_answers_equal_themselves_and_parse():
    checker = MathChecker()
    answers = {row["answer"] for row in TABLE if row["reward"] == "math"}
    try:
        unequal = [
            answer
            for answer in sorted(answers)
            if "boxed" not in answer and not checker.is_equal(answer, f"\\boxed{{{answer}}}")
        ]
        unparsable = [
            answer
            for answer in sorted(answers)
            if not (is_plain(answer) or checker.is_parsable(answer))
        ]
    finally:
        checker.close()
    assert unequal == unparsable == []


def test_normalization_is_idempotent():
    golds = [normalize_answer(extract_gold_answer(row["answer"])) for row in TABLE]
    assert [normalize_answer(gold) for gold in golds] == golds


COMMANDS = (
    *("\\boxed{", "\\frac", "\\sqrt", "\\text{", "\\pm", "\\begin{pmatrix}", "\\\\", "\\circ"),
    *("\\in ", "#### ", "answer is ", "½", "²"),
)
CHARACTERS = "\\{}()[]$%^_&#,.:;=+-*/|<>0123456789xaB \n"
PIECES = st.lists(st.sampled_from([*CHARACTERS, *COMMANDS])).map("".join)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.one_of(PIECES, st.text()))
def test_answer_parsers_accept_any_text(text):
    answer = normalize_answer(text)
    assert normalize_answer(answer) is not None
    assert extract_final_number(text) == extract_final_number(f" {text}\n")
    assert extract_final_answer(f"\\boxed{{{answer}}}") is None or answer is not None
    is_plain(text)
    split_unit(answer)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(PIECES)
def test_math_scores_any_text_without_error(text):
    assert math(text, {"answer": "7"}) in (True, False)
    assert math(f" {text}\n", {"answer": "x^2+1"}) == math(text, {"answer": "x^2+1"})


@pytest.mark.parametrize(
    "text",
    [*"{$1( \n#", "\\boxed{", "#### ", "answer is ", "1,", "a = ", "1/", "1:", "**", "- "],
)
def test_long_texts_take_linear_time(text):
    start = time.process_time()
    extract_final_number(text * 20000)
    extract_final_answer(text * 20000)
    normalize_answer(text * 20000)
    assert time.process_time() - start < 5


def test_unit_synonyms_agree_without_conversion():
    for names in ("m^2|square meters|sq m|m squared", "km/h|km per hour|kilometers per hour"):
        units = [split_unit(rf"5\text{{ {name} }}")[1] for name in names.split("|")]
        assert len(set(units)) == 1
        assert units[0]
    assert units_agree("cm", "")
    assert not units_agree("cm", "m")
    assert not units_agree("m", "m^2")


def test_unusable_gold_answers_are_refused():
    records = [(f"data.jsonl:{line}", {"answer": "4"}) for line in range(1, 4)]
    bad = [("data.jsonl:4", {"answer": "four"}), ("data.jsonl:5", {"label": "4"})]
    with pytest.raises(ConfigError) as raised:
        check_answers("gsm8k", "reward.function=gsm8k", [*records, *bad])
    assert str(raised.value).startswith(
        "reward.function=gsm8k: 2 of 5 records have an answer that no response can be compared with"
    )
    assert "data.jsonl:4: field `answer` is 'four', must contain a number" in str(raised.value)
    assert "data.jsonl:5: record lacks field `answer`" in str(raised.value)

    many = [(f"data.jsonl:{line}", {"answer": "\\frac{1}{"}) for line in range(9)]
    with pytest.raises(ConfigError, match=r"(?s)9 of 12 records.*data\.jsonl:4: .*and 4 more"):
        check_answers("math", "reward.function=math", [*records, *many])


@pytest.mark.promise("answer-table")
def test_unparsable_gold_answers_are_reported():
    records = [
        ("data.jsonl:1", {"answer": "\\frac{1}{2}"}),
        ("data.jsonl:2", {"answer": "x = = 2 +"}),
        ("data.jsonl:3", {"answer": "Tuesday"}),
    ]
    (notice,) = check_answers("math", "reward.function=math", records)
    assert "the answers of 1 of 3 records cannot be parsed" in notice
    assert "data.jsonl:2: field `answer` is 'x = = 2 +'" in notice
    assert check_answers("math", "reward.function=math", records[::2]) == []


def test_plain_gold_answers_need_no_child_process(monkeypatch):
    monkeypatch.setattr(verifiers, "MathChecker", lambda **options: _NoChild())
    records = [("1", {"answer": answer}) for answer in ("12", "1/2", "Tuesday", "(B)", "12:30", 7)]
    assert check_answers("math", "reward.function=math", records) == []


class _NoChild:
    def is_parsable(self, answer: str) -> bool:
        raise AssertionError(answer)

    def close(self) -> None:
        pass
