"""Sources of records: files, saved data sets, weighted mixes and mapped field names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from aligner.checks import data as data_checks
from aligner.config.compose import compose_config
from aligner.data.examples import open_demonstrations
from aligner.data.model_directory import prepare_model
from aligner.data.prompts import open_prompts
from aligner.data.records import BadRecord, has_steps, read_source
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.schema import AlgorithmConfig, Config, DataConfig
from aligner.schema.data_sources import parse_data_sources


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    run = tmp_path_factory.mktemp("run")
    return Tokenizer(prepare_model(compose_config(["experiment=tiny_ppo", f"run.dir={run}"])))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Save a data set with Hugging Face datasets; its field `hint` is null in two records."""
    import datasets

    path = tmp_path_factory.mktemp("saved")
    records = {
        "question": ["1+1=", "2+2=", "3+3="],
        "answer": ["2", "4", "6"],
        "hint": [None, "even", None],
    }
    split = datasets.Dataset.from_dict(records)
    split.save_to_disk(str(path / "one"))
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(path / "splits"))
    return path


def jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def problems(data: DataConfig, trainer: str = "online") -> str:
    return "\n".join(
        data_checks.find_problems(
            Config(data=data, algorithm=AlgorithmConfig(trainer=trainer)), None, {}
        )
    )


def test_saved_dataset_is_read_with_mapped_fields(tokenizer, dataset):
    data = DataConfig(path=str(dataset / "one"), fields={"prompt": "question"}, shuffle=False)
    assert problems(data) == ""
    prompts = open_prompts(data, tokenizer, 1).take(0, 3)
    assert [(prompt.text, prompt.metadata) for prompt in prompts] == [
        ("1+1=", {"answer": "2"}),
        ("2+2=", {"answer": "4", "hint": "even"}),
        ("3+3=", {"answer": "6"}),
    ]


def test_invalid_dataset_record_is_refused_with_index(tokenizer, dataset):
    data = DataConfig(path=str(dataset / "one"), fields={"prompt": "question", "response": "hint"})
    with pytest.raises(
        ConfigError,
        match=r"one\[0\]: record lacks field `hint`, which `fields` maps to `response`; fields of the record: question, answer",
    ):
        open_demonstrations(data, tokenizer, 1)
    data.skip_bad_records = True
    stream = open_demonstrations(data, tokenizer, 1)
    assert len(stream) == 1 and "skipped 2 of 3 records" in stream.notices[0]


def test_directories_other_than_one_split_are_refused(tokenizer, dataset, tmp_path):
    splits = DataConfig(path=str(dataset / "splits"))
    train, test = dataset / "splits" / "train", dataset / "splits" / "test"
    assert (
        f"data.path={splits.path}: contains several splits; set the path of one split: {test}, {train}"
        in problems(splits)
    )
    assert problems(DataConfig(path=str(train))) == ""
    assert "is not a directory saved by Hugging Face datasets" in problems(
        DataConfig(path=str(tmp_path))
    )
    for path in (splits.path, str(tmp_path)):
        with pytest.raises(ConfigError, match="the directory is not a Hugging Face dataset"):
            open_prompts(DataConfig(path=path), tokenizer, 1)


def test_sources_are_mixed_by_weight_with_own_fields(tokenizer, dataset, tmp_path):
    file = jsonl(tmp_path / "more.jsonl", {"text": "a"}, {"text": "b"})
    sources = {
        "sums": {"path": str(dataset / "one"), "weight": 3, "fields": {"prompt": "question"}},
        "more": {"path": file},
    }
    data = DataConfig(sources=sources, fields={"prompt": "text"})
    assert problems(data) == ""
    texts = [prompt.text for prompt in open_prompts(data, tokenizer, 1).take(0, 24)]
    assert sum(text in "ab" for text in texts) == 6
    assert all(
        texts.count(text) == count
        for text, count in {"1+1=": 6, "2+2=": 6, "3+3=": 6, "a": 3, "b": 3}.items()
    )


def test_mapped_field_replaces_field_of_that_name(tokenizer, tmp_path):
    file = jsonl(tmp_path / "p.jsonl", {"prompt": "wrong", "query": "right", "answer": "x"})
    (prompt,) = open_prompts(
        DataConfig(path=file, fields={"prompt": "query", "label": "answer"}), tokenizer, 1
    ).take(0, 1)
    assert (prompt.text, prompt.metadata) == ("right", {"label": "x"})


def test_record_kind_is_that_of_first_valid_record(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{\n{"prompt": "a", "stages": []}\n')
    with pytest.raises(ConfigError, match=r"p\.jsonl:1: not valid JSON"):
        has_steps(DataConfig(path=str(file)))
    assert has_steps(DataConfig(path=str(file), skip_bad_records=True, fields={"steps": "stages"}))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"a": "p.jsonl"}, r"data\.sources\.a=p\.jsonl: expected a mapping with path"),
        ({"a": {"weight": 1}}, r"data\.sources\.a\.path: missing"),
        (
            {"a": {"path": "p", "wieght": 1}},
            r"data\.sources\.a\.wieght: unknown key; did you mean data\.sources\.a\.weight\?",
        ),
        ({"a": {"path": 3}}, r"data\.sources\.a\.path=3: expected a string, got int"),
        (
            {"a": {"path": "p", "weight": 0}},
            r"data\.sources\.a\.weight=0: must be a finite number above 0",
        ),
        (
            {"a": {"path": "p", "weight": float("nan")}},
            r"weight=nan: must be a finite number above 0",
        ),
        ({"a": {"path": "p", "weight": True}}, r"weight=True: must be a finite number"),
        (
            {"a": {"path": "p", "fields": {"prompt": 3}}},
            r"sources\.a\.fields\.prompt=3: expected the name of a field, got int",
        ),
        ({"a": {"path": "p", "fields": "x"}}, r"data\.sources\.a\.fields=x: expected a mapping"),
    ],
)
def test_invalid_source_entry_is_refused_with_key(entries, message):
    with pytest.raises(ConfigError, match=message):
        parse_data_sources(DataConfig(sources=entries))


def test_path_with_sources_is_refused():
    with pytest.raises(ConfigError, match=r"data\.sources: is not supported with data\.path"):
        parse_data_sources(DataConfig(path="a.jsonl", sources={"a": {"path": "b.jsonl"}}))


@pytest.mark.parametrize("trainer", ["sft", "dpo", "reward_model"])
def test_offline_trainer_requires_records(tmp_path, trainer):
    (tmp_path / "p.txt").write_text("a\n")
    assert f"algorithm.trainer={trainer} requires records, not only prompts" in problems(
        DataConfig(prompts=["a"]), trainer
    )
    assert "must be a .jsonl, .json, .jsonl.gz, .json.gz, .csv or .parquet file" in problems(
        DataConfig(path=str(tmp_path / "p.txt")), trainer
    )
    assert problems(DataConfig(path=jsonl(tmp_path / "p.jsonl", {})), trainer) == ""


def test_all_invalid_sources_are_reported_at_once(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    paths = {"a": str(tmp_path / "empty.jsonl"), "b": "absent.jsonl", "c": "p.csv"}
    found = problems(
        DataConfig(sources={name: {"path": path} for name, path in paths.items()})
    ).splitlines()
    assert [line.partition("=")[0] for line in found] == [
        f"data.sources.{name}.path" for name in paths
    ]


def test_field_templates_drop_recorded_tokens(tmp_path: Path) -> None:
    record = {
        "prompt": "1+1=",
        "prompt_tokens": [3],
        "response": "12",
        "response_tokens": [4, 5],
        "solution": "02",
        "n": 3,
    }
    file = tmp_path / "annotated.jsonl"
    file.write_text(json.dumps(record) + "\n")
    fields = {"prompt": "{response}:{prompt} {n} {}", "response": "solution"}
    (source,) = parse_data_sources(DataConfig(path=str(file), fields=fields))
    ((found,), _) = read_source(source, lambda record: record)
    assert found.values == {"prompt": "12:1+1= 3 {}", "response": "02", "n": 3}
    fields = {"prompt": "{wish}:{prompt}"}
    with pytest.raises(
        BadRecord,
        match=r"annotated\.jsonl:1: record lacks field `wish`, which `fields` maps to `prompt`; fields of the record: prompt",
    ):
        read_source(replace(source, fields=fields), lambda record: record)
