"""Text to tokens and back: a model directory's tokenizer and chat template, and a tokenizer of
single characters."""

import json
import string
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
import torch
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from aligner.errors import AlignerError, ConfigError
from aligner.models.model_source import directory_shape
from aligner.models.shape import ModelShape

# In the order in which a vocabulary takes them: a small one has digits, lowercase letters, space
# and common punctuation.
_COMMON = string.digits + string.ascii_lowercase + " .,:;!?'\"-+*/=()<>[]{}_@#&"
_ACCENTED = "".join(map(chr, range(0xC0, 0x180)))
CHARACTERS = "".join(
    dict.fromkeys(_COMMON + string.ascii_uppercase + string.punctuation + "\n" + _ACCENTED)
)

Messages = Sequence[Mapping[str, Any]]
"""Turns of a conversation, each with a `role` and a `content`, or `tool_calls`."""

Tools = Sequence[Mapping[str, Any]]
"""Functions that an assistant may call, described as JSON schemas."""

_MARKS = ("\ufdd0generation\ufdd1", "\ufdd0endgeneration\ufdd1")
"""What a template's text has, while it is rendered, where `{% generation %}` begins and ends: no
character of any text."""


def read_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """What the directory's `tokenizer.json` describes; ConfigError for a file that is no
    tokenizer's.

    It neither cuts nor pads: the file may carry settings for batches of its own.
    """
    file = directory / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ConfigError(f"{file}: not a valid tokenizer file: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def with_beginning(encoding: tokenizers.Encoding) -> list[int]:
    """The tokens of a text with the special ones that its tokenizer puts before it, not with those
    that it puts behind.

    `encoding` is the tokenizer's own, with special tokens. A text that begins with them itself does
    not get them again.
    """
    ids, added = encoding.ids, "".join(map(str, encoding.special_tokens_mask))
    before, behind = len(added) - len(added.lstrip("1")), len(added.rstrip("1"))
    own = ids[before:behind]
    return own if not own or own[:before] == ids[:before] else ids[:behind]


class Tokenizer:
    """The tokenizer of a model directory; adds no special tokens but those that it is asked for."""

    def __init__(self, directory: Path, date: str | None = None) -> None:
        """`date` is what chat templates that ask for it are told, in ISO 8601; today's where
        None."""
        shape = directory_shape(directory, "model.path")
        self.directory, self._date = directory, date
        self._tokenizer = read_tokenizer(directory)
        self.eos_token_ids: tuple[int, ...] = shape.eos_token_ids
        self.pad_token_id: int = shape.pad_token_id
        self.vocab_size: int = shape.vocab_size

    @cached_property
    def chat_template(self) -> "ChatTemplate":
        """How chat messages are worded; read when first asked for. Raises ConfigError for a model
        that has none."""
        return ChatTemplate(self.directory, self._date)

    @cached_property
    def end_token_id(self) -> int:
        """The end-of-sequence token of a text that has none: of several what
        `tokenizer_config.json` calls `eos_token`.

        The first of those in `config.json` where it names none of them. Raises AlignerError where
        the model has none.
        """
        if not self.eos_token_ids:
            raise AlignerError(
                f"{self.directory}: config.json lacks eos_token_id, which is required to end a"
                " response"
            )
        named = _special_tokens(_settings(self.directory)).get("eos_token")
        token = self._tokenizer.token_to_id(named) if isinstance(named, str) else None
        return token if token in self.eos_token_ids else self.eos_token_ids[0]

    def encode(self, text: str, *, begins: bool = False) -> Tensor:
        """int64 [P]; where it `begins` a sequence `with_beginning`, such as a beginning-of-sequence
        token.

        AlignerError for a text that the vocabulary, or UTF-8, cannot express, naming the characters
        it lacks.
        """
        try:
            text.encode()
            encoding = self._tokenizer.encode(text, add_special_tokens=begins)
            tokens = with_beginning(encoding) if begins else encoding.ids
        except UnicodeEncodeError as error:  # JSON can escape half of a character
            raise AlignerError(
                f"{text!r} cannot be tokenized: it is not valid UTF-8: {error}"
            ) from error
        except Exception as error:  # tokenizers raises nothing more specific
            unknown = sorted(
                character
                for character in set(text)
                if self._tokenizer.token_to_id(character) is None
            )
            raise AlignerError(
                f"{text!r} cannot be tokenized: the vocabulary lacks the characters {unknown}"
                f" ({error})"
            ) from error
        return torch.tensor(tokens, dtype=torch.int64)

    def single_token(self, text: str | None, key: str) -> int | None:
        """The token that a text is; None for None. Raises ConfigError, naming `key`, for one that
        is not a single token."""
        if text is None:
            return None
        try:
            tokens = self.encode(text)
        except AlignerError as error:
            raise ConfigError(f"{key}={text!r}: {error}") from error
        if len(tokens) != 1:
            raise ConfigError(f"{key}={text!r}: must be a single token, got {len(tokens)} tokens")
        return int(tokens[0])

    def ended(self, tokens: Tensor) -> Tensor:
        """int64 [R]: a response with an end-of-sequence token last: its own where only space
        follows, else `end_token_id`.

        Raises AlignerError where the model has none.
        """
        end, own = self.end_token_id, self.end_of(tokens)
        return torch.cat([tokens, torch.tensor([end])]) if own is None else tokens[:own]

    def ends(self, tokens: Tensor) -> Tensor:
        """bool [T]: which tokens are end-of-sequence tokens."""
        return torch.isin(tokens, torch.tensor(self.eos_token_ids, dtype=torch.int64))

    def end_of(self, tokens: Tensor) -> int | None:
        """Behind how many tokens a response has ended: those up to an end-of-sequence token that
        only space follows.

        None where there is no such token.
        """
        ends = self.ends(tokens).nonzero().flatten().tolist()
        return ends[-1] + 1 if ends and not self.decode(tokens[ends[-1] + 1 :]).strip() else None

    def decode(self, tokens: Tensor | Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens (int64 [T]), special tokens left out or not."""
        ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def piece(self, token: int) -> str:
        """What a token is within a text; special ones by their names."""
        # Decoders that leave out the space before a text's first word do so before the first token
        # that they are given.
        once, twice = (self.decode([token] * times, skip_special_tokens=False) for times in (1, 2))
        return twice[len(once) :]


class ChatTemplate:
    """The chat template of a model directory, rendered in a sandbox: `chat_template.jinja` where
    there is one.

    Else it is what `tokenizer_config.json` has under `chat_template`; of several templates the one
    called `default`, or for messages with tools, where there is one, `tool_use`.
    """

    def __init__(self, directory: Path, date: str | None = None) -> None:
        """`date` is what `strftime_now` is told, in ISO 8601; the moment's own where None.

        Raises ConfigError for a directory without a chat template, or one that is not Jinja."""
        settings = _settings(directory)
        self._special_tokens = _special_tokens(settings)
        texts = _template_texts(directory, settings)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: _date(date).strftime(form),
        }
        try:
            self._templates = {name: environment.from_string(text) for name, text in texts.items()}
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"{directory}: the chat template is not valid Jinja: {error}"
            ) from error

    def render(
        self, messages: Messages, tools: Tools | None = None, *, add_generation_prompt: bool
    ) -> str:
        """The conversation as text; with a generation prompt it ends where the assistant is to
        answer.

        Raises AlignerError for messages that the template refuses.
        """
        return "".join(self.marked(messages, tools, add_generation_prompt=add_generation_prompt))

    def marked(
        self, messages: Messages, tools: Tools | None = None, *, add_generation_prompt: bool = False
    ) -> list[str]:
        """The text in parts, of which every second, from the second on, is what `{% generation %}`
        marks as the assistant's.

        Raises as `render` does.
        """
        text = self._rendered(messages, tools, add_generation_prompt)
        return [part for marked in text.split(_MARKS[0]) for part in marked.split(_MARKS[1])]

    def _rendered(
        self, messages: Messages, tools: Tools | None, add_generation_prompt: bool
    ) -> str:
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        try:
            # Templates ask whether there are tools or documents by comparing with none.
            return self._templates[name].render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **self._special_tokens,
            )
        # the template is a program of the model's, and fails in its own ways
        except Exception as error:
            raise AlignerError(
                f"the model's chat template cannot render the messages: {error}"
            ) from error


def _settings(directory: Path) -> dict[str, Any]:
    """What `tokenizer_config.json` says; nothing where there is none."""
    file = directory / "tokenizer_config.json"
    return _json_object(file) if file.is_file() else {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The texts of `bos_token`, `eos_token` and the others that the settings name."""
    tokens = {key: value for key, value in settings.items() if key.endswith("_token")}
    return {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in tokens.items()
    }


def _json_object(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(settings).__name__}")
    return settings


def _template_texts(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The texts of `default` and what other templates there are."""
    file = directory / "chat_template.jinja"
    given = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    named = given if isinstance(given, list) else [{"name": "default", "template": given}]
    entries = [
        (str(entry.get("name")), entry.get("template"))
        for entry in named
        if isinstance(entry, dict)
    ]
    texts = {name: text for name, text in entries if isinstance(text, str)}
    if "default" not in texts:
        raise ConfigError(
            f"{directory}: chat messages require a chat template, but the model has neither"
            " chat_template.jinja nor `chat_template` in tokenizer_config.json; add one, or use"
            " plain-text prompts"
        )
    return texts


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _date(text: str | None) -> datetime:
    return datetime.now() if text is None else datetime.fromisoformat(text)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which puts `_MARKS` around what an assistant says."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        begins, ends = (nodes.Output([nodes.TemplateData(mark)]) for mark in _MARKS)
        return [begins, *parser.parse_statements(("name:endgeneration",), drop_needle=True), ends]


def character_tokenizer(shape: ModelShape) -> tokenizers.Tokenizer:
    """A tokenizer whose vocabulary is exactly the model's: <pad> and <eos> at the model's ids,
    `CHARACTERS` at the others.

    Decoding joins the characters with nothing between them. There is no unknown token: text with
    another character cannot be encoded. Raises ConfigError for special ids or a vocabulary size
    that this does not fit.
    """
    if len(shape.eos_token_ids) != 1 or shape.pad_token_id in shape.eos_token_ids:
        raise ConfigError(
            "model.config: must have exactly one eos_token_id and a different pad_token_id, got"
            f" eos_token_id={list(shape.eos_token_ids)} and pad_token_id={shape.pad_token_id}"
        )
    special = {shape.pad_token_id: "<pad>", shape.eos_token_ids[0]: "<eos>"}
    largest = len(CHARACTERS) + len(special)
    if not max(special) < shape.vocab_size <= largest:
        raise ConfigError(
            f"model.config.vocab_size={shape.vocab_size}: must be greater than the largest special"
            f" token id ({max(special)}) and at most {largest}, the character tokenizer's limit"
        )
    remaining = iter(CHARACTERS)
    vocabulary = {special.get(token) or next(remaining): token for token in range(shape.vocab_size)}
    # The unknown token is not in the vocabulary: that makes an unknown character an error instead
    # of a token.
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special.values()))
    return tokenizer


def lenient_tokenizer(shape: ModelShape, longest: int) -> tokenizers.Tokenizer:
    """`character_tokenizer` for any text, cut to its last `longest` characters: those that it does
    not know become `?`.

    For dry runs, whose texts were meant for another model.
    """
    tokenizer = character_tokenizer(shape)
    tokenizer.model.unk_token = "?"
    tokenizer.normalizer = normalizers.Replace(
        tokenizers.Regex(rf"(?m)\A.*(?=.{{{longest}}}\z)"), ""
    )
    return tokenizer
