"""Conversion of records in published layouts to aligner's fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aligner.data.record_layouts import LAYOUTS, find_layout
from aligner.data.record_sources import RawRecord
from aligner.data.records import BadRecord, Record, to_record
from aligner.schema.data import LAYOUT_NAMES


def convert(record: dict[str, Any], fields: dict[str, str] | None = None, layout: str = "auto"):
    return to_record(RawRecord(record, "file:1"), fields or {}, layout).values


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SHAREGPT = {
    "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}],
    "system": "Be kind.",
}
HH = {
    "chosen": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant: So.\n\nYes.",
    "rejected": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant: What?",
}
ULTRAFEEDBACK = {
    "prompt": "Hi",
    "chosen": [user("Hi"), assistant("Hello")],
    "rejected": [user("Hi"), assistant("What?")],
    "messages": [user("Hi"), assistant("Hello")],
    "score_chosen": 8.5,
}


@pytest.mark.parametrize(
    ("layout", "record", "expected"),
    [
        (
            "sharegpt",
            SHAREGPT,
            {
                "messages": [
                    {"role": "system", "content": "Be kind."},
                    user("Hi"),
                    assistant("Hello!"),
                ]
            },
        ),
        (
            "nemo_aligner",
            {
                "system": "",
                "mask": "Customer",
                "conversations": [
                    {"From": "Customer", "value": "Hi"},
                    {"From": "Assistant", "value": "Hello!"},
                ],
            },
            {"messages": [user("Hi"), assistant("Hello!")]},
        ),
        (
            "nemo_aligner_pairs",
            {"prompt": "1+1=", "chosen_response": "2", "rejected_response": "3"},
            {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        ),
        (
            "hh_rlhf",
            HH,
            {
                "prompt": [user("Hi"), assistant("Hello"), user("Why?")],
                "chosen": "So.\n\nYes.",
                "rejected": "What?",
            },
        ),
        (
            "ultrafeedback",
            ULTRAFEEDBACK,
            {
                "prompt": [user("Hi")],
                "chosen": [assistant("Hello")],
                "rejected": [assistant("What?")],
                "messages": [user("Hi"), assistant("Hello")],
                "score_chosen": 8.5,
            },
        ),
        (
            "trl_completion",
            {"prompt": [user("Hi")], "completion": [assistant("Hello")]},
            {"messages": [user("Hi"), assistant("Hello")]},
        ),
        (
            "openrlhf",
            {"context_messages": [user("1+1?")], "answer": "2"},
            {"prompt": [user("1+1?")], "answer": "2"},
        ),
        (
            "slime",
            {"prompt": [user("1+1?")], "label": "2", "metadata": {"a": 1}},
            {"prompt": [user("1+1?")], "label": "2", "answer": "2", "metadata": {"a": 1}},
        ),
        (
            "verl",
            {"prompt": [user("1+1?")], "reward_model": {"ground_truth": "2"}, "data_source": "a"},
            {
                "prompt": [user("1+1?")],
                "reward_model": {"ground_truth": "2"},
                "data_source": "a",
                "answer": "2",
            },
        ),
    ],
)
def test_layout_is_recognised_and_converted(layout, record, expected) -> None:
    assert find_layout(record) == layout
    assert convert(record) == convert(record, layout=layout) == expected
    assert convert(json.loads(json.dumps(expected))) == expected  # a second time changes nothing
    assert convert(record, layout="none") == record


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "2+2=", "answer": "4", "label": "4"},
        {"prompt": "2+2=", "response": "4", "label": True},
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
        {"chosen": [user("Hi"), assistant("a")], "rejected": [user("Hi"), assistant("b")]},
        {"messages": [user("Hi")], "conversations": SHAREGPT["conversations"]},
        {"instruction": "a", "input": "", "output": "b"},
        {"prompt": "1+1=", "reward_model": {"ground_truth": "2"}, "answer": "2"},
        {"prompt": "1+1=", "reward_model": {"ground_truth": {"target": ["2"]}}},
        {"conversations": []},
        {"conversations": ["a"]},
    ],
)
def test_records_with_own_fields_are_unchanged(record) -> None:
    assert find_layout(record) is None and convert(record) == record


@pytest.mark.parametrize(
    ("layout", "record", "expected"),
    [
        (
            "hh_rlhf_text",
            HH,
            {
                "prompt": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:",
                "chosen": " So.\n\nYes.",
                "rejected": " What?",
            },
        ),
        (
            "alpaca",
            {"instruction": "Add.", "input": "1 and 2", "output": "3"},
            {
                "instruction": "Add.",
                "input": "1 and 2",
                "output": "3",
                "prompt": "Add.\n\n1 and 2",
                "response": "3",
            },
        ),
        (
            "alpaca",
            {"instruction": "Sing.", "input": "", "output": "La"},
            {
                "instruction": "Sing.",
                "input": "",
                "output": "La",
                "prompt": "Sing.",
                "response": "La",
            },
        ),
    ],
)
def test_layout_is_selected_by_name_only(layout, record, expected) -> None:
    assert convert(record, layout=layout) == expected
    assert find_layout(record) != layout


def test_missing_field_names_the_layout_that_provides_it() -> None:
    record = Record({"instruction": "Sing.", "output": "La"}, "file:1")
    with pytest.raises(BadRecord, match=r"lacks field `response`.*data\.format=alpaca"):
        record.get_text("response")


def test_fields_of_the_user_take_precedence() -> None:
    record = {"prompt": "1+1=", "label": "2"}
    assert convert(record, {"response": "label"}) == {"prompt": "1+1=", "response": "2"}


@pytest.mark.parametrize(
    ("record", "layout", "problem"),
    [
        ({"prompt": "a"}, "sharegpt", "data.format=sharegpt"),
        ({"conversations": [{"from": "cat", "value": "a"}]}, "auto", r"conversations\[0\].*'cat'"),
        ({**HH, "rejected": "\n\nHuman: Bye\n\nAssistant: a"}, "auto", "differ before the last"),
        ({**HH, "chosen": "\n\nHuman: Hi"}, "auto", "field `chosen`: the dialogue does not end"),
        ({**HH, "rejected": "\n\nHuman: Bye\n\nAssistant: a"}, "hh_rlhf_text", "differ before"),
        ({**HH, "chosen": "\n\nHuman: Hi"}, "hh_rlhf_text", "dialogue does not end"),
        ({"instruction": "a", "output": "b", "choices": ["c"]}, "alpaca", "no other fields"),
        ({**ULTRAFEEDBACK, "rejected": [user("a"), assistant("b")]}, "auto", "differ before"),
    ],
)
def test_record_outside_its_layout_is_refused(record, layout, problem) -> None:
    with pytest.raises(BadRecord, match=f"^file:1: .*{problem}"):
        convert(record, layout=layout)


def test_data_format_names_all_layouts() -> None:
    assert tuple(LAYOUTS) == LAYOUT_NAMES
