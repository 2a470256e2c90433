"""Previews of records for `aligner data`: what the model sees of a record, and which of it has a
loss.

`preview_record` parses a record with the parser of the run, so that a preview shows the tokens that
the run trains on. `preview_text` shows the texts of a record without a model.
"""

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from aligner.data.conversations import get_prompt_messages
from aligner.data.examples import (
    Demonstration,
    ExampleParser,
    LabeledAnswer,
    LabeledSteps,
    Preference,
)
from aligner.data.prompts import PromptParser
from aligner.data.record_fields import find_conversation
from aligner.data.record_sources import RawRecord
from aligner.data.records import BadRecord, ExcludedRecord, Record, to_record
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Prompt
from aligner.schema import Config
from aligner.schema.data_sources import DataSource

Outcome = Literal["used", "cut", "dropped", "invalid"]
"""What a run does with a record: it uses all of it, it cuts the prompt, or it skips the record by
its configuration; an invalid record is an error, or skipped with `data.skip_bad_records`."""
OUTCOMES: tuple[Outcome, ...] = ("used", "cut", "dropped", "invalid")
"""All outcomes, in the order of messages."""

# A limit of tokens that no record reaches.
_UNLIMITED = 2**30
_ASSISTANT = "assistant"


@dataclass(frozen=True)
class Segment:
    """A part of a text."""

    text: str
    has_loss: bool
    """Whether the part is trained on."""
    label: str = ""
    """Role of the message that the text is, if no chat template renders the message."""


@dataclass(frozen=True)
class MaskedText:
    """A text that the model sees, with its loss mask."""

    name: str
    """Meaning of the text: `prompt`, `prompt and response`, `chosen` or `rejected`."""
    segments: Sequence[Segment]
    prompt_length: int
    """Length of the prompt in tokens, or in characters without a tokenizer."""
    length: int
    """Length of prompt and response."""
    loss_length: int
    """Length of the parts with a loss."""
    tokens: Sequence[int] = ()
    """Token ids; empty without a tokenizer."""
    loss_mask: Sequence[int] = ()
    """1 for each token with a loss, 0 for others; empty without a tokenizer."""


@dataclass(frozen=True)
class RecordPreview:
    """A record as a run sees it."""

    origin: str
    """Origin of the record: FILE:LINE, or DIRECTORY[INDEX]."""
    outcome: Outcome
    problem: str = ""
    """Reason why the record is dropped or invalid."""
    texts: Sequence[MaskedText] = ()
    """Texts of the record; empty if it cannot be parsed."""
    roles: Sequence[str] = ()
    """Roles of the record's messages; empty for plain texts."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields: of prompts those that the reward function receives, otherwise labels."""
    prompt_length: int = 0
    """Length of the prompt before it is cut, in tokens or characters."""
    response_length: int | None = None
    """Length of the longest response in tokens or characters; None for prompts."""


@dataclass(frozen=True)
class LengthSummary:
    """Lengths of the prompts or the responses of several records."""

    minimum: int
    median: float
    maximum: int
    limit: int | None
    """Maximum length of the configuration in tokens; None without a limit."""
    longer: int
    """Number of records above the limit."""


def preview_record(
    raw_record: RawRecord, source: DataSource, parser: PromptParser | ExampleParser[Any]
) -> RecordPreview:
    """Return the preview of a record with the tokens of a run's parser.

    Args:
        raw_record: The record.
        source: The source of the record.
        parser: The parser of the run's records.
    """
    try:
        record = to_record(raw_record, source.fields, source.layout)
    except BadRecord as error:
        return RecordPreview(raw_record.origin, "invalid", str(error))

    # A record that exceeds the limits is shown as well, so that its length is visible.
    unlimited_data = replace(
        parser.data, max_prompt_tokens=_UNLIMITED, max_response_tokens=_UNLIMITED
    )
    problem = ""
    outcome: Outcome = "used"
    try:
        example = parser(record)
    except BadRecord as error:
        outcome = "dropped" if isinstance(error, ExcludedRecord) else "invalid"
        problem = str(error)
        example = None
    try:
        complete_example = replace(parser, data=unlimited_data)(record)
        roles = _list_roles(record, complete_example)
    except BadRecord:
        return RecordPreview(raw_record.origin, outcome, problem)

    complete_texts = _build_texts(complete_example, parser)
    texts = complete_texts if example is None else _build_texts(example, parser)
    prompt_length = complete_texts[0].prompt_length
    if outcome == "used" and texts[0].prompt_length < prompt_length:
        outcome = "cut"
    return RecordPreview(
        raw_record.origin,
        outcome,
        problem,
        texts,
        roles,
        _list_fields(complete_example),
        prompt_length,
        None
        if isinstance(example, Prompt) or isinstance(complete_example, Prompt)
        else max(text.length - text.prompt_length for text in complete_texts),
    )


def preview_text(raw_record: RawRecord, source: DataSource, config: Config) -> RecordPreview:
    """Return the preview of a record without a tokenizer; lengths are in characters."""
    try:
        record = to_record(raw_record, source.fields, source.layout)
        texts, roles = _read_texts(record, config)
    except BadRecord as error:
        return RecordPreview(raw_record.origin, "invalid", str(error))
    is_prompt = config.algorithm.generates_samples
    names = ("prompt", "messages", "response", "chosen", "rejected")
    return RecordPreview(
        raw_record.origin,
        "used",
        "",
        texts,
        roles,
        {name: value for name, value in record.values.items() if name not in names},
        texts[0].prompt_length,
        None if is_prompt else max(text.length - text.prompt_length for text in texts),
    )


def summarize_lengths(lengths: Sequence[int], limit: int | None) -> LengthSummary | None:
    """Return the summary of lengths; None if there are none."""
    if not lengths:
        return None
    return LengthSummary(
        min(lengths),
        statistics.median(lengths),
        max(lengths),
        limit,
        0 if limit is None else sum(length > limit for length in lengths),
    )


def _list_roles(record: Record, example: Any) -> list[str]:
    """Return the roles of a record's messages."""
    if isinstance(example, Prompt | LabeledSteps):
        messages = get_prompt_messages(record).get("messages")
    else:
        answer = "chosen" if isinstance(example, Preference) else "response"
        messages = find_conversation(record, answer)[1]
    return [message["role"] for message in messages or ()]


def _list_fields(example: Any) -> dict[str, Any]:
    """Return the fields of an example other than its texts."""
    if isinstance(example, Prompt):
        return {name: value for name, value in example.metadata.items() if name != "messages"}
    if isinstance(example, Preference):
        return {} if example.margin is None else {"margin": example.margin}
    if isinstance(example, LabeledAnswer):
        return {"label": example.is_desirable}
    if isinstance(example, LabeledSteps):
        return {"labels": example.labels.int().tolist()}
    return {}


def _build_texts(example: Any, parser: PromptParser | ExampleParser[Any]) -> list[MaskedText]:
    """Return the texts of an example, with its loss masks."""
    tokenizer = parser.tokenizer
    if isinstance(example, Prompt):
        no_loss = torch.zeros(example.tokens.numel(), dtype=torch.bool)
        length = example.tokens.numel()
        return [_mask_text("prompt", example.tokens, length, no_loss, tokenizer)]
    if isinstance(example, LabeledSteps):
        mask = torch.zeros(example.tokens.numel(), dtype=torch.bool)
        mask[example.positions] = True
        return [
            _mask_text("prompt and steps", example.tokens, example.prompt_length, mask, tokenizer)
        ]
    if isinstance(example, Preference):
        return [
            _mask_demonstration("chosen", example.chosen, tokenizer),
            _mask_demonstration("rejected", example.rejected, tokenizer),
        ]
    answer = example.answer if isinstance(example, LabeledAnswer) else example
    return [_mask_demonstration("prompt and response", answer, tokenizer)]


def _mask_demonstration(
    name: str, demonstration: Demonstration, tokenizer: Tokenizer
) -> MaskedText:
    return _mask_text(
        name,
        demonstration.tokens,
        demonstration.prompt_length,
        demonstration.loss_mask,
        tokenizer,
    )


def _mask_text(
    name: str, tokens: Tensor, prompt_length: int, mask: Tensor, tokenizer: Tokenizer
) -> MaskedText:
    """Return the text of tokens, int64 [T], with their loss mask, bool [T]."""
    segments = []
    start = 0
    for has_loss, group in itertools.groupby(mask.tolist()):
        end = start + len(list(group))
        part = tokens[start:end]
        text = (
            tokenizer.decode_after(tokens[:start], part, skip_special_tokens=False)
            if start
            else tokenizer.decode(part, skip_special_tokens=False)
        )
        segments.append(Segment(text, has_loss))
        start = end
    return MaskedText(
        name,
        segments,
        prompt_length,
        tokens.numel(),
        int(mask.sum()),
        tokens.tolist(),
        mask.int().tolist(),
    )


def _read_texts(record: Record, config: Config) -> tuple[list[MaskedText], list[str]]:
    """Return the texts of a record without a chat template, and the roles of its messages.

    Raises:
        BadRecord: The record lacks a text, or its messages are invalid.
    """
    algorithm = config.algorithm
    if algorithm.generates_samples or "steps" in record.values:
        messages = get_prompt_messages(record).get("messages")
        parts = (
            [Segment(record.get_text("prompt"), has_loss=False)]
            if messages is None
            else [_format_message(message, has_loss=False) for message in messages]
        )
        parts += [Segment(step, has_loss=True) for step in record.values.get("steps", [])]
        roles = [message["role"] for message in messages or ()]
        return [_join_segments("prompt", parts)], roles

    has_pairs = algorithm.trainer in ("dpo", "reward_model") and not algorithm.has_labels
    texts = []
    roles = []
    for answer in ("chosen", "rejected") if has_pairs else ("response",):
        name, messages = find_conversation(record, answer)
        if messages is None:
            parts = [
                Segment(record.get_text("prompt"), has_loss=False),
                Segment(record.get_text(name), has_loss=True),
            ]
        else:
            roles = [message["role"] for message in messages]
            learns_all = algorithm.trainer == "sft" and config.data.learned_turns == "all"
            parts = [
                _format_message(
                    message,
                    has_loss=index == len(messages) - 1
                    or (learns_all and message["role"] == _ASSISTANT),
                )
                for index, message in enumerate(messages)
            ]
        texts.append(_join_segments(answer if has_pairs else "prompt and response", parts))
    return texts, roles


def _format_message(message: Mapping[str, Any], *, has_loss: bool) -> Segment:
    text = message.get("content") or json.dumps(message.get("tool_calls"), ensure_ascii=False)
    return Segment(text, has_loss, message["role"])


def _join_segments(name: str, segments: Sequence[Segment]) -> MaskedText:
    """Return a text of segments; its lengths are in characters."""
    lengths = [len(segment.text) for segment in segments]
    loss_lengths = [len(segment.text) for segment in segments if segment.has_loss]
    prompt_lengths = [
        len(segment.text)
        for segment in itertools.takewhile(lambda segment: not segment.has_loss, segments)
    ]
    return MaskedText(name, segments, sum(prompt_lengths), sum(lengths), sum(loss_lengths))
