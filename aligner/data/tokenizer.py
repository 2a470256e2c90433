"""Tokenizers: text to tokens and back.

`Tokenizer` is the tokenizer of a model directory, with its chat template and its EOS tokens.
`ResponseDecoder` decodes a response with the space after its prompt. `build_character_tokenizer`
returns a tokenizer of single characters for tiny models. `report_end_tokens` checks the EOS tokens
of a model directory for `aligner validate`; it does not need the model's weights.
"""

import hashlib
import json
import string
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from aligner.data.chat_template import ChatTemplate as ChatTemplate
from aligner.data.chat_template import Messages as Messages
from aligner.data.chat_template import Tools as Tools
from aligner.data.chat_template import find_end_of_turn
from aligner.data.control_tokens import (
    PlainEncoder,
    TurnEncoder,
    find_control_tokens,
    is_escaped,
)
from aligner.data.grammar_matcher import GrammarVocabulary
from aligner.data.grammars import build_vocabulary
from aligner.data.tokenizer_files import (
    TokenizerFiles,
    clean_up_spaces,
    has_chat_template,
    read_chat_templates,
    read_tokenizer_files,
)
from aligner.data.tokenizer_files import read_tokenizer as read_tokenizer
from aligner.errors import AlignerError, ConfigError
from aligner.models.model_source import directory_shape
from aligner.models.shape import ModelShape
from aligner.schema import Config

TokenIds = Tensor | Sequence[int]
"""Token ids, int64 [T] if they are a tensor."""

# Decoders that treat the first token of a text like all others.
_POSITION_INDEPENDENT = frozenset({"ByteLevel", "ByteFallback", "Fuse"})


class ResponseDecoder:
    """Decodes the tokens of a response as the text that follows its prompt.

    The decoders of SentencePiece tokenizers remove the space before the first word of a text. A
    response that is decoded alone loses this space, although it is in the conversation. Therefore
    the response is decoded together with the last tokens of its prompt.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode_after(
        self, prompt: TokenIds, response: TokenIds, *, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of a response after a prompt.

        The text is `decode(prompt + response)[len(decode(prompt)):]`. If the response begins
        inside a character, it is decoded alone.

        Args:
            prompt: The tokens of the prompt, [P].
            response: The tokens of the response, [R].
            skip_special_tokens: Whether special tokens are left out of the text.
        """
        ids = _to_list(response)
        response_text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        if not self._depends_on_prompt:
            return response_text

        context = self._find_context(prompt, skip_special_tokens)
        context_text = self._tokenizer.decode(context, skip_special_tokens=skip_special_tokens)
        full_text: str = self._tokenizer.decode(
            context + ids, skip_special_tokens=skip_special_tokens
        )
        return (
            full_text[len(context_text) :] if full_text.startswith(context_text) else response_text
        )

    def decode_batch_after(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        skip_special_tokens: bool = True,
    ) -> list[str]:
        """Return the texts of the responses in pairs of a prompt and a response.

        Each text is the result of `decode_after`. The batch is faster for tokenizers whose decoder
        does not depend on the prompt.
        """
        if self._depends_on_prompt:
            return [
                self.decode_after(*pair, skip_special_tokens=skip_special_tokens) for pair in pairs
            ]
        responses = [list(response) for _, response in pairs]
        texts: list[str] = self._tokenizer.decode_batch(
            responses, skip_special_tokens=skip_special_tokens
        )
        return texts

    def has_text(self, tokens: TokenIds) -> bool:
        """Return whether the tokens, [T], contain a token that is not a special token."""
        return any(token not in self._special_tokens for token in _to_list(tokens))

    @cached_property
    def _depends_on_prompt(self) -> bool:
        decoder = self._tokenizer.decoder
        # Without a decoder, tokens are joined with spaces.
        return decoder is None or _depends_on_position(json.loads(decoder.__getstate__()))

    def _find_context(self, prompt: TokenIds, skips_special_tokens: bool) -> list[int]:
        """Return the tokens of a prompt from its last token that is text by itself to the end.

        A token that is a part of a byte sequence is not text by itself, and neither is a special
        token that is skipped.
        """
        excluded = self._byte_tokens | (self._special_tokens if skips_special_tokens else set())
        start = len(prompt) - 1
        while start > 0 and not self._is_text(int(prompt[start]), excluded):
            start -= 1
        return _to_list(prompt[max(0, start) :])

    def _is_text(self, token: int, excluded: frozenset[int]) -> bool:
        return token not in excluded and bool(self._tokenizer.id_to_token(token))

    @cached_property
    def _special_tokens(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special)

    @cached_property
    def _byte_tokens(self) -> frozenset[int]:
        """Tokens of single bytes, which SentencePiece vocabularies contain."""
        ids = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(id for id in ids if id is not None)


def _to_list(tokens: TokenIds) -> list[int]:
    return tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)


def _depends_on_position(decoder: dict[str, Any]) -> bool:
    """Return whether a decoder, in the form of tokenizer.json, treats a text's first token
    differently from the others."""
    if decoder["type"] == "Sequence":
        return any(map(_depends_on_position, decoder["decoders"]))
    if decoder["type"] == "Replace":
        # A regular expression can be anchored at the start of the text.
        return "Regex" in decoder["pattern"]
    return decoder["type"] not in _POSITION_INDEPENDENT


# The characters are in the order in which a vocabulary takes them: a small vocabulary contains
# digits, lowercase letters, space and common punctuation.
_COMMON = string.digits + string.ascii_lowercase + " .,:;!?'\"-+*/=()<>[]{}_@#&"
_ACCENTED = "".join(map(chr, range(0xC0, 0x180)))
CHARACTERS = "".join(
    dict.fromkeys(_COMMON + string.ascii_uppercase + string.punctuation + "\n" + _ACCENTED)
)
"""Characters that the character tokenizer can encode, most frequent first."""


def extract_ids_with_bos(encoding: tokenizers.Encoding) -> list[int]:
    """Return the tokens of a text with the special tokens before it, without those after it.

    A text that itself begins with these special tokens does not get them twice.

    Args:
        encoding: The encoding of the text with `add_special_tokens=True`.
    """
    # The mask is 1 for the special tokens that the tokenizer added before and after the text.
    ids = encoding.ids
    mask = "".join(map(str, encoding.special_tokens_mask))
    start = len(mask) - len(mask.lstrip("1"))
    end = len(mask.rstrip("1"))
    text_ids = ids[start:end]
    return text_ids if not text_ids or text_ids[:start] == ids[:start] else ids[:end]


class Tokenizer:
    """The tokenizer of a model directory.

    It adds no special tokens unless a method's argument requests them.
    """

    def __init__(
        self,
        directory: Path,
        date: str | None = None,
        *,
        sanitize: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Read the tokenizer of a model directory.

        Args:
            directory: The model directory.
            date: The date for chat templates that use one, in ISO 8601; None for the current date.
            sanitize: `data.sanitize`.
            chat_template_kwargs: `data.chat_template_kwargs`.

        Raises:
            ConfigError: The configuration or the tokenizer of the model cannot be read.
        """
        shape = directory_shape(directory, "model.path")
        self.directory = directory
        self._date = date
        self._sanitize = sanitize
        self._chat_template_kwargs = chat_template_kwargs
        files = read_tokenizer_files(directory)
        self._tokenizer = files.tokenizer
        self._special_tokens = files.special_tokens
        self._cleans_up_spaces = files.cleans_up_spaces
        self.eos_token_ids: tuple[int, ...] = shape.eos_token_ids
        self.pad_token_id: int = shape.pad_token_id
        self.vocab_size: int = shape.vocab_size

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process read the tokenizer from the same directory."""
        arguments = (self.directory, self._date, self._sanitize, self._chat_template_kwargs)
        return _read_tokenizer_again, arguments

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        """JSON object that determines the tokens of every text and conversation."""
        templates = read_chat_templates(self.directory) if has_chat_template(self.directory) else {}
        uses_date = any("strftime_now" in text for text in templates.values())
        return {
            "tokenizer": hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest(),
            "special_tokens": dict(self._special_tokens),
            "cleans_up_spaces": self._cleans_up_spaces,
            "end_token_ids": [*self.eos_token_ids],
            "vocab_size": self.vocab_size,
            "chat_templates": templates,
            "chat_template_kwargs": self._chat_template_kwargs,
            "sanitize": self._sanitize,
            "date": (self._date or date.today().isoformat()) if uses_date else None,
        }

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template, read at the first access.

        Raises:
            ConfigError: The model has no chat template.
        """
        return ChatTemplate(
            self.directory,
            self._date,
            variables=self._chat_template_kwargs,
            control_tokens=list(find_control_tokens(self._tokenizer)),
            sanitizes=self._sanitize,
        )

    @cached_property
    def grammar_vocabulary(self) -> GrammarVocabulary:
        """The bytes of all tokens, for guided decoding.

        Raises:
            AlignerError: The tokenizer's decoder does not determine the bytes of single tokens.
        """
        return build_vocabulary(self._tokenizer, self.vocab_size)

    def find_special_token(self, text: str) -> int | None:
        """Return the id of a special token; None if the text is not a special token."""
        token: int | None = self._tokenizer.token_to_id(text)
        added = None if token is None else self._tokenizer.get_added_tokens_decoder().get(token)
        return token if added is not None and added.special else None

    @cached_property
    def _plain_encoder(self) -> PlainEncoder:
        return PlainEncoder(self._tokenizer)

    @cached_property
    def _adds_prefix(self) -> bool:
        """Whether the tokenizer puts special tokens before a text."""
        mask = self._tokenizer.encode("", add_special_tokens=True).special_tokens_mask
        return any(mask)

    @cached_property
    def _turn_encoder(self) -> TurnEncoder:
        return TurnEncoder(self._tokenizer)

    @cached_property
    def end_token_id(self) -> int:
        """The EOS token that is appended to a response without one.

        If the model has several EOS tokens, it is the `eos_token` of `tokenizer_config.json`, or
        the first EOS token of `config.json` if `eos_token` is not one of them.

        Raises:
            AlignerError: The model has no EOS token.
        """
        if not self.eos_token_ids:
            raise AlignerError(
                f"{self.directory}: config.json lacks eos_token_id, which is required to end a"
                " response, and generation_config.json has none either"
            )
        eos_text = self._special_tokens.get("eos_token")
        token = None if eos_text is None else self._tokenizer.token_to_id(eos_text)
        return token if token in self.eos_token_ids else self.eos_token_ids[0]

    @cached_property
    def end_of_turn_id(self) -> int | None:
        """The token that the chat template puts after an assistant's message.

        It is None for a model without a chat template, and for a template that puts plain text
        there.
        """
        try:
            return find_end_of_turn(self.chat_template, self._tokenizer)
        except ConfigError:  # rendering a message raises the same error
            return None

    def encode(self, text: str, *, add_bos: bool = False) -> Tensor:
        """Return the tokens of a text, int64 [P].

        Args:
            text: The text.
            add_bos: Whether the tokens begin with the special tokens that the tokenizer puts before
                a text, such as a beginning-of-sequence token.

        Raises:
            AlignerError: The text is not valid UTF-8, or the vocabulary lacks characters of it,
                which the message names.
        """
        try:
            text.encode()
            # Only rendered texts contain escaped control tokens, and the chat template has already
            # written their special tokens.
            if is_escaped(text):
                return torch.tensor(self._plain_encoder.encode(text)[0], dtype=torch.int64)
            tokens = (
                extract_ids_with_bos(self._tokenizer.encode(text, add_special_tokens=True))
                if add_bos and self._adds_prefix
                else self._turn_encoder.encode(text)
            )
        except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
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
        # Several times as fast as torch.tensor.
        return torch.from_numpy(np.array(tokens, dtype=np.int64))

    def compute_token_ends(self, text: str, *, add_bos: bool = False) -> Tensor:
        """Return the end of each token of `encode` in the text.

        Returns:
            The number of characters of the text up to the token's end, int64 [P]; 0 for special
            tokens that the tokenizer adds.
        """
        if is_escaped(text):
            return torch.tensor(self._plain_encoder.encode(text)[1], dtype=torch.int64)
        offsets = self._offset_tokenizer.encode(text, add_special_tokens=False).offsets
        added_count = self.encode(text, add_bos=add_bos).numel() - len(offsets)

        return torch.tensor([0] * added_count + [end for _, end in offsets], dtype=torch.int64)

    @cached_property
    def _offset_tokenizer(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer whose offsets cover all characters of a token.

        The post-processors of byte-level tokenizers exclude the space at a token's start and end.
        """
        tokenizer = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.post_processor = None
        return tokenizer

    def encode_after(self, prompt: str, prompt_tokens: Tensor, text: str) -> Tensor:
        """Return the tokens of a text after a prompt, without a change of the prompt's tokens.

        Prompt and text are tokenized together, and the result is the rest after the prompt's
        tokens. If tokens merge across the boundary, the text is tokenized alone, without the space
        that SentencePiece tokenizers put before a text.

        Args:
            prompt: The text of the prompt.
            prompt_tokens: The tokens of the prompt, with or without special tokens before them,
                int64 [P].
            text: The text after the prompt.

        Returns:
            The tokens of the text, int64 [R].

        Raises:
            AlignerError: The text cannot be tokenized; see `encode`.
        """
        count = prompt_tokens.numel()
        for add_bos in (False, True):
            sequence = self.encode(prompt + text, add_bos=add_bos)
            if torch.equal(sequence[:count], prompt_tokens):
                return sequence[count:]

        return self._encode_inside(text)

    def encode_observation(self, tokens: Tensor, text: str) -> Tensor:
        """Return the tokens of a text that an environment appends to a sequence, int64 [R].

        Args:
            tokens: The tokens of the sequence, int64 [T]. They may be generated tokens, which can
                differ from the tokens of their text, so the texts cannot be tokenized together.
            text: The text of the environment.

        Raises:
            AlignerError: The text cannot be tokenized; see `encode`.
        """
        # After special tokens alone, the text is the first text of its sequence.
        has_text = self._response_decoder.has_text(tokens)
        return self._encode_inside(text) if has_text else self.encode(text)

    def _encode_inside(self, text: str) -> Tensor:
        """Return the tokens of a text without the space that tokenizers put before a text."""
        if not self._puts_space_before_text:
            return self.encode(text)
        # Tokenize the text after a prefix and remove the tokens of the prefix. The prefix rarely
        # merges with the text: few tokens contain a line break, or a digit, and other characters.
        for prefix in ("\n", "0"):
            prefix_ids = self.encode(prefix)
            ids = self.encode(prefix + text)
            if torch.equal(ids[: prefix_ids.numel()], prefix_ids):
                return ids[prefix_ids.numel() :]
        return self.encode(text)

    @cached_property
    def _puts_space_before_text(self) -> bool:
        try:
            line_break, digit, pair = (self.encode(text) for text in ("\n", "0", "\n0"))
        except AlignerError:  # a character vocabulary without line breaks
            return False
        return not torch.equal(pair, torch.cat([line_break, digit]))

    def get_single_token(self, text: str | None, key: str) -> int | None:
        """Return the single token of a text inside other text; None if `text` is None.

        Args:
            text: The text.
            key: The configuration key of the text, for error messages.

        Raises:
            ConfigError: The text is not a single token.
        """
        if text is None:
            return None
        try:
            tokens = self._encode_inside(text)
        except AlignerError as error:
            raise ConfigError(f"{key}={text!r}: {error}") from error
        if len(tokens) != 1:
            raise ConfigError(f"{key}={text!r}: must be a single token, got {len(tokens)} tokens")
        return int(tokens[0])

    def append_end_token(self, tokens: Tensor) -> Tensor:
        """Return a response with exactly one end token at its end, int64 [R].

        If the response has an end-of-turn or EOS token and only whitespace follows it, the result
        ends there. Otherwise `end_token_id` is appended.

        Raises:
            AlignerError: A token must be appended, and the model has no EOS token.
        """
        end = self.find_end(tokens)
        if end is not None:
            return tokens[:end]
        return torch.cat([tokens, torch.tensor([self.end_token_id])])

    def is_eos(self, tokens: Tensor) -> Tensor:
        """Return which tokens are EOS tokens, bool [T]."""
        return torch.isin(tokens, torch.tensor(self.eos_token_ids, dtype=torch.int64))

    def find_end(self, tokens: Tensor) -> int | None:
        """Return the length of a response up to and including its last end-of-turn or EOS token.

        The result is None if there is no such token, or if text other than whitespace follows it.
        """
        ids = tokens.tolist()
        end_ids = (*self.eos_token_ids, self.end_of_turn_id)
        for length in range(len(ids), 0, -1):
            if ids[length - 1] in end_ids:
                return None if self.decode(ids[length:]).strip() else length
        return None

    def decode(self, tokens: Tensor | Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens, [T], with or without special tokens."""
        ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return clean_up_spaces(text) if self._cleans_up_spaces else text

    def decode_after(
        self,
        prompt: Tensor | Sequence[int],
        response: Tensor | Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> str:
        """Return the text of a response after a prompt.

        Unlike `decode(response)`, the text keeps the space before its first word if the tokenizer
        is a SentencePiece tokenizer.

        Args:
            prompt: The tokens of the prompt, [P].
            response: The tokens of the response, [R].
            skip_special_tokens: Whether special tokens are left out of the text.
        """
        text = self._response_decoder.decode_after(
            prompt, response, skip_special_tokens=skip_special_tokens
        )
        return clean_up_spaces(text) if self._cleans_up_spaces else text

    @cached_property
    def _response_decoder(self) -> ResponseDecoder:
        return ResponseDecoder(self._tokenizer)

    def decode_token(self, token: int) -> str:
        """Return the text of a token inside other text; a special token is its name."""
        return self._response_decoder.decode_after([token], [token], skip_special_tokens=False)


def _read_tokenizer_again(
    directory: Path,
    date: str | None,
    sanitize: bool,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> Tokenizer:
    return Tokenizer(directory, date, sanitize=sanitize, chat_template_kwargs=chat_template_kwargs)


def build_run_tokenizer(config: Config, directory: Path) -> Tokenizer:
    """Return the tokenizer of a model directory, with the settings of a run."""
    return Tokenizer(
        directory,
        config.run.date,
        sanitize=config.data.sanitize,
        chat_template_kwargs=config.data.chat_template_kwargs,
    )


def build_character_tokenizer(shape: ModelShape) -> tokenizers.Tokenizer:
    """Return a tokenizer of single characters for a model's vocabulary size.

    The vocabulary contains <pad> and <eos> at the model's ids, and `CHARACTERS` at the others.
    Decoding joins the characters without a separator. There is no unknown token: text with another
    character cannot be encoded.

    Raises:
        ConfigError: The model does not have exactly one EOS token and another padding token, or its
            vocabulary size is too small or too large.
    """
    if len(shape.eos_token_ids) != 1 or shape.pad_token_id in shape.eos_token_ids:
        raise ConfigError(
            "model.config: must have exactly one eos_token_id and a different pad_token_id, got"
            f" eos_token_id={list(shape.eos_token_ids)} and pad_token_id={shape.pad_token_id}"
        )
    special_tokens = {shape.pad_token_id: "<pad>", shape.eos_token_ids[0]: "<eos>"}
    largest = len(CHARACTERS) + len(special_tokens)
    if not max(special_tokens) < shape.vocab_size <= largest:
        raise ConfigError(
            f"model.config.vocab_size={shape.vocab_size}: must be greater than the largest special"
            f" token id ({max(special_tokens)}) and at most {largest}, the character tokenizer's"
            " limit"
        )
    remaining = iter(CHARACTERS)
    vocabulary = {
        special_tokens.get(token) or next(remaining): token for token in range(shape.vocab_size)
    }
    # The unknown token is not in the vocabulary, so that an unknown character is an error and not
    # a token.
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special_tokens.values()))
    return tokenizer


def build_lenient_tokenizer(shape: ModelShape, max_length: int) -> tokenizers.Tokenizer:
    """Return a character tokenizer for any text, for dry runs.

    A dry run uses the data of another model with a tiny model. Therefore the tokenizer replaces
    unknown characters by `?`, and truncates a text to its last `max_length` characters.
    """
    tokenizer = build_character_tokenizer(shape)
    tokenizer.model.unk_token = "?"
    # The expression matches all characters before the last `max_length` ones.
    tokenizer.normalizer = normalizers.Replace(
        tokenizers.Regex(rf"(?m)\A.*(?=.{{{max_length}}}\z)"), ""
    )
    return tokenizer


def describe_end_tokens(ids: Sequence[int], files: TokenizerFiles) -> str:
    """Return the EOS ids with the texts of their tokens, as `aligner validate` prints them."""
    if not ids:
        return "EOS tokens: none; responses end only at their maximum length"
    return "EOS tokens: " + ", ".join(_format_token(id, files) for id in ids)


def check_end_tokens(directory: Path, ids: Sequence[int], files: TokenizerFiles) -> list[str]:
    """Return warnings about tokens that end a text but are not EOS tokens of the model.

    Args:
        directory: The model directory.
        ids: The EOS ids of its config.json and generation_config.json.
        files: The tokenizer of the directory.

    Raises:
        ConfigError: The chat template is not valid.
    """
    warnings = []
    turn_end = None
    if has_chat_template(directory):
        turn_end = find_end_of_turn(ChatTemplate(directory), files.tokenizer)
    listed = ", ".join(_format_token(id, files) for id in ids) or "none"
    if turn_end is not None and turn_end not in ids:
        warnings.append(
            f"{directory}: the chat template ends an assistant's message with the token"
            f" {_format_token(turn_end, files)}, which is not an EOS token ({listed}), so"
            f" generation does not stop at it; add {turn_end} to eos_token_id in"
            " generation_config.json"
        )

    text = files.special_tokens.get("eos_token")
    eos_id = None if text is None else files.tokenizer.token_to_id(text)
    if eos_id is not None and eos_id not in ids and eos_id != turn_end:
        warnings.append(
            f"{directory}: eos_token of the tokenizer is {_format_token(eos_id, files)}, which is"
            f" not an EOS token of the model ({listed}), so generation does not stop at it; add"
            f" {eos_id} to eos_token_id in generation_config.json, or correct eos_token in"
            " tokenizer_config.json"
        )
    return warnings


def report_end_tokens(directory: Path, ids: Sequence[int]) -> list[str]:
    """Return the lines about EOS tokens that `aligner validate` prints for a model directory.

    Args:
        directory: The model directory.
        ids: The EOS ids of its config.json and generation_config.json.

    Raises:
        ConfigError: The tokenizer or the chat template cannot be read.
    """
    files = read_tokenizer_files(directory)
    warnings = check_end_tokens(directory, ids, files)
    return [describe_end_tokens(ids, files), *(f"warning: {warning}" for warning in warnings)]


def _format_token(id: int, files: TokenizerFiles) -> str:
    """Return an id with the text of its token, for messages."""
    text = files.tokenizer.id_to_token(id)
    return f"{id} (no token of the tokenizer)" if text is None else f"{id} {text!r}"
