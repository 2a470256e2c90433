"""Automatic choice of the record fields for `prompt`, `response` and `answer`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aligner.data.record_sources import open_record_source
from aligner.data.records import (
    FieldChoiceError,
    Record,
    choose_fields,
    parse_records,
)
from aligner.errors import ConfigError

ALPACA = {"instruction": "Translate to French.", "input": "good evening", "output": "bonsoir"}
ALPACA_ALONE = {"instruction": "Name a colour.", "input": "", "output": "blue"}
MATHEMATICS = {
    "problem": "What is 3*4+1?",
    "solution": "3*4 = 12, and 12+1 = 13. The answer is 13.",
    "answer": "13",
}
VERL = {
    "data_source": "mine",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0},
}
RLVR = {
    "messages": [{"role": "user", "content": "1+1?"}],
    "ground_truth": ["2"],
    "dataset": "mine",
}


def mapped(tmp_path: Path, records: list[dict[str, Any]], trainer: str) -> list[dict[str, Any]]:
    """Return the records with the field names that aligner reads."""
    choice = choose_fields(records, trainer, generates=trainer == "online")
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    parse = lambda record: dict(record.values)  # noqa: E731
    raw_records = open_record_source(file, "data.path=").read()
    return parse_records(raw_records, parse, "data", fields=choice.fields)[0]


@pytest.mark.promise("automatic-fields-keep-the-prompt")
@pytest.mark.parametrize(
    ("trainer", "record", "wanted"),
    [
        (
            "sft",
            ALPACA,
            {"prompt": "Translate to French.\n\ngood evening", "response": "bonsoir"},
        ),
        ("online", ALPACA, {"prompt": "Translate to French.\n\ngood evening", "answer": "bonsoir"}),
        ("sft", ALPACA_ALONE, {"prompt": "Name a colour.", "response": "blue"}),
        ("sft", MATHEMATICS, {"prompt": "What is 3*4+1?", "response": MATHEMATICS["solution"]}),
        ("online", MATHEMATICS, {"prompt": "What is 3*4+1?", "answer": "13"}),
        (
            "sft",
            {"question": "Who?", "context": "Ann ran.", "answer": "Ann"},
            {"prompt": "Who?\n\nAnn ran.", "response": "Ann"},
        ),
        ("sft", {"input": "a", "output": "b"}, {"prompt": "a", "response": "b"}),
        ("online", VERL, {"prompt": VERL["prompt"], "answer": "2"}),
        ("online", RLVR, {"messages": RLVR["messages"], "answer": "2"}),
        ("online", {"question": "1+1?", "answer": ["2"]}, {"prompt": "1+1?", "answer": "2"}),
    ],
)
def test_published_format_keeps_prompt_and_answer(
    tmp_path: Path, trainer: str, record: dict[str, Any], wanted: dict[str, Any]
) -> None:
    (found,) = mapped(tmp_path, [record], trainer)
    assert {name: found[name] for name in wanted} == wanted


def test_empty_input_field_leaves_no_blank_lines(tmp_path: Path) -> None:
    missing = {"instruction": "Say hi.", "output": "hi"}
    null = {"instruction": "Say ho.", "input": None, "output": "ho"}
    found = mapped(tmp_path, [missing, ALPACA_ALONE, null, ALPACA], "sft")
    assert [each["prompt"] for each in found] == [
        "Say hi.",
        "Name a colour.",
        "Say ho.",
        "Translate to French.\n\ngood evening",
    ]


@pytest.mark.promise("automatic-fields-keep-the-prompt")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("choices", ["4", "7", "9"]),
        ("options", {"A": "4", "B": "7"}),
        ("choices", {"text": ["4", "7"], "label": ["A", "B"]}),
        ("system_prompt", "Be brief."),
        ("history", [["Hi", "Hello"]]),
        ("context", ["Ann ran.", "Bob sat."]),
        ("choices", [4, 7, 9]),
        ("choices", ["a", "prim", "rim"]),
        ("option_b", "7"),
        ("opa", "4"),
        ("B", "7"),
        ("documents", ["Ann ran."]),
        ("contexts", ["Ann ran."]),
        ("schema", "CREATE TABLE primes"),
        ("starter_code", "def is_prime(n):"),
        ("images", ["primes.png"]),
        ("instruction", "Answer in French."),
        ("text", "4, 7 and 9"),
    ],
)
@pytest.mark.parametrize("trainer", ["sft", "online"])
def test_unjoinable_prompt_part_is_refused(trainer: str, field: str, value: Any) -> None:
    record = {"question": "Which is a prime?", field: value, "answer": 1}
    with pytest.raises(FieldChoiceError, match=f"the record field `{field}` looks like a part"):
        choose_fields([record], trainer, generates=trainer == "online")


def test_fields_that_repeat_the_prompt_are_accepted() -> None:
    text = "Instruction:\nTranslate to French.\nInput:\ngood evening\nResponse:\nbonsoir"
    choice = choose_fields([ALPACA | {"text": text}], "sft", generates=False)
    assert choice.fields["prompt"] == "{instruction}\n\n{input?}"

    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    for record in (
        {"messages": messages, "problem": "1+1?", "solution": "2"},
        {"messages": messages, "text": "[INST] 1+1? [/INST] 2"},
        {"prompt": "1+1? Think first.", "question": "1+1?", "response": "2"},
    ):
        assert choose_fields([record], "sft", generates=False).notices == ()


def test_extra_text_field_of_prompt_record_is_reported() -> None:
    record = {"prompt": "Summarize.", "text": "Ann ran.", "response": "Running."}
    (notice,) = choose_fields([record], "sft", generates=False).notices
    assert "`text` looks like a part" in notice


def test_repeated_text_does_not_hide_lost_prompt_part() -> None:
    record = {"question": "Who?", "system": "Be brief.", "text": "Be brief. Who?", "answer": "Ann"}
    with pytest.raises(FieldChoiceError, match="`system` looks like a part"):
        choose_fields([record], "sft", generates=False)


def test_answer_options_already_in_prompt_are_accepted() -> None:
    record = {"question": "Prime? A) 4 B) 7", "choices": ["4", "7"], "answer": "B"}
    assert choose_fields([record], "online", generates=True).fields == {"prompt": "question"}


def test_unused_context_of_prompt_record_is_reported() -> None:
    records = [{"prompt": "Who?", "context": "Ann ran.", "response": "Ann"}]
    choice = choose_fields(records, "sft", generates=False)
    assert choice.fields == {} and "`context` looks like a part" in choice.notices[0]
    contained = [{"prompt": "Ann ran. Who?", "context": "Ann ran.", "response": "Ann"}]
    assert choose_fields(contained, "sft", generates=False).notices == ()


def test_list_of_several_answers_is_refused() -> None:
    with pytest.raises(FieldChoiceError, match="`ground_truth` is a list of 2 answers"):
        choose_fields([RLVR | {"ground_truth": ["2", "two"]}], "online", generates=True)

    with pytest.raises(FieldChoiceError, match="`answer` is a list of 2 answers"):
        choose_fields([{"question": "1+1?", "answer": ["2", "two"]}], "online", generates=True)


def test_full_solution_is_preferred_to_short_answer() -> None:
    records = [MATHEMATICS | {"solution": None}, MATHEMATICS | {"solution": ""}, MATHEMATICS]
    assert choose_fields(records, "sft", generates=False).fields["response"] == "solution"
    assert choose_fields(records[:2], "sft", generates=False).fields["response"] == "answer"


def test_companion_that_is_not_always_text_is_refused() -> None:
    records = [
        {"question": "Who?", "context": "Ann ran.", "answer": "Ann"},
        {"question": "Who?", "context": ["Bob sat."], "answer": "Bob"},
    ]
    with pytest.raises(FieldChoiceError, match=r"`context` .* is not a text in every record"):
        choose_fields(records, "sft", generates=False)


def test_answer_field_is_not_mapped_for_other_rewards() -> None:
    record = {"question": "1+1?", "solution": "2"}
    choice = choose_fields([record], "online", generates=True, reads_answer=False)
    assert choice.fields == {"prompt": "question"}


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"conversations": [{"from": "human", "value": "Hi"}]}, "conversations"),
        ({"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi"}, "chosen"),
    ],
)
def test_unsupported_format_is_refused_with_its_fields(record: dict[str, Any], field: str) -> None:
    assert choose_fields([record], "sft", generates=False).fields == {}
    with pytest.raises(ConfigError, match=f"lacks field `prompt`.*{field}"):
        Record(record, "rows.jsonl:1").get_text("prompt")
