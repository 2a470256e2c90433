"""How long the records of a run are, told from some of them: the longest, and others evenly over
all."""

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
from aligner.data.records import (
    FieldChoice,
    FieldsNotChosen,
    Line,
    choose_fields,
    convert,
    has_content,
    is_prompt_part,
    read_lines,
)
from aligner.data.tokenizer import Tokenizer, run_tokenizer
from aligner.errors import AlignerError, ConfigError
from aligner.schema import Config, DataConfig, TeacherConfig
from aligner.schema.data_sources import data_sources
from aligner.schema.reward_sources import FunctionSource, reward_sources

_LONGEST, _SPREAD = 64, 448
"""Records that are looked at: those with the most characters, and others."""
_ENDLESS = 2**30
_COMPARING = ("exact_match", "gsm8k", "math")
"""Reward functions that compare a response with the record's `answer`."""
_KEY = re.compile(rb'"(\w+)"\s*:\s*(?!""|null|\[\]|\{\})')
"""An entry of a JSON object that is not empty."""
_SHOWN = 200
"""Characters of a field that are shown as an example."""


def measure_data(config: Config, directory: Path) -> DataStatistics | None:
    """Measure the records of a run with the tokenizer of a model's directory.

    Invalid records are not counted; `prepare` reports them. Returns None if no record can be read.

    Raises:
        FieldsNotChosen: a field that looks like a part of the prompt cannot be joined to it.
    """
    try:
        lines = _lines(config.data)
        looked_at = _some(lines)
        choice = _choice(looked_at, lines, config)
        fields = choice.fields
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "records.jsonl"
            records = convert(
                looked_at, lambda record: dict(record.values), "data", skip=True, fields=fields
            )[0]
            file.write_text(
                "".join(json.dumps(record, default=str) + "\n" for record in records),
                encoding="utf-8",
            )
            tokenizer = run_tokenizer(config, directory)
            pairs = list(_lengths(config, file, tokenizer))
    except FieldsNotChosen:
        raise
    except (AlignerError, OSError):
        return None
    prompts = sorted(prompt for prompt, _ in pairs)
    whole = len(looked_at) == len(lines)
    return DataStatistics(
        records=len(lines),
        looked_at=(
            f"all {len(lines)} records"
            if whole
            else f"{len(looked_at)} of {len(lines)} records, including the longest record"
        ),
        is_whole=whole,
        longest_prompt=prompts[-1],
        most_prompts=prompts[(len(prompts) - 1) * 99 // 100],
        longest_answer=max(answer for _, answer in pairs),
        fields=fields,
        example=_example(records[0], fields) if fields else "",
        notices=choice.notices,
        bypasses_template=_has_template(tokenizer)
        and all(isinstance(record.get("prompt"), str) for record in records),
    )


def _has_template(tokenizer: Tokenizer) -> bool:
    with contextlib.suppress(ConfigError):
        return tokenizer.chat_template is not None
    return False


def _lines(data: DataConfig) -> list[Line]:
    """All records, under the names of the configuration."""
    sources = data_sources(data)
    if not sources:
        return [Line({"prompt": text}, "data.prompts") for text in data.prompts]
    found: list[Line] = []
    for source in sources:
        lines = read_lines(source.path, f"{source.key}.path=", timeout_s=source.timeout_s)
        if source.fields:
            values = convert(
                lines,
                lambda record: dict(record.values),
                source.given_as,
                skip=True,
                fields=source.fields,
            )[0]
            lines = [Line(value, source.given_as) for value in values]
        found += lines
    return found


def _choice(looked_at: Sequence[Line], lines: Sequence[Line], config: Config) -> FieldChoice:
    """Return the fields that stand for ours; none if the configuration names some."""
    if any(source.fields for source in data_sources(config.data)):
        return FieldChoice()
    records = _records(looked_at)
    records += _records_with_rare_parts(records, lines)
    algorithm = config.algorithm
    return choose_fields(
        records,
        algorithm.trainer,
        generates=algorithm.generates,
        reads_answer=any(
            isinstance(source, FunctionSource) and source.function in _COMPARING
            for source in reward_sources(config.reward)
        ),
    )


def _records(lines: Sequence[Line]) -> list[dict[str, Any]]:
    return convert(lines, lambda record: dict(record.values), "data", skip=True)[0]


def _records_with_rare_parts(
    records: Sequence[Mapping[str, Any]], lines: Sequence[Line]
) -> list[dict[str, Any]]:
    """Return the first record for each part of the prompt that only records outside of the sample
    have, such as a rare `input`."""
    known = {name for record in records for name, value in record.items() if has_content(value)}
    found = []
    for line in lines:
        named = set(_KEY.findall(line.content)) if isinstance(line.content, bytes) else None
        if named is not None and not any(_is_new_part(name.decode(), known) for name in named):
            continue
        for record in _records([line]):
            parts = {name for name, value in record.items() if has_content(value)}
            if any(_is_new_part(name, known) for name in parts):
                found.append(record)
                known |= parts
    return found


def _is_new_part(name: str, known: set[str]) -> bool:
    return name not in known and is_prompt_part(name)


def _example(record: Mapping[str, Any], fields: Mapping[str, str]) -> str:
    """Return the first record's fields as they are used, shortened, one per line."""
    shown = {name: record[name] for name in ("prompt", "messages") if name in record}
    shown |= {name: record[name] for name in fields if name in record}
    lines = []
    for name, value in shown.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text = text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"
        lines.append(f"{name}: {text!r}")
    return "\n".join(lines)


def _some(lines: Sequence[Line]) -> list[Line]:
    if len(lines) <= _LONGEST + _SPREAD:
        return list(lines)
    sizes = [
        len(line.content) if isinstance(line.content, bytes) else len(str(line.content))
        for line in lines
    ]
    longest = sorted(range(len(lines)), key=lambda index: sizes[index])[-_LONGEST:]
    spread = range(0, len(lines), len(lines) // _SPREAD)
    return [lines[index] for index in sorted({*longest, *spread})]


def _lengths(config: Config, file: Path, tokenizer: Tokenizer) -> Iterator[tuple[int, int]]:
    """Tokens of each record's prompt, and of its longest answer."""
    data = replace(
        config.data,
        path=str(file),
        sources={},
        fields={},
        skip_bad_records=True,
        shuffle=False,
        max_prompt_tokens=_ENDLESS,
        max_response_tokens=_ENDLESS,
        held_out=0,
        normalization=None,
    )
    if config.algorithm.generates:
        prompts = open_prompts(data, tokenizer, 0)
        for prompt in prompts.take(0, len(prompts)):
            said = (prompt.metadata.get(name) for name in ("answer", "response"))
            yield (
                prompt.tokens.numel(),
                max(
                    (tokenizer.encode(text).numel() for text in said if isinstance(text, str)),
                    default=0,
                ),
            )
        return
    examples = open_run_data(
        replace(config, data=data, teacher=TeacherConfig()), tokenizer
    ).examples
    for example in examples.take(0, len(examples)):
        yield from _sizes(example)


def _sizes(
    example: Demonstration | Preference | LabeledAnswer | LabeledSteps,
) -> Iterator[tuple[int, int]]:
    if isinstance(example, LabeledAnswer):
        example = example.answer
    both = (example.chosen, example.rejected) if isinstance(example, Preference) else (example,)
    for each in both:
        yield each.prompt_length, each.tokens.numel() - each.prompt_length
