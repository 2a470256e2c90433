"""Statistics of a run's records: their number, lengths in tokens, and field names.

The lengths are measured on a sample of the records: the longest ones, and others at even
distances.
"""

import contextlib
import heapq
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from aligner.config.situation import DataStatistics
from aligner.data.example_cache import list_inline_prompts, remember_result
from aligner.data.examples import (
    Demonstration,
    LabeledAnswer,
    LabeledSteps,
    Preference,
    open_run_data,
)
from aligner.data.prompts import open_prompts
from aligner.data.record_layouts import LAYOUTS, TEXT_LAYOUTS, find_layout
from aligner.data.record_sources import RawRecord
from aligner.data.records import (
    BadRecord,
    FieldChoice,
    FieldChoiceError,
    choose_fields,
    compile_prompt_part_pattern,
    has_content,
    is_prompt_part,
    open_source,
    parse_records,
    to_record,
)
from aligner.data.tokenizer import Tokenizer, build_run_tokenizer
from aligner.errors import AlignerError, ConfigError
from aligner.schema import Config, DataConfig, TeacherConfig
from aligner.schema.data import AUTO_LAYOUT, NO_LAYOUT
from aligner.schema.data_sources import DataSource, parse_data_sources
from aligner.schema.reward_sources import FunctionSource, parse_reward_sources

# Number of records measured because they are the longest, and of other measured records.
_LONGEST = 64
_SPREAD = 448
# Files above this size have their statistics stored in the cache.
_LARGE_BYTES = 4 << 20
# A limit of tokens that no record reaches.
_UNLIMITED = 2**30
# Reward functions that compare a response with the record's `answer`.
_ANSWER_FUNCTIONS = ("exact_match", "gsm8k", "math")
# Maximum number of characters of a field in the example.
_EXAMPLE_CHARACTERS = 200


def measure_data(config: Config, directory: Path) -> DataStatistics | None:
    """Measure the records of a run with the tokenizer of a model's directory.

    Invalid records are not counted; `prepare` reports them. Returns None if no record can be read.

    Raises:
        FieldChoiceError: A field that looks like a part of the prompt cannot be joined to it.
    """
    try:
        tokenizer = build_run_tokenizer(config, directory)
        sources = parse_data_sources(config.data)
        # The statistics of small data are computed faster than their checksum.
        has_function = any(source.is_function for source in sources)
        if not has_function and any(_is_large(source) for source in sources):
            identity = {
                "tokenizer": tokenizer.identity,
                "data": asdict(config.data),
                "algorithm": asdict(config.algorithm),
                "reward": asdict(config.reward),
            }
            stored = remember_result(
                "statistics",
                sources,
                identity,
                lambda: asdict(_measure(config, tokenizer, _Records(config.data))),
            )
            return _from_json(stored)
        return _measure(config, tokenizer, _Records(config.data))
    except FieldChoiceError:
        raise
    except (AlignerError, OSError):
        return None


def _is_large(source: DataSource) -> bool:
    return source.path.is_file() and source.path.stat().st_size > _LARGE_BYTES


def _from_json(stored: Mapping[str, Any]) -> DataStatistics:
    return DataStatistics(**{**stored, "notices": tuple(stored["notices"])})


def _measure(config: Config, tokenizer: Tokenizer, raw_records: "_Records") -> DataStatistics:
    sampled_records, count = sample_records(raw_records)
    layout = _find_common_layout(sampled_records, config)
    layout_text = LAYOUTS[layout].description if layout else ""
    if layout in TEXT_LAYOUTS and not _has_template(tokenizer):
        layout = TEXT_LAYOUTS[layout]
        layout_text += "; the model has no chat template, so they remain plain texts"
    choice = choose_record_fields(sampled_records, raw_records, config)
    fields = choice.fields
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "records.jsonl"
        records = _parse_records(sampled_records, layout or _get_remaining_layout(config), fields)
        file.write_text(
            "".join(json.dumps(record, default=str) + "\n" for record in records),
            encoding="utf-8",
        )
        lengths = list(_measure_lengths(config, file, tokenizer))

    prompt_lengths = sorted(prompt for prompt, _ in lengths)
    is_complete = len(sampled_records) == count
    return DataStatistics(
        records=count,
        read_records_text=(
            f"all {count} records"
            if is_complete
            else f"{len(sampled_records)} of {count} records, including the longest record"
        ),
        is_complete=is_complete,
        longest_prompt=prompt_lengths[-1],
        prompt_length_p99=prompt_lengths[(len(prompt_lengths) - 1) * 99 // 100],
        longest_answer=max(answer for _, answer in lengths),
        fields=fields,
        layout=layout,
        layout_text=layout_text,
        example=_format_example(records[0], fields) if fields or layout else "",
        notices=choice.notices,
        bypasses_template=_has_template(tokenizer)
        and all(isinstance(record.get("prompt"), str) for record in records),
    )


def _has_template(tokenizer: Tokenizer) -> bool:
    with contextlib.suppress(ConfigError):
        return tokenizer.chat_template is not None
    return False


class _Records:
    """The records of all data sources, with the fields that the configuration names. The records
    are read anew in each iteration, so that large data are not held in memory."""

    def __init__(self, data: DataConfig) -> None:
        self._prompts = data.prompts
        self._sources = [(source, open_source(source)) for source in parse_data_sources(data)]

    def __iter__(self) -> Iterator[RawRecord]:
        if not self._sources:
            yield from list_inline_prompts(self._prompts, "data.prompts")
        for source, records in self._sources:
            for raw_record in records.read():
                if not source.fields and source.layout == AUTO_LAYOUT:
                    yield raw_record
                    continue
                with contextlib.suppress(BadRecord):
                    record = to_record(raw_record, source.fields, source.layout)
                    yield RawRecord(record.values, record.origin)


def _get_remaining_layout(config: Config) -> str:
    """Return the layout of the records of `_Records`, which converts them if `data.format` names
    a layout."""
    return AUTO_LAYOUT if config.data.format == AUTO_LAYOUT else NO_LAYOUT


def _find_common_layout(records: Sequence[RawRecord], config: Config) -> str:
    """Return the layout that all records have with `data.format=auto`; "" if there is none."""
    if config.data.format != AUTO_LAYOUT or any(
        source.fields for source in parse_data_sources(config.data)
    ):
        return ""
    layouts = {find_layout(values) for values in _parse_records(records, NO_LAYOUT)}
    return layouts.pop() or "" if len(layouts) == 1 else ""


def choose_record_fields(
    sampled_records: Sequence[RawRecord], raw_records: Iterable[RawRecord], config: Config
) -> FieldChoice:
    """Choose the record fields for `prompt`, `response` and `answer`.

    Choose none if the configuration names any field.
    """
    if any(source.fields for source in parse_data_sources(config.data)):
        return FieldChoice()
    layout = _get_remaining_layout(config)
    records = _parse_records(sampled_records, layout)
    if not records:
        return FieldChoice()
    records += _records_with_rare_parts(records, raw_records, layout)
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


def _parse_records(
    raw_records: Sequence[RawRecord], layout: str, fields: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    return parse_records(
        raw_records,
        lambda record: dict(record.values),
        "data",
        skip=True,
        fields=fields,
        layout=layout,
    )[0]


def _records_with_rare_parts(
    records: Sequence[Mapping[str, Any]], raw_records: Iterable[RawRecord], layout: str
) -> list[dict[str, Any]]:
    """Return, for each prompt field that no sampled record has, the first record that has it, such
    as a rare `input`."""
    known = {name for record in records for name, value in record.items() if has_content(value)}
    new_records = []
    pattern = compile_prompt_part_pattern(known)
    for raw_record in raw_records:
        # Searching the keys as bytes is faster than parsing every record.
        content = raw_record.content
        if isinstance(content, bytes) and not pattern.search(content):
            continue
        for record in _parse_records([raw_record], layout):
            parts = {name for name, value in record.items() if has_content(value)}
            if any(_is_new_part(name, known) for name in parts):
                new_records.append(record)
                known |= parts
                pattern = compile_prompt_part_pattern(known)
    return new_records


def _is_new_part(name: str, known: set[str]) -> bool:
    return name not in known and is_prompt_part(name)


def _format_example(record: Mapping[str, Any], fields: Mapping[str, str]) -> str:
    """Return a record's fields with their final names, shortened, one per line."""
    names = ("prompt", "messages", "chosen", "rejected")
    values = {name: record[name] for name in names if name in record}
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


def sample_records(raw_records: Iterable[RawRecord]) -> tuple[list[RawRecord], int]:
    """Return the records to measure, and the number of all records.

    The records to measure are the longest ones, and others at even distances.
    """
    count = 0
    longest: list[tuple[int, int]] = []  # heap of sizes and indices
    for index, raw_record in enumerate(raw_records):
        count += 1
        content = raw_record.content
        size = len(content) if isinstance(content, bytes) else len(str(content))
        if len(longest) < _LONGEST:
            heapq.heappush(longest, (size, index))
        elif (size, index) > longest[0]:
            heapq.heapreplace(longest, (size, index))

    indices = set(range(count))
    if count > _LONGEST + _SPREAD:
        indices = {index for _, index in longest} | {*range(0, count, count // _SPREAD)}
    sampled = [raw_record for index, raw_record in enumerate(raw_records) if index in indices]
    return sampled, count


def _measure_lengths(config: Config, file: Path, tokenizer: Tokenizer) -> Iterator[tuple[int, int]]:
    """Yield the number of tokens of each record's prompt, and of its longest answer."""
    data = replace(
        config.data,
        path=str(file),
        sources={},
        fields={},
        format=NO_LAYOUT,
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
