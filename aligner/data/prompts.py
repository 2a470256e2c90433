"""Prompts from files or the configuration, as an endless stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from aligner.data.conversations import prompt_text
from aligner.data.records import (
    BadRecord,
    Record,
    convert,
    given_examples,
    read_examples,
    read_lines,
    source_examples,
)
from aligner.data.streams import ExampleStream
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Prompt
from aligner.errors import AlignerError
from aligner.schema import DataConfig, EvaluationConfig
from aligner.schema.data_sources import DataSource

_EVALUATION_IDS = 2**40
"""The first id of a prompt that is evaluated on."""


class PromptStream(ExampleStream[Prompt]):
    """An endless stream of prompts, as `ExampleStream` orders them."""

    def take(self, start: int, count: int) -> list[Prompt]:
        """The `count` prompts at positions `start` and up; a prompt's id is its position."""
        return [replace(prompt, id=start + index) for index, prompt in enumerate(super().take(start, count))]


def open_prompts(data: DataConfig, tokenizer: Tokenizer, seed: int) -> PromptStream:
    """The prompts of all sources, or those given in place, tokenized; what else a record has is a prompt's metadata.

    Raises ConfigError for none at all, a source that cannot be read, or, unless they are to be skipped, a record without
    a usable prompt of at most `data.max_prompt_tokens` tokens, with its place.
    """

    parse = _parser(tokenizer, data.max_prompt_tokens, data.prompt_after, data.prompt_before)
    sources, weights, notices = read_examples(data, parse)
    return PromptStream(sources, weights, seed=seed, shuffle=data.shuffle, notices=notices)


def open_evaluation_prompts(settings: EvaluationConfig, tokenizer: Tokenizer, max_prompt_tokens: int) -> list[Prompt]:
    """The prompts that a run is evaluated on, in their order, tokenized; `reference` in their metadata is a text.

    Their ids are beyond those of any training step, so that no random stream is shared. Raises ConfigError as `open_prompts`.
    """
    parse = _parser(tokenizer, max_prompt_tokens)

    def checked(record: Record) -> Prompt:
        if "reference" in record.values:
            record.text("reference")
        return parse(record)

    if settings.path is None:
        prompts, _ = given_examples(settings.prompts, "evaluation.prompts", checked)
    else:
        source = DataSource("evaluation", Path(settings.path), fields=settings.fields)
        prompts, _ = source_examples(source, checked)
    return [replace(prompt, id=_EVALUATION_IDS + place) for place, prompt in enumerate(prompts[: settings.count])]


def _parser(
    tokenizer: Tokenizer, max_prompt_tokens: int, after: str | None = None, before: str | None = None
) -> Callable[[Record], Prompt]:
    def parse(record: Record) -> Prompt:
        text = _between(prompt_text(record, tokenizer), after, before, record.origin)
        return to_prompt(record, text, tokenizer, max_prompt_tokens, f"data.max_prompt_tokens={max_prompt_tokens}")

    return parse


def _between(text: str, after: str | None, before: str | None, origin: str) -> str:
    """What of a text lies behind the first `after` and before the last `before` there.

    Huang et al. 2023, "The N Implementation Details of RLHF with PPO", detail 2. Raises BadRecord where either is missing, or
    nothing lies between.
    """
    if after is not None:
        _, found, text = text.partition(after)
        if not found:
            raise BadRecord(f"{origin}: the prompt lacks data.prompt_after={after!r}")
    if before is not None:
        text, found, _ = text.rpartition(before)
        if not found:
            raise BadRecord(f"{origin}: the prompt lacks data.prompt_before={before!r} behind where it begins")
    if not text.strip():
        raise BadRecord(f"{origin}: the prompt is empty between data.prompt_after={after!r} and prompt_before={before!r}")
    return text


def read_prompts(path: Path, key: str, kind: str | None = None) -> list[Record]:
    """Records with a plain-text prompt of a file, or of standard input where the path is `-`, in their order.

    `kind` and `key` are those of `read_lines`. Raises ConfigError for what cannot be read or is empty, with its place.
    """

    def checked(record: Record) -> Record:
        record.text("prompt")
        _metadata(record)
        return record

    return convert(read_lines(path, key, kind), checked, f"{key}{path}")[0]


def to_prompt(record: Record, text: str, tokenizer: Tokenizer, limit: int, allowed: str, id: int = 0) -> Prompt:
    """The prompt that a record's text is, with what else the record has as its metadata; raises as `tokenize_text` does."""
    return Prompt(id, text, tokenize_text(text, "prompt", record.origin, tokenizer, limit, allowed), _metadata(record))


def _metadata(record: Record) -> dict[str, Any]:
    """What goes to the scorer with a prompt's samples. BadRecord for what JSON or UTF-8 does not have, such as bytes."""
    metadata = {name: value for name, value in record.values.items() if name not in ("prompt", "messages")}
    for name, value in metadata.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise BadRecord(f"{record.origin}: `{name}` cannot go to a scorer with the prompt: {error}") from error
    return metadata


def tokenize_text(
    text: str, name: str, origin: str, tokenizer: Tokenizer, limit: int, allowed: str, *, ended: bool = False
) -> Tensor:
    """A record's field as tokens, int64 [P], with an end of sequence last if it is to be `ended`.

    Raises BadRecord for none, and for more than `limit`, which messages call `allowed`.
    """
    try:
        tokens = tokenizer.ended(tokenizer.encode(text)) if ended else tokenizer.encode(text)
    except AlignerError as error:
        raise BadRecord(f"{origin}: {error}") from error
    if not 1 <= tokens.numel() <= limit:
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise BadRecord(f"{origin}: the {name} has {tokens.numel()} tokens, allowed: 1 to {allowed}: {shown!r}")
    return tokens
