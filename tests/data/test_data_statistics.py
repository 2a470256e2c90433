"""Statistics of training records: token lengths, chosen fields, and which records were read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from aligner.config.compose import compose_config
from aligner.config.situation import DataStatistics
from aligner.data import data_statistics
from aligner.data.data_statistics import measure_data
from aligner.data.model_directory import prepare_model
from aligner.data.records import FieldChoiceError


def measured(
    tmp_path: Path, records: list[dict[str, Any]], *overrides: str
) -> DataStatistics | None:
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = compose_config(
        ["experiment=tiny_ppo", f"run.dir={tmp_path / 'run'}", f"data.path={file}", *overrides]
    )
    return measure_data(config, prepare_model(config))


def test_sampled_statistics_include_longest_record(tmp_path: Path) -> None:
    records = [{"prompt": "abc", "answer": "12"} for _ in range(5000)]
    records[3333] = {"prompt": "a" * 90, "answer": "1" * 40}
    found = measured(tmp_path, records)
    assert found is not None and not found.is_complete
    assert (found.records, found.longest_prompt, found.prompt_length_p99, found.longest_answer) == (
        5000,
        90,
        3,
        40,
    )
    assert found.read_records_text.endswith("of 5000 records, including the longest record")


def test_common_layout_of_records_is_chosen(tmp_path: Path) -> None:
    record = {"prompt": "2+2=", "label": "4"}
    found = measured(tmp_path, [record] * 3)
    assert found is not None and found.layout == "slime" and not found.fields
    assert found.longest_answer == 1 and "label" in found.layout_text
    mixed = measured(tmp_path, [record, {"prompt": "2+2=", "answer": "4"}])
    assert mixed is not None and mixed.layout == ""
    named = measured(tmp_path, [record], "data.format=slime", "+data.fields={x: label}")
    assert named is not None and named.longest_answer == 1
    assert measured(tmp_path, [record], "data.format=sharegpt") is None
    unconverted = measured(tmp_path, [record], "data.format=none")
    assert unconverted is not None and unconverted.layout == ""


@pytest.mark.parametrize(
    ("record", "overrides", "fields"),
    [
        ({"question": "a", "answer": "b"}, [], {"prompt": "question"}),
        ({"prompt": "a", "question": "b"}, [], {}),
        (
            {"instruction": "a", "output": "b"},
            ["algorithm=sft"],
            {"prompt": "instruction", "response": "output"},
        ),
        (
            {"instruction": "a", "input": "", "output": "b"},
            ["algorithm=sft"],
            {"prompt": "instruction", "response": "output"},
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ["algorithm=dpo"], {}),
        ({"mine": "a", "question": "b"}, ["+data.fields={prompt: mine}"], {}),
    ],
)
def test_fields_of_other_names_are_recognized(
    tmp_path: Path, record: dict[str, str], overrides: list[str], fields: dict[str, str]
) -> None:
    found = measured(tmp_path, [record], *overrides)
    assert found is not None and dict(found.fields) == fields and found.longest_prompt == 1


def test_response_lengths_include_eos_token(tmp_path: Path) -> None:
    pair = {"prompt": "abcd", "chosen": "xy", "rejected": "xyz"}
    found = measured(tmp_path, [pair], "algorithm=dpo")
    assert found is not None and (found.longest_prompt, found.longest_answer) == (4, 4)


@pytest.mark.parametrize("records", [[{"nothing": "a"}], [{"prompt": 3}], []])
def test_invalid_records_give_no_statistics(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    assert measured(tmp_path, records) is None


@pytest.mark.parametrize(
    ("record", "template", "is_told"),
    [
        ({"prompt": "a"}, "{{ messages[0].content }}", True),
        ({"prompt": "a"}, None, False),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "{{ messages[0].content }}",
            False,
        ),
    ],
)
def test_plain_prompts_for_chat_model_are_detected(
    tmp_path: Path, record: dict[str, Any], template: str | None, is_told: bool
) -> None:
    config = compose_config(
        [
            "experiment=tiny_ppo",
            f"run.dir={tmp_path / 'run'}",
            f"data.path={tmp_path / 'records.jsonl'}",
        ]
    )
    directory = tmp_path / "model"
    shutil.copytree(prepare_model(config), directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    Path(config.data.path or "").write_text(json.dumps(record) + "\n")
    found = measure_data(config, directory)
    assert found is not None and found.bypasses_template == is_told


def test_chosen_fields_include_short_rendered_example(tmp_path: Path) -> None:
    record = {"instruction": "b" + "a" * 500, "input": "", "output": "c"}
    found = measured(tmp_path, [record], "algorithm=sft")
    assert found is not None and found.fields["prompt"] == "instruction"
    prompt, response = found.example.split("\n")
    assert prompt.startswith("prompt: 'baaa") and len(prompt) < 250
    assert response == "response: 'c'"


@pytest.mark.parametrize("value", ["a", "  b"])
def test_rare_prompt_part_is_joined(tmp_path: Path, value: str) -> None:
    records = [{"instruction": "abc", "input": "", "output": "d" * 9} for _ in range(3000)]
    records[2345] = {"instruction": "abc", "input": value, "output": "d"}
    found = measured(tmp_path, records, "algorithm=sft")
    assert found is not None and found.fields["prompt"] == "{instruction}\n\n{input?}"


def test_rare_field_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    records = [{"question": "abc", "choices": [], "answer": "d" * 9} for _ in range(3000)]
    records[2345] = {"question": "abc", "choices": ["x", "y"], "answer": "x"}
    with pytest.raises(FieldChoiceError, match="`choices` looks like a part of the prompt"):
        measured(tmp_path, records, "algorithm=sft")


def test_field_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FieldChoiceError, match="`choices` looks like a part of the prompt"):
        measured(tmp_path, [{"question": "a", "choices": ["b", "c"], "answer": 1}])


def test_statistics_of_large_files_are_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALIGNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(data_statistics, "_LARGE_BYTES", 0)
    records = [{"question": "a" * index, "answer": "b"} for index in range(1, 9)]
    expected = measured(tmp_path, records)
    assert expected is not None and expected.fields == {"prompt": "question"}
    with monkeypatch.context() as patch:
        patch.setattr(data_statistics, "_measure", None)  # a call would fail
        assert measured(tmp_path, records) == expected

    changed = measured(tmp_path, records[:3])
    assert changed is not None and changed.records == 3
