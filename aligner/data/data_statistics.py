"""How long the records of a run are, told from some of them: the longest, and others evenly over
all."""

import contextlib
import json
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
from aligner.data.records import Line, convert, read_lines
from aligner.data.tokenizer import Tokenizer
from aligner.errors import AlignerError, ConfigError
from aligner.schema import Config, DataConfig, TeacherConfig
from aligner.schema.data_sources import data_sources

_LONGEST, _SPREAD = 64, 448
"""Records that are looked at: those with the most characters, and others."""
_ENDLESS = 2**30
_NAMES = {
    "prompt": ("question", "query", "instruction", "problem", "input", "text"),
    "response": ("answer", "output", "completion", "solution"),
}
"""What published data call our fields; the first that a record has is taken."""


def measure_data(config: Config, directory: Path) -> DataStatistics | None:
    """What the records of a run look like to the tokenizer of a model's directory; None where they
    cannot be read so.

    Records that are not as they must be are not counted as looked at. Those who learn from them
    tell what is wrong.
    """
    try:
        lines = _lines(config.data)
        fields = (
            {}
            if any(source.fields for source in data_sources(config.data))
            else _names(lines, config)
        )
        looked_at = _some(lines)
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "records.jsonl"
            records = convert(
                looked_at, lambda record: dict(record.values), "data", skip=True, fields=fields
            )[0]
            file.write_text(
                "".join(json.dumps(record, default=str) + "\n" for record in records),
                encoding="utf-8",
            )
            tokenizer = Tokenizer(directory, config.run.date)
            pairs = list(_lengths(config, file, tokenizer))
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


def _names(lines: Sequence[Line], config: Config) -> dict[str, str]:
    """Names of fields that the first record lacks, where it has one that is known to stand for
    it."""
    first: Mapping[str, Any] = convert(lines[:1], lambda record: dict(record.values), "data")[0][0]
    answered = config.algorithm.trainer in ("sft", "teacher_scores")
    wanted = (
        ["prompt"] if config.algorithm.generates else ["prompt", "response"] if answered else []
    )
    if "messages" in first:
        return {}
    found = (
        (ours, next((name for name in _NAMES[ours] if name in first), None))
        for ours in wanted
        if ours not in first
    )
    return {ours: name for ours, name in found if name is not None}


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
