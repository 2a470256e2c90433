"""Statistics of a run's records: their number, lengths in tokens, and field names.

The lengths are measured on a sample of the records: the longest ones, and others at even
distances.
"""

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aligner.config.situation import DataStatistics
from aligner.data.examples import (
    Demonstration,
    LabeledAnswer,
    LabeledSteps,
    Preference,
    open_run_data,
)
from aligner.data.prompts import open_prompts
from aligner.data.record_sources import RawRecord
from aligner.data.records import (
    FieldChoice,
    FieldChoiceError,
    choose_fields,
    has_content,
    is_prompt_part,
    open_source,
    parse_records,
)
from aligner.data.tokenizer import Tokenizer, build_run_tokenizer
from aligner.errors import AlignerError, ConfigError
from aligner.schema import Config, DataConfig, TeacherConfig
from aligner.schema.data_sources import parse_data_sources
from aligner.schema.reward_sources import FunctionSource, parse_reward_sources

# Number of records measured because they are the longest, and of other measured records.
_LONGEST = 64
_SPREAD = 448
# A limit of tokens that no record reaches.
_UNLIMITED = 2**30
# Reward functions that compare a response with the record's `answer`.
_ANSWER_FUNCTIONS = ("exact_match", "gsm8k", "math")
# Key of an entry of a JSON object whose value is not empty.
_KEY = re.compile(rb'"(\w+)"\s*:\s*(?!""|null|\[\]|\{\})')
# Maximum number of characters of a field in the example.
_EXAMPLE_CHARACTERS = 200


def measure_data(config: Config, directory: Path) -> DataStatistics | None:
    """Measure the records of a run with the tokenizer of a model's directory.

    Invalid records are not counted; `prepare` reports them. Returns None if no record can be read.

    Raises:
        FieldChoiceError: A field that looks like a part of the prompt cannot be joined to it.
    """
    try:
        raw_records = _read_raw_records(config.data)
        sampled_records = _sample_records(raw_records)
        choice = _choose_record_fields(sampled_records, raw_records, config)
        fields = choice.fields
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "records.jsonl"
            records = parse_records(
                sampled_records,
                lambda record: dict(record.values),
                "data",
                skip=True,
                fields=fields,
            )[0]
            file.write_text(
                "".join(json.dumps(record, default=str) + "\n" for record in records),
                encoding="utf-8",
            )
            tokenizer = build_run_tokenizer(config, directory)
            lengths = list(_measure_lengths(config, file, tokenizer))
    except FieldChoiceError:
        raise
    except (AlignerError, OSError):
        return None

    prompt_lengths = sorted(prompt for prompt, _ in lengths)
    is_complete = len(sampled_records) == len(raw_records)
    return DataStatistics(
        records=len(raw_records),
        read_records_text=(
            f"all {len(raw_records)} records"
            if is_complete
            else f"{len(sampled_records)} of {len(raw_records)} records, including the longest"
            " record"
        ),
        is_complete=is_complete,
        longest_prompt=prompt_lengths[-1],
        prompt_length_p99=prompt_lengths[(len(prompt_lengths) - 1) * 99 // 100],
        longest_answer=max(answer for _, answer in lengths),
        fields=fields,
        example=_format_example(records[0], fields) if fields else "",
        notices=choice.notices,
        bypasses_template=_has_template(tokenizer)
        and all(isinstance(record.get("prompt"), str) for record in records),
    )


def _has_template(tokenizer: Tokenizer) -> bool:
    with contextlib.suppress(ConfigError):
        return tokenizer.chat_template is not None
    return False


def _read_raw_records(data: DataConfig) -> list[RawRecord]:
    """Return the records of all data sources, with the fields that the configuration names."""
    sources = parse_data_sources(data)
    if not sources:
        return [RawRecord({"prompt": text}, "data.prompts") for text in data.prompts]
    all_records: list[RawRecord] = []
    for source in sources:
        raw_records = list(open_source(source).read())
        if source.fields:
            values = parse_records(
                raw_records,
                lambda record: dict(record.values),
                source.setting_text,
                skip=True,
                fields=source.fields,
            )[0]
            raw_records = [RawRecord(value, source.setting_text) for value in values]
        all_records += raw_records
    return all_records


def _choose_record_fields(
    sampled_records: Sequence[RawRecord], raw_records: Sequence[RawRecord], config: Config
) -> FieldChoice:
    """Choose the record fields for `prompt`, `response` and `answer`.

    Choose none if the configuration names any field.
    """
    if any(source.fields for source in parse_data_sources(config.data)):
        return FieldChoice()
    records = _parse_records(sampled_records)
    records += _records_with_rare_parts(records, raw_records)
    algorithm = config.algorithm
    return choose_fields(
        records,
        algorithm.trainer,
        generates=algorithm.generates_samples,
        reads_answer=any(
            isinstance(source, FunctionSource) and source.function in _ANSWER_FUNCTIONS
            for source in parse_reward_sources(config.reward)
        ),
    )


def _parse_records(raw_records: Sequence[RawRecord]) -> list[dict[str, Any]]:
    return parse_records(raw_records, lambda record: dict(record.values), "data", skip=True)[0]


def _records_with_rare_parts(
    records: Sequence[Mapping[str, Any]], raw_records: Sequence[RawRecord]
) -> list[dict[str, Any]]:
    """Return, for each prompt field that no sampled record has, the first record that has it, such
    as a rare `input`."""
    known = {name for record in records for name, value in record.items() if has_content(value)}
    new_records = []
    for raw_record in raw_records:
        # Searching the keys as bytes is faster than parsing every record.
        keys = (
            set(_KEY.findall(raw_record.content)) if isinstance(raw_record.content, bytes) else None
        )
        if keys is not None and not any(_is_new_part(name.decode(), known) for name in keys):
            continue
        for record in _parse_records([raw_record]):
            parts = {name for name, value in record.items() if has_content(value)}
            if any(_is_new_part(name, known) for name in parts):
                new_records.append(record)
                known |= parts
    return new_records


def _is_new_part(name: str, known: set[str]) -> bool:
    return name not in known and is_prompt_part(name)


def _format_example(record: Mapping[str, Any], fields: Mapping[str, str]) -> str:
    """Return a record's fields with their final names, shortened, one per line."""
    values = {name: record[name] for name in ("prompt", "messages") if name in record}
    values |= {name: record[name] for name in fields if name in record}
    lines = []
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text = (
            text
            if len(text) <= _EXAMPLE_CHARACTERS
            else f"{text[: _EXAMPLE_CHARACTERS // 2]} … {text[-_EXAMPLE_CHARACTERS // 2 :]}"
        )
        lines.append(f"{name}: {text!r}")
    return "\n".join(lines)


def _sample_records(raw_records: Sequence[RawRecord]) -> list[RawRecord]:
    """Return the records to measure: the longest ones, and others at even distances."""
    if len(raw_records) <= _LONGEST + _SPREAD:
        return list(raw_records)
    sizes = [
        len(raw_record.content)
        if isinstance(raw_record.content, bytes)
        else len(str(raw_record.content))
        for raw_record in raw_records
    ]
    longest = sorted(range(len(raw_records)), key=lambda index: sizes[index])[-_LONGEST:]
    spread = range(0, len(raw_records), len(raw_records) // _SPREAD)
    return [raw_records[index] for index in sorted({*longest, *spread})]


def _measure_lengths(config: Config, file: Path, tokenizer: Tokenizer) -> Iterator[tuple[int, int]]:
    """Yield the number of tokens of each record's prompt, and of its longest answer."""
    data = replace(
        config.data,
        path=str(file),
        sources={},
        fields={},
        skip_bad_records=True,
        shuffle=False,
        max_prompt_tokens=_UNLIMITED,
        max_response_tokens=_UNLIMITED,
        held_out=0,
        normalization=None,
    )
    if config.algorithm.generates_samples:
        prompts = open_prompts(data, tokenizer, 0)
        for prompt in prompts.take(0, len(prompts)):
            answers = (prompt.metadata.get(name) for name in ("answer", "response"))
            yield (
                prompt.tokens.numel(),
                max(
                    (tokenizer.encode(text).numel() for text in answers if isinstance(text, str)),
                    default=0,
                ),
            )
        return
    examples = open_run_data(
        replace(config, data=data, teacher=TeacherConfig()), tokenizer
    ).examples
    for example in examples.take(0, len(examples)):
        yield from _example_lengths(example)


def _example_lengths(
    example: Demonstration | Preference | LabeledAnswer | LabeledSteps,
) -> Iterator[tuple[int, int]]:
    """Yield the number of tokens of the prompt and of the answer, for both answers of a pair."""
    if isinstance(example, LabeledAnswer):
        example = example.answer
    answers = (example.chosen, example.rejected) if isinstance(example, Preference) else (example,)
    for answer in answers:
        yield answer.prompt_length, answer.tokens.numel() - answer.prompt_length
