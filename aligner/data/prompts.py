"""Prompts and responses of records as tokens, and prompts as an endless stream.

A plain prompt begins with the special tokens that the model's tokenizer itself puts before a text,
such as a beginning-of-sequence token; a chat template renders its own special tokens.

Prompt and response are tokenized together, as TRL does: many tokenizers put a space before a text
that is tokenized alone, or merge the end of a prompt with the start of a response.
"""

import functools
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.data.control_tokens import without_marks
from aligner.data.conversations import PromptText, asked_messages, exchange, prompt_text, with_tools
from aligner.data.pass_rates import DrawRule, PassRates, passes
from aligner.data.records import (
    BadRecord,
    LeftOut,
    Record,
    convert,
    given_examples,
    read_examples,
    read_lines,
    source_examples,
)
from aligner.data.streams import ExampleStream
from aligner.data.tokenizer import Tokenizer, Tools
from aligner.data.types import Prompt
from aligner.errors import AlignerError
from aligner.schema import DataConfig
from aligner.schema.data_sources import DataSource, task_sources
from aligner.schema.evaluation_suites import Suite


class PromptStream(ExampleStream[Prompt]):
    """An endless stream of prompts, as `ExampleStream` orders them, some of which a rule may pass
    over."""

    rule: DrawRule | None = None
    """None: every prompt is drawn."""

    def take(self, start: int, count: int) -> list[Prompt]:
        """The `count` prompts at positions `start` and up; a prompt's id is its position."""
        return [
            replace(prompt, id=start + index)
            for index, prompt in enumerate(super().take(start, count))
        ]

    def checksum(self) -> int:
        """Of the texts of all prompts, in the sources' own order."""
        return functools.reduce(
            lambda sum, prompt: zlib.crc32(prompt.text.encode() + b"\0", sum), self.examples(), 0
        )

    def draw(self, start: int, count: int, rates: PassRates | None) -> tuple[list[Prompt], int]:
        """The first `count` prompts from a position on that are drawn at these pass rates, and the
        position behind them.

        Raises AlignerError where too few are left.
        """
        if self.rule is None or rates is None or count < 1:
            return self.take(start, count), start + count
        chosen = self.rule.chosen(self._origins(start), count, rates)
        return [self.take(position, 1)[0] for position in chosen], chosen[-1] + 1


def open_prompts(
    data: DataConfig,
    tokenizer: Tokenizer,
    seed: int,
    *,
    messages: bool = False,
    answers: bool = False,
    tools: Tools | None = None,
) -> PromptStream:
    """The prompts of all sources, or those given in place, tokenized; what else a record has is a
    prompt's metadata.

    With `messages` these are there too, where a prompt was made of them; with `answers` the
    record's `response`, or the last answer of its conversation, as `response` and
    `response_tokens`. `tools` are what a prompt, which must be of messages, tells the model of,
    unless its record has `tools` of its own.

    Raises ConfigError for none at all, a source that cannot be read, or, unless they are to be
    skipped, a record without a usable prompt of at most `data.max_prompt_tokens` tokens, with its
    place; of longer ones as `data.long_prompts` says.
    """

    told = _told_pass_rates(data)

    def parse(record: Record) -> Prompt:
        record = _with_pass_rate(record, data, tokenizer, told)
        prompt = _parsed(with_tools(record, tools), tokenizer, data, messages)
        return (
            replace(prompt, metadata={**prompt.metadata, **_answer(record, tokenizer, data)})
            if answers
            else prompt
        )

    sources, weights, notices = read_examples(data, parse)
    if data.sort_by is not None:
        sources = [
            sorted(source, key=functools.partial(_sort_key, data.sort_by)) for source in sources
        ]
    stream = PromptStream(sources, weights, seed=seed, shuffle=data.shuffle, notices=notices)
    stream.rule = DrawRule(data.curriculum, seed) if data.curriculum.chooses else None
    return stream


def open_evaluation_prompts(
    suite: Suite,
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    messages: bool = False,
    tools: Tools | None = None,
) -> list[Prompt]:
    """The prompts that a run is evaluated on, in their order, tokenized; `reference` in their
    metadata is a text.

    `data` says of them what it says of those that are learned from: where they begin and end, and
    how long they may be.

    `messages` and `tools` as `open_prompts`, whose ConfigError it raises.
    """
    settings = suite.settings

    def parse(record: Record) -> Prompt:
        if "reference" in record.values:
            record.text("reference")
        if not data.generated_tokens:
            values = {
                name: value for name, value in record.values.items() if name != "reference_tokens"
            }
            record = replace(record, values=values)
        drawn_tokens(record.values, "reference", record.origin, tokenizer)
        return _parsed(with_tools(record, tools), tokenizer, data, messages)

    if settings.questions and data.tasks:
        each = [
            source_examples(source, parse)[0] for source in task_sources(data, settings.questions)
        ]
        prompts = [prompt for prompts in zip(*each, strict=False) for prompt in prompts]
    elif settings.path is None:
        prompts, _ = given_examples(settings.prompts, f"{suite.key}.prompts", parse)
    else:
        source = DataSource(
            suite.key,
            Path(settings.path),
            fields=settings.fields,
            timeout_s=data.function_timeout_s,
        )
        prompts, _ = source_examples(source, parse)
    return [
        replace(prompt, id=suite.first_id + place)
        for place, prompt in enumerate(prompts[: settings.count])
    ]


def _parsed(record: Record, tokenizer: Tokenizer, data: DataConfig, messages: bool) -> Prompt:
    text, tokens = prompt_tokens(record, prompt_text(record, tokenizer), tokenizer, data)
    metadata = _metadata(record) | (asked_messages(record) if messages else {})
    return Prompt(0, without_marks(text), tokens, metadata, record.origin)


def _told_pass_rates(data: DataConfig) -> Mapping[str, float] | None:
    """By a prompt's text the share of its samples that pass, of `data.pass_rate_samples`; None
    without them. NaN for a prompt none of whose samples has a score."""
    if data.pass_rate_samples is None:
        return None

    def sample(record: Record) -> tuple[str, float]:
        # `aligner evaluate` writes null where the reward function abstained.
        abstained = "score" in record.values and record.values["score"] is None
        return record.text("prompt"), math.nan if abstained else record.number("score")

    key, scores = "data.pass_rate_samples=", dict[str, list[float]]()
    for text, score in convert(
        read_lines(Path(data.pass_rate_samples), key), sample, f"{key}{data.pass_rate_samples}"
    )[0]:
        scores.setdefault(text, []).append(score)
    limit = data.pass_threshold
    return {
        text: float(passes(torch.tensor(each), limit).nanmean()) for text, each in scores.items()
    }


def _with_pass_rate(
    record: Record, data: DataConfig, tokenizer: Tokenizer, told: Mapping[str, float] | None
) -> Record:
    """The record with the `pass_rate` that was told of its prompt. Raises LeftOut where that, or
    its own, is not wanted."""
    if told is not None:
        text = without_marks(prompt_text(record, tokenizer).text)
        if text not in told:
            raise BadRecord(
                f"{record.origin}: data.pass_rate_samples={data.pass_rate_samples} has no sample of"
                " this record's prompt"
            )
        if math.isnan(told[text]):
            raise LeftOut(
                f"{record.origin}: data.pass_rate_samples={data.pass_rate_samples} has no sample of"
                " this record's prompt with a score"
            )
        record = replace(record, values={**record.values, "pass_rate": told[text]})
    if data.sort_by is not None:
        record.number(data.sort_by.removeprefix("-"))
    if data.pass_rate:
        (low, high), rate = data.pass_rate, record.number("pass_rate")
        if not 0 <= rate <= 1:
            raise BadRecord(f"{record.origin}: field `pass_rate` is {rate:g}, must be in [0, 1]")
        if not low <= rate <= high:
            raise LeftOut(
                f"{record.origin}: `pass_rate` {rate:g} is outside data.pass_rate=[{low:g},"
                f" {high:g}]"
            )
    return record


def _sort_key(sort_by: str, prompt: Prompt) -> float:
    value = float(prompt.metadata[sort_by.removeprefix("-")])
    return -value if sort_by.startswith("-") else value


def _answer(record: Record, tokenizer: Tokenizer, data: DataConfig) -> dict[str, Any]:
    """Return the record's response as `response` and `response_tokens`: the stored token ids, or
    the tokens of its text behind the prompt and an end-of-sequence token.

    Raises BadRecord for a record without a response.
    """
    tokens = drawn_tokens(record.values, "response", record.origin, tokenizer)
    if tokens is not None:
        return {"response": record.values["response"], "response_tokens": tokens.tolist()}
    asked, response = exchange(record, "response", tokenizer)
    text = asked_part(asked.text, data, record.origin)
    given = encoded(text, record.origin, tokenizer, begins=not asked.is_worded)
    tokens = tokenizer.ended(_encoded_after(record, tokenizer, text, given, response))
    return {
        "response": tokenizer.decode_after(given, tokens),
        "response_tokens": tokens.tolist(),
    }


def prompt_tokens(
    record: Record, prompt: PromptText, tokenizer: Tokenizer, data: DataConfig
) -> tuple[str, Tensor]:
    """What the model is given of a prompt, as text and as tokens, int64 [P].

    Raises BadRecord for one that cannot be tokenized, or, unless it is to be cut, is longer than
    `data.max_prompt_tokens`.
    """
    text, limit, origin = (
        asked_part(prompt.text, data, record.origin),
        data.max_prompt_tokens,
        record.origin,
    )
    tokens = encoded(text, origin, tokenizer, begins=not prompt.is_worded)
    if tokens.numel() > limit and data.long_prompts.startswith("cut") and not prompt.is_worded:
        text, tokens = _cut(
            text, tokens, limit, tokenizer, keeps_end=data.long_prompts == "cut_start"
        )
    try:
        return text, within(
            tokens, text, "prompt", origin, limit, f"data.max_prompt_tokens={limit}"
        )
    except BadRecord as error:
        if data.long_prompts == "drop" and tokens.numel():
            raise LeftOut(str(error)) from error
        if data.long_prompts != "error" and prompt.is_worded:
            raise BadRecord(
                f"{error}; data.long_prompts={data.long_prompts} is not supported with chat"
                " messages; use data.long_prompts=drop to skip such records"
            ) from error
        raise


def _cut(
    text: str, tokens: Tensor, limit: int, tokenizer: Tokenizer, *, keeps_end: bool
) -> tuple[str, Tensor]:
    """The end, or the beginning, of a text with more tokens than `limit`, behind the special ones
    that it begins with."""
    before = tokens.numel() - tokenizer.encode(text).numel()
    room, own = limit - before, tokens[before:]
    if room < 1:
        return text, tokens
    own = own[-room:] if keeps_end else own[:room]
    return tokenizer.decode(own, skip_special_tokens=False), torch.cat([tokens[:before], own])


def asked_part(text: str, data: DataConfig, origin: str) -> str:
    """What of a prompt's text lies behind the first `data.prompt_after` and before the last
    `data.prompt_before` there.

    Huang et al. 2023, "The N Implementation Details of RLHF with PPO", detail 2. Raises BadRecord
    where either is missing, or nothing lies between.
    """
    after, before = data.prompt_after, data.prompt_before
    if after is not None:
        _, found, text = text.partition(after)
        if not found:
            raise BadRecord(f"{origin}: the prompt does not contain data.prompt_after={after!r}")
    if before is not None:
        text, found, _ = text.rpartition(before)
        if not found:
            where = "" if after is None else f" after data.prompt_after={after!r}"
            raise BadRecord(
                f"{origin}: the prompt does not contain data.prompt_before={before!r}{where}"
            )
    if not text.strip():
        raise BadRecord(
            f"{origin}: the prompt is empty between data.prompt_after={after!r} and"
            f" data.prompt_before={before!r}"
        )
    return text


def read_prompts(
    path: Path, key: str, kind: str | None = None, *, messages: bool = False
) -> list[Record]:
    """Records with a plain-text prompt of a file, or of standard input where the path is `-`, in
    their order.

    With `messages` a prompt may be chat messages too, which are looked at later. `kind` and `key`
    are those of `read_lines`. Raises ConfigError for what cannot be read or is empty, with its
    place.
    """

    def checked(record: Record) -> Record:
        if not messages:
            record.text("prompt")
        _metadata(record)
        return record

    return convert(read_lines(path, key, kind), checked, f"{key}{path}")[0]


def to_prompt(
    record: Record, text: str, tokenizer: Tokenizer, limit: int, allowed: str, id: int = 0
) -> Prompt:
    """The prompt that a record's plain text is, with what else the record has as its metadata;
    raises as `within` does."""
    return _prompt(record, PromptText(text, is_worded=False), tokenizer, limit, allowed, id)


def to_chat_prompt(
    record: Record, tokenizer: Tokenizer, limit: int, allowed: str, id: int = 0
) -> Prompt:
    """As `to_prompt`, of a plain text or of messages, which are then in the metadata."""
    prompt = _prompt(record, prompt_text(record, tokenizer), tokenizer, limit, allowed, id)
    return replace(prompt, metadata={**prompt.metadata, **asked_messages(record)})


def _prompt(
    record: Record, asked: PromptText, tokenizer: Tokenizer, limit: int, allowed: str, id: int
) -> Prompt:
    tokens = encoded(asked.text, record.origin, tokenizer, begins=not asked.is_worded)
    return Prompt(
        id,
        without_marks(asked.text),
        within(tokens, asked.text, "prompt", record.origin, limit, allowed),
        _metadata(record),
    )


def _metadata(record: Record) -> dict[str, Any]:
    """What goes to the scorer with a prompt's samples. BadRecord for what JSON or UTF-8 does not
    have, such as bytes."""
    metadata = {
        name: value for name, value in record.values.items() if name not in ("prompt", "messages")
    }
    for name, value in metadata.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise BadRecord(
                f"{record.origin}: field `{name}` cannot be sent to the reward as JSON: {error}"
            ) from error
    return metadata


@dataclass(frozen=True)
class ExchangeTokens:
    """A prompt and a response, tokenized together."""

    prompt: Tensor
    """int64 [P]: the prompt's own tokens, from which a response is generated"""
    prompt_part: Tensor
    """int64 [Q]: the beginning of the prompt's tokens that the whole sequence shares; all of them
    unless tokens merge across the boundary"""
    response_part: Tensor
    """int64 [R]: the rest of the sequence"""

    @property
    def has_merge(self) -> bool:
        """Whether tokens merge across the boundary, so that the prompt's last tokens are not in
        the sequence."""
        return self.prompt_part.numel() < self.prompt.numel()


def exchange_tokens(
    record: Record, prompt: PromptText, response: str, tokenizer: Tokenizer, data: DataConfig
) -> ExchangeTokens:
    """Tokenize a prompt and a response together.

    The response begins where the tokens of the prompt alone and of the whole text differ, as in
    TRL's SFT and DPO trainers, but not before the second token: nothing predicts the first.

    Raises BadRecord as `prompt_tokens` does, which may also cut the prompt.
    """
    text = asked_part(prompt.text, data, record.origin)
    kept_text, asked = prompt_tokens(record, prompt, tokenizer, data)
    begins = not prompt.is_worded

    if kept_text != text:  # data.long_prompts cut the prompt
        uncut = encoded(text, record.origin, tokenizer, begins=begins)
        return ExchangeTokens(
            asked, asked, _encoded_after(record, tokenizer, text, uncut, response)
        )

    try:
        whole = encoded(text + response, record.origin, tokenizer, begins=begins)
    except BadRecord:
        encoded(response, record.origin, tokenizer)  # its error shows the response alone
        raise
    start = max(1, common_prefix_length(asked, whole))
    return ExchangeTokens(asked, whole[:start], whole[start:])


def _encoded_after(
    record: Record, tokenizer: Tokenizer, prompt: str, tokens: Tensor, response: str
) -> Tensor:
    """As `Tokenizer.encode_after`. Raises BadRecord for a text that cannot be tokenized."""
    try:
        return tokenizer.encode_after(prompt, tokens, response)
    except AlignerError as error:
        raise BadRecord(f"{record.origin}: {error}") from error


def common_prefix_length(first: Tensor, second: Tensor) -> int:
    """Return the number of tokens with which both sequences, int64 [A] and [B], begin."""
    length = min(first.numel(), second.numel())
    differs = (first[:length] != second[:length]).nonzero()
    return int(differs[0]) if differs.numel() else length


def encoded(text: str, origin: str, tokenizer: Tokenizer, *, begins: bool = False) -> Tensor:
    """As `Tokenizer.encode`. Raises BadRecord for a text that cannot be tokenized."""
    try:
        return tokenizer.encode(text, begins=begins)
    except AlignerError as error:
        raise BadRecord(f"{origin}: {error}") from error


def within(tokens: Tensor, text: str, name: str, origin: str, limit: int, allowed: str) -> Tensor:
    """The tokens of a record's field. Raises BadRecord for none, and for more than `limit`, which
    messages call `allowed`."""
    if not 1 <= tokens.numel() <= limit:
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise BadRecord(
            f"{origin}: the {name} has {tokens.numel()} tokens, allowed: 1 to {allowed}: {shown!r}"
        )
    return tokens


def drawn_tokens(
    values: Mapping[str, Any], name: str, origin: str, tokenizer: Tokenizer
) -> Tensor | None:
    """int64 [R]: what a response was drawn as, its end included where it has one; None where only
    its text is known.

    They are in `NAME_tokens`, or those of a response in `tokens` beside `finish_reason`, as
    `aligner generate` has them; the prompt's are those that it was given as, a chat template's
    special tokens and the tokenizer's own included. Raises BadRecord where they are no tokens, or
    do not say what the text does.
    """
    field = f"{name}_tokens"
    if field not in values and name == "response" and "finish_reason" in values:
        field = "tokens" if isinstance(values.get("tokens"), list) else field
    tokens = values.get(field)
    if tokens is None:
        return None
    is_list = isinstance(tokens, list) and bool(tokens)
    if not is_list or not all(
        type(token) is int and 0 <= token < tokenizer.vocab_size for token in tokens
    ):
        raise BadRecord(
            f"{origin}: field `{field}` must be a non-empty list of token ids from 0 to"
            f" {tokenizer.vocab_size - 1}"
        )
    text = values.get(name)
    if name == "prompt" and isinstance(text, str):
        text = tokenizer.decode(encoded(text, origin, tokenizer))
    said = tokenizer.decode(tokens)
    # The text of a response behind its prompt may begin with a space that decoding alone removes.
    # It is the same behind any prompt, therefore also behind the response itself.
    if text not in (said, tokenizer.decode_after(tokens, tokens)):
        raise BadRecord(
            f"{origin}: `{field}` and `{name}` differ: this model's tokenizer decodes the tokens to"
            f" {said!r}. If another model generated the tokens, set data.generated_tokens=false or"
            f" remove field `{field}`"
        )
    return torch.tensor(tokens, dtype=torch.int64)
