"""Text to tokens and back: a model directory's tokenizer and chat template, and a tokenizer of single characters."""

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

# In the order in which a vocabulary takes them: a small one has digits, lowercase letters, space and common punctuation.
_COMMON = string.digits + string.ascii_lowercase + " .,:;!?'\"-+*/=()<>[]{}_@#&"
_ACCENTED = "".join(map(chr, range(0xC0, 0x180)))
CHARACTERS = "".join(dict.fromkeys(_COMMON + string.ascii_uppercase + string.punctuation + "\n" + _ACCENTED))

Messages = Sequence[Mapping[str, Any]]
"""Turns of a conversation, each with a `role` and a `content`."""


def read_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """What the directory's `tokenizer.json` describes; ConfigError for a file that is no tokenizer's.

    It neither cuts nor pads: the file may carry settings for batches of its own.
    """
    file = directory / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ConfigError(f"{file}: not a tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


class Tokenizer:
    """The tokenizer of a model directory; adds no special tokens of its own."""

    def __init__(self, directory: Path, date: str | None = None) -> None:
        """`date` is what chat templates that ask for it are told, in ISO 8601; today's where None."""
        shape = directory_shape(directory, "model.path")
        self.directory, self._date = directory, date
        self._tokenizer = read_tokenizer(directory)
        self.eos_token_ids: tuple[int, ...] = shape.eos_token_ids
        self.pad_token_id: int = shape.pad_token_id
        self.vocab_size: int = shape.vocab_size

    @cached_property
    def chat_template(self) -> "ChatTemplate":
        """How chat messages are worded; read when first asked for. Raises ConfigError for a model that has none."""
        return ChatTemplate(self.directory, self._date)

    @cached_property
    def end_token_id(self) -> int:
        """The end-of-sequence token of a text that has none: of several what `tokenizer_config.json` calls `eos_token`.

        The first of those in `config.json` where it names none of them. Raises AlignerError where the model has none.
        """
        if not self.eos_token_ids:
            raise AlignerError(f"{self.directory}: config.json has no eos_token_id for a response to end with")
        named = _special_tokens(_settings(self.directory)).get("eos_token")
        token = self._tokenizer.token_to_id(named) if isinstance(named, str) else None
        return token if token in self.eos_token_ids else self.eos_token_ids[0]

    def encode(self, text: str) -> Tensor:
        """int64 [P]; AlignerError for a text that the vocabulary, or UTF-8, cannot express, naming the characters it lacks."""
        try:
            text.encode()
            tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        except UnicodeEncodeError as error:  # JSON can escape half of a character
            raise AlignerError(f"{text!r} cannot be tokenized: it is not text that UTF-8 has: {error}") from error
        except Exception as error:  # tokenizers raises nothing more specific
            unknown = sorted(character for character in set(text) if self._tokenizer.token_to_id(character) is None)
            raise AlignerError(f"{text!r} cannot be tokenized: the vocabulary lacks {unknown} ({error})") from error
        return torch.tensor(tokens, dtype=torch.int64)

    def single_token(self, text: str | None, key: str) -> int | None:
        """The token that a text is; None for None. Raises ConfigError, naming `key`, for one that is not a single token."""
        if text is None:
            return None
        try:
            tokens = self.encode(text)
        except AlignerError as error:
            raise ConfigError(f"{key}={text!r}: {error}") from error
        if len(tokens) != 1:
            raise ConfigError(f"{key}={text!r}: must be one token, and is {len(tokens)}")
        return int(tokens[0])

    def ended(self, tokens: Tensor) -> Tensor:
        """int64 [R]: a response with an end-of-sequence token last: its own where only space follows, else `end_token_id`.

        Raises AlignerError where the model has none.
        """
        end = self.end_token_id
        ends = torch.isin(tokens, torch.tensor(self.eos_token_ids)).nonzero().flatten().tolist()
        if ends and not self.decode(tokens[ends[-1] + 1 :]).strip():
            return tokens[: ends[-1] + 1]
        return torch.cat([tokens, torch.tensor([end])])

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """The text of tokens (int64 [T]), special tokens left out."""
        return self._tokenizer.decode(torch.as_tensor(tokens, dtype=torch.int64).tolist(), skip_special_tokens=True)


class ChatTemplate:
    """The chat template of a model directory, rendered in a sandbox: `chat_template.jinja` where there is one.

    Else it is what `tokenizer_config.json` has under `chat_template`; of several templates the one called `default`.
    """

    def __init__(self, directory: Path, date: str | None = None) -> None:
        """`date` is what `strftime_now` is told, in ISO 8601; the moment's own where None.

        Raises ConfigError for a directory without a chat template, or one that is not Jinja."""
        settings = _settings(directory)
        self._special_tokens = _special_tokens(settings)
        text = _template_text(directory, settings)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: _date(date).strftime(form)}
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{directory}: its chat template cannot be read: {error}") from error

    def render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """The conversation as text; with a generation prompt it ends where the assistant is to answer.

        Raises AlignerError for messages that the template refuses.
        """
        try:
            # Templates ask whether there are tools or documents by comparing with none.
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # the template is a program of the model's, and fails in its own ways
            raise AlignerError(f"the model's chat template refuses the messages: {error}") from error


def _settings(directory: Path) -> dict[str, Any]:
    """What `tokenizer_config.json` says; nothing where there is none."""
    file = directory / "tokenizer_config.json"
    return _json_object(file) if file.is_file() else {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The texts of `bos_token`, `eos_token` and the others that the settings name."""
    tokens = {key: value for key, value in settings.items() if key.endswith("_token")}
    return {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}


def _json_object(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: not a JSON object but {type(settings).__name__}")
    return settings


def _template_text(directory: Path, settings: Mapping[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    text = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(text, list):
        named = {str(entry.get("name")): entry.get("template") for entry in text if isinstance(entry, dict)}
        text = named.get("default")
    if not isinstance(text, str):
        raise ConfigError(
            f"{directory}: the data has chat messages, but the model has no chat template, neither chat_template.jinja nor a"
            " `chat_template` in tokenizer_config.json; add one, or give plain text"
        )
    return text


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as it is: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _date(text: str | None) -> datetime:
    return datetime.now() if text is None else datetime.fromisoformat(text)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks what an assistant says and changes no text."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def character_tokenizer(shape: ModelShape) -> tokenizers.Tokenizer:
    """A tokenizer whose vocabulary is exactly the model's: <pad> and <eos> at the model's ids, `CHARACTERS` at the others.

    Decoding joins the characters with nothing between them. There is no unknown token: text with another character
    cannot be encoded. Raises ConfigError for special ids or a vocabulary size that this does not fit.
    """
    if len(shape.eos_token_ids) != 1 or shape.pad_token_id in shape.eos_token_ids:
        raise ConfigError(
            "model.config must give one eos_token_id and another pad_token_id, got"
            f" eos_token_id={list(shape.eos_token_ids)} and pad_token_id={shape.pad_token_id}"
        )
    special = {shape.pad_token_id: "<pad>", shape.eos_token_ids[0]: "<eos>"}
    largest = len(CHARACTERS) + len(special)
    if not max(special) < shape.vocab_size <= largest:
        raise ConfigError(
            f"model.config.vocab_size={shape.vocab_size}: a character tokenizer allows at most {largest} tokens, and more than"
            f" the largest special id, {max(special)}"
        )
    remaining = iter(CHARACTERS)
    vocabulary = {special.get(token) or next(remaining): token for token in range(shape.vocab_size)}
    # The unknown token is not in the vocabulary: that makes an unknown character an error instead of a token.
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special.values()))
    return tokenizer


def lenient_tokenizer(shape: ModelShape, longest: int) -> tokenizers.Tokenizer:
    """`character_tokenizer` for any text, cut to its last `longest` characters: those that it does not know become `?`.

    For dry runs, whose texts were meant for another model.
    """
    tokenizer = character_tokenizer(shape)
    tokenizer.model.unk_token = "?"
    tokenizer.normalizer = normalizers.Replace(tokenizers.Regex(rf"(?m)\A.*(?=.{{{longest}}}\z)"), "")
    return tokenizer
