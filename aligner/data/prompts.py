"""Prompts and responses of records, plain texts or chat messages, and prompts as an endless stream.

Plain texts are taken as they are. Messages are a list of `{"role": …, "content": …}`; what a response is then, its
end-of-turn marker included, is what the model's chat template adds to the prompt once it is answered. Of a conversation of
several turns only the last answer is learned from; the earlier ones are part of the prompt.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from aligner.errors import AlignerError, ConfigError
from aligner.schema import DataConfig, EvaluationConfig
from aligner.schema.data_sources import DataSource

_ASSISTANT = "assistant"
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

    def parse(record: Record) -> Prompt:
        return _parsed(record, tokenizer, data)

    sources, weights, notices = read_examples(data, parse)
    return PromptStream(sources, weights, seed=seed, shuffle=data.shuffle, notices=notices)


def open_evaluation_prompts(settings: EvaluationConfig, data: DataConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts that a run is evaluated on, in their order, tokenized; `reference` in their metadata is a text.

    `data` says of them what it says of those that are learned from: where they begin and end, and how long they may be.

    Their ids are beyond those of any training step, so that no random stream is shared. Raises ConfigError as `open_prompts`.
    """

    def parse(record: Record) -> Prompt:
        if "reference" in record.values:
            record.text("reference")
        if not data.drawn_tokens:
            values = {name: value for name, value in record.values.items() if name != "reference_tokens"}
            record = replace(record, values=values)
        drawn_tokens(record.values, "reference", record.origin, tokenizer)
        return _parsed(record, tokenizer, data)

    if settings.path is None:
        prompts, _ = given_examples(settings.prompts, "evaluation.prompts", parse)
    else:
        source = DataSource("evaluation", Path(settings.path), fields=settings.fields, timeout_s=data.function_timeout_s)
        prompts, _ = source_examples(source, parse)
    return [replace(prompt, id=_EVALUATION_IDS + place) for place, prompt in enumerate(prompts[: settings.count])]


def _parsed(record: Record, tokenizer: Tokenizer, data: DataConfig) -> Prompt:
    text, limit = asked_part(prompt_text(record, tokenizer), data, record.origin), data.max_prompt_tokens
    return to_prompt(record, text, tokenizer, limit, f"data.max_prompt_tokens={limit}")


def asked_part(text: str, data: DataConfig, origin: str) -> str:
    """What of a prompt's text lies behind the first `data.prompt_after` and before the last `data.prompt_before` there.

    Huang et al. 2023, "The N Implementation Details of RLHF with PPO", detail 2. Raises BadRecord where either is missing, or
    nothing lies between.
    """
    after, before = data.prompt_after, data.prompt_before
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
    return within(tokens, text, name, origin, limit, allowed)


def within(tokens: Tensor, text: str, name: str, origin: str, limit: int, allowed: str) -> Tensor:
    """The tokens of a record's field. Raises BadRecord for none, and for more than `limit`, which messages call `allowed`."""
    if not 1 <= tokens.numel() <= limit:
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise BadRecord(f"{origin}: the {name} has {tokens.numel()} tokens, allowed: 1 to {allowed}: {shown!r}")
    return tokens


def drawn_tokens(values: Mapping[str, Any], name: str, origin: str, tokenizer: Tokenizer) -> Tensor | None:
    """int64 [R]: what a response was drawn as, its end included where it has one; None where only its text is known.

    They are in `NAME_tokens`, or those of a response in `tokens` beside `finish_reason`, as `aligner generate` has them.
    Raises BadRecord where they are no tokens, or do not say what the text does.
    """
    field = f"{name}_tokens"
    if field not in values and name == "response" and "finish_reason" in values:
        field = "tokens" if isinstance(values.get("tokens"), list) else field
    tokens = values.get(field)
    if tokens is None:
        return None
    is_list = isinstance(tokens, list) and bool(tokens)
    if not is_list or not all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in tokens):
        raise BadRecord(f"{origin}: `{field}` must be a list of the model's tokens, 0 to {tokenizer.vocab_size - 1}")
    if (said := tokenizer.decode(tokens)) != values.get(name):
        raise BadRecord(
            f"{origin}: `{field}` and `{name}` are not the same with this model's tokenizer, by which the tokens say {said!r};"
            f" where another model drew them, give data.drawn_tokens=false, or leave them out"
        )
    return torch.tensor(tokens, dtype=torch.int64)


def prompt_text(record: Record, tokenizer: Tokenizer) -> str:
    """A record's `prompt`, a text or messages, or else its `messages`; an assistant's message at the end is left out.

    Raises BadRecord for a record that has none or an empty one, ConfigError for messages where the model has no template.
    """
    name = "messages" if "prompt" not in record.values and "messages" in record.values else "prompt"
    if name == "prompt" and not isinstance(record.values.get(name), list):
        return record.text(name)
    messages = _messages(record, name)
    if messages[-1]["role"] == _ASSISTANT:
        messages = messages[:-1]
    return _prompt(record, name, messages, tokenizer)


def exchange(record: Record, answer: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """The prompt's and the response's text; `answer` is the response's field.

    The response is a text or one assistant's message to the `prompt`, or the end of a whole conversation, for which
    `messages` is another name of `response`. Raises as `prompt_text` does.
    """
    name = "messages" if answer == "response" and answer not in record.values and "messages" in record.values else answer
    prompt, response = record.values.get("prompt"), record.values.get(name)
    if not isinstance(prompt, list) and not isinstance(response, list):
        return record.text("prompt"), record.text(name)
    asked_first = _messages(record, "prompt") if isinstance(prompt, list) else []
    last = _messages(record, name) if isinstance(response, list) else [{"role": _ASSISTANT, "content": record.text(name)}]
    said = [*asked_first, *last]
    if said[-1]["role"] != _ASSISTANT:
        raise BadRecord(f"{record.origin}: {name}: the last message is of the {said[-1]['role']}, must be of the {_ASSISTANT}")
    if not said[-1]["content"].strip():
        raise BadRecord(f"{record.origin}: the {answer} is empty")
    asked = _prompt(record, name, said[:-1], tokenizer)
    answered = _rendered(record, name, said, tokenizer, add_generation_prompt=False)
    if not answered.startswith(asked):
        raise BadRecord(
            f"{record.origin}: {name}: the model's chat template words the prompt differently once it is answered, so that no"
            " response can be told from it; give plain text"
        )
    return asked, answered[len(asked) :]


def _messages(record: Record, name: str) -> list[dict[str, Any]]:
    messages = record.items(name)
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise BadRecord(f"{record.origin}: {name}[{index}]: a message needs a `role` and a `content`, both texts")
    return messages


def _prompt(record: Record, name: str, messages: list[dict[str, Any]], tokenizer: Tokenizer) -> str:
    if not messages or messages[-1]["role"] == _ASSISTANT:
        raise BadRecord(f"{record.origin}: {name}: the {_ASSISTANT}'s last message answers none of another role")
    return _rendered(record, name, messages, tokenizer, add_generation_prompt=True)


def _rendered(
    record: Record, name: str, messages: list[dict[str, Any]], tokenizer: Tokenizer, *, add_generation_prompt: bool
) -> str:
    try:
        return tokenizer.chat_template.render(messages, add_generation_prompt=add_generation_prompt)
    except ConfigError:
        raise
    except AlignerError as error:
        raise BadRecord(f"{record.origin}: {name}: {error}") from error
