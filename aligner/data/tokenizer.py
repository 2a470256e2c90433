"""Text to tokens and back: a model directory's tokenizer, and a tokenizer of single characters."""

import json
import string
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from aligner.data.chat_template import ChatTemplate as ChatTemplate
from aligner.data.chat_template import Messages as Messages
from aligner.data.chat_template import Tools as Tools
from aligner.data.chat_template import end_of_turn
from aligner.data.control_tokens import PlainEncoder, control_tokens, is_escaped
from aligner.data.tokenizer_files import (
    TokenizerFiles,
    has_chat_template,
    read_tokenizer_files,
    without_extra_spaces,
)
from aligner.data.tokenizer_files import read_tokenizer as read_tokenizer
from aligner.errors import AlignerError, ConfigError
from aligner.models.model_source import directory_shape
from aligner.models.shape import ModelShape
from aligner.schema import Config

TokenIds = Tensor | Sequence[int]

_INDEPENDENT = frozenset({"ByteLevel", "ByteFallback", "Fuse"})
"""Decoders that treat the first token of a text like all others."""


class ResponseDecoder:
    """Decodes tokens as text behind the tokens of a prompt.

    The decoders of SentencePiece tokenizers remove the space before the first word of a text. A
    response that is decoded alone loses that space, although it is in the conversation. Therefore
    the response is decoded together with the last tokens of its prompt.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode_after(
        self, prompt: TokenIds, response: TokenIds, *, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of a response, int64 [R], behind a prompt, int64 [P].

        The text is `decode(prompt + response)[len(decode(prompt)):]`. If the response begins
        inside a character, it is decoded alone.
        """
        ids = _list(response)
        alone: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        if not self._depends_on_prompt:
            return alone

        context = self._context(prompt, skip_special_tokens)
        before = self._tokenizer.decode(context, skip_special_tokens=skip_special_tokens)
        whole: str = self._tokenizer.decode(context + ids, skip_special_tokens=skip_special_tokens)
        return whole[len(before) :] if whole.startswith(before) else alone

    def decode_batch_after(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        skip_special_tokens: bool = True,
    ) -> list[str]:
        """As `decode_after`, for pairs of a prompt and a response."""
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
        """Return whether tokens, int64 [T], are more than special tokens."""
        return any(token not in self._special_tokens for token in _list(tokens))

    @cached_property
    def _depends_on_prompt(self) -> bool:
        decoder = self._tokenizer.decoder
        # Without a decoder, tokens are joined with spaces.
        return decoder is None or _depends_on_position(json.loads(decoder.__getstate__()))

    def _context(self, prompt: TokenIds, skips_special_tokens: bool) -> list[int]:
        """Return the last tokens of a prompt, from the last one that is a text by itself.

        A part of a byte sequence is none, and neither is a special token that is skipped.
        """
        no_text = self._byte_tokens | (self._special_tokens if skips_special_tokens else set())
        start = len(prompt) - 1
        while start > 0 and not self._is_text(int(prompt[start]), no_text):
            start -= 1
        return _list(prompt[max(0, start) :])

    def _is_text(self, token: int, no_text: frozenset[int]) -> bool:
        return token not in no_text and bool(self._tokenizer.id_to_token(token))

    @cached_property
    def _special_tokens(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special)

    @cached_property
    def _byte_tokens(self) -> frozenset[int]:
        """The tokens of single bytes that SentencePiece vocabularies have."""
        ids = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(id for id in ids if id is not None)


def _list(tokens: TokenIds) -> list[int]:
    return tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)


def _depends_on_position(decoder: dict[str, Any]) -> bool:
    """Return whether a decoder, as tokenizer.json has it, treats a text's first token apart."""
    if decoder["type"] == "Sequence":
        return any(map(_depends_on_position, decoder["decoders"]))
    if decoder["type"] == "Replace":
        # A regular expression can be anchored at the start of the text.
        return "Regex" in decoder["pattern"]
    return decoder["type"] not in _INDEPENDENT


# In the order in which a vocabulary takes them: a small one has digits, lowercase letters, space
# and common punctuation.
_COMMON = string.digits + string.ascii_lowercase + " .,:;!?'\"-+*/=()<>[]{}_@#&"
_ACCENTED = "".join(map(chr, range(0xC0, 0x180)))
CHARACTERS = "".join(
    dict.fromkeys(_COMMON + string.ascii_uppercase + string.punctuation + "\n" + _ACCENTED)
)


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
            date: The date for chat templates that use one, in ISO 8601; None for the current date.
            sanitize: `data.sanitize`.
            chat_template_kwargs: `data.chat_template_kwargs`.
        """
        shape = directory_shape(directory, "model.path")
        self.directory, self._date = directory, date
        self._sanitize, self._chat_template_kwargs = sanitize, chat_template_kwargs
        files = read_tokenizer_files(directory)
        self._tokenizer, self._special_tokens = files.tokenizer, files.special_tokens
        self._cleans_up_spaces = files.cleans_up_spaces
        self.eos_token_ids: tuple[int, ...] = shape.eos_token_ids
        self.pad_token_id: int = shape.pad_token_id
        self.vocab_size: int = shape.vocab_size

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """How chat messages are worded; read when first asked for. Raises ConfigError for a model
        that has none."""
        return ChatTemplate(
            self.directory,
            self._date,
            variables=self._chat_template_kwargs,
            control_tokens=list(control_tokens(self._tokenizer)),
            sanitizes=self._sanitize,
        )

    @cached_property
    def _plain_encoder(self) -> PlainEncoder:
        return PlainEncoder(self._tokenizer)

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
                " response, and generation_config.json has none either"
            )
        named = self._special_tokens.get("eos_token")
        token = None if named is None else self._tokenizer.token_to_id(named)
        return token if token in self.eos_token_ids else self.eos_token_ids[0]

    @cached_property
    def end_of_turn_id(self) -> int | None:
        """The token that the chat template puts after an assistant's message.

        None for a model without a chat template, and for a template that puts plain text there.
        """
        try:
            return end_of_turn(self.chat_template, self._tokenizer)
        except ConfigError:  # raised with its reason where messages are rendered
            return None

    def encode(self, text: str, *, begins: bool = False) -> Tensor:
        """int64 [P]; where it `begins` a sequence `with_beginning`, such as a beginning-of-sequence
        token.

        AlignerError for a text that the vocabulary, or UTF-8, cannot express, naming the characters
        it lacks.
        """
        try:
            text.encode()
            if is_escaped(text):  # a chat template has written the beginning of the sequence
                return torch.tensor(self._plain_encoder.encode(text)[0], dtype=torch.int64)
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

    def token_ends(self, text: str, *, begins: bool = False) -> Tensor:
        """Return for each token of `encode` the number of characters of the text up to its end,
        int64 [P]; 0 for special tokens that the tokenizer adds."""
        if is_escaped(text):
            return torch.tensor(self._plain_encoder.encode(text)[1], dtype=torch.int64)
        offsets = self._without_post_processor.encode(text, add_special_tokens=False).offsets
        added = self.encode(text, begins=begins).numel() - len(offsets)

        return torch.tensor([0] * added + [end for _, end in offsets], dtype=torch.int64)

    @cached_property
    def _without_post_processor(self) -> tokenizers.Tokenizer:
        """The tokenizer whose offsets cover all characters of a token: post-processors of
        byte-level tokenizers leave out the space at a token's start and end."""
        tokenizer = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.post_processor = None
        return tokenizer

    def encode_after(self, prompt: str, prompt_tokens: Tensor, text: str) -> Tensor:
        """Return the tokens of a text behind a prompt whose tokens stay as they are, int64 [R].

        They are the rest of the tokens of prompt and text together, if these begin with the
        prompt's. If tokens merge across the boundary, the text is tokenized alone, without the
        space that SentencePiece tokenizers put before a text. Raises AlignerError as `encode`.
        """
        count = prompt_tokens.numel()
        for begins in (False, True):
            whole = self.encode(prompt + text, begins=begins)
            if torch.equal(whole[:count], prompt_tokens):
                return whole[count:]

        return self._encode_inside(text)

    def encode_observation(self, tokens: Tensor, text: str) -> Tensor:
        """Return the tokens of a text that an environment adds behind other tokens, int64 [R].

        The other tokens, int64 [T], stay as they are; they may be generated ones, which differ from
        the tokens of their text. Raises AlignerError as `encode`.
        """
        # A text behind nothing but special tokens is the first text of its sequence.
        has_text = self._response_decoder.has_text(tokens)
        return self._encode_inside(text) if has_text else self.encode(text)

    def _encode_inside(self, text: str) -> Tensor:
        """Return the tokens of a text without the space that tokenizers put before a text."""
        if not self._puts_space_before_text:
            return self.encode(text)
        # Few tokens contain a line break and other characters, or a digit and other characters.
        for prefix in ("\n", "0"):
            alone, both = self.encode(prefix), self.encode(prefix + text)
            if torch.equal(both[: alone.numel()], alone):
                return both[alone.numel() :]
        return self.encode(text)

    @cached_property
    def _puts_space_before_text(self) -> bool:
        try:
            line_break, letter, both = (self.encode(text) for text in ("\n", "0", "\n0"))
        except AlignerError:  # a vocabulary without line breaks, of single characters
            return False
        return not torch.equal(both, torch.cat([line_break, letter]))

    def single_token(self, text: str | None, key: str) -> int | None:
        """Return the token that stands for a text inside other text; None for None.

        Raises ConfigError, naming `key`, for a text that is not a single token.
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

    def ended(self, tokens: Tensor) -> Tensor:
        """Return a response with one end token last, int64 [R].

        The response's own end-of-turn or EOS token counts if only space follows it; otherwise
        `end_token_id` is appended. Raises AlignerError for a model without an EOS token.
        """
        own = self.end_of(tokens)
        if own is not None:
            return tokens[:own]
        return torch.cat([tokens, torch.tensor([self.end_token_id])])

    def ends(self, tokens: Tensor) -> Tensor:
        """bool [T]: which tokens are end-of-sequence tokens."""
        return torch.isin(tokens, torch.tensor(self.eos_token_ids, dtype=torch.int64))

    def end_of(self, tokens: Tensor) -> int | None:
        """Return the length of a response up to its last end-of-turn or EOS token.

        None if there is no such token, or if text other than space follows it.
        """
        is_end = self.ends(tokens)
        if self.end_of_turn_id is not None:
            is_end |= tokens == self.end_of_turn_id
        ends = is_end.nonzero().flatten().tolist()
        return ends[-1] + 1 if ends and not self.decode(tokens[ends[-1] + 1 :]).strip() else None

    def decode(self, tokens: Tensor | Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens (int64 [T]), with or without special tokens."""
        ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return without_extra_spaces(text) if self._cleans_up_spaces else text

    def decode_after(
        self,
        prompt: Tensor | Sequence[int],
        response: Tensor | Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> str:
        """Return the text of a response, int64 [R], behind a prompt, int64 [P].

        Unlike `decode(response)`, the text keeps the space before its first word if the tokenizer
        is of the SentencePiece kind.
        """
        text = self._response_decoder.decode_after(
            prompt, response, skip_special_tokens=skip_special_tokens
        )
        return without_extra_spaces(text) if self._cleans_up_spaces else text

    @cached_property
    def _response_decoder(self) -> ResponseDecoder:
        return ResponseDecoder(self._tokenizer)

    def piece(self, token: int) -> str:
        """Return the text of a token inside a text; special tokens by their names."""
        return self._response_decoder.decode_after([token], [token], skip_special_tokens=False)


def run_tokenizer(config: Config, directory: Path) -> Tokenizer:
    """Return the tokenizer of a model directory, with the settings of a run."""
    return Tokenizer(
        directory,
        config.run.date,
        sanitize=config.data.sanitize,
        chat_template_kwargs=config.data.chat_template_kwargs,
    )


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


def describe_end_tokens(ids: Sequence[int], files: TokenizerFiles) -> str:
    """Return the EOS ids with the texts of their tokens, as `aligner validate` prints them."""
    if not ids:
        return "EOS tokens: none; responses end only at their maximum length"
    return "EOS tokens: " + ", ".join(_shown(id, files) for id in ids)


def end_token_warnings(directory: Path, ids: Sequence[int], files: TokenizerFiles) -> list[str]:
    """Return warnings about tokens that end a text but are not EOS tokens of the model.

    Args:
        directory: The model directory.
        ids: The EOS ids of its config.json and generation_config.json.
        files: Its tokenizer.

    Raises:
        ConfigError: The chat template is not valid.
    """
    warnings = []
    turn_end = None
    if has_chat_template(directory):
        turn_end = end_of_turn(ChatTemplate(directory), files.tokenizer)
    listed = ", ".join(_shown(id, files) for id in ids) or "none"
    if turn_end is not None and turn_end not in ids:
        warnings.append(
            f"{directory}: the chat template ends an assistant's message with the token"
            f" {_shown(turn_end, files)}, which is not an EOS token ({listed}), so generation does"
            f" not stop at it; add {turn_end} to eos_token_id in generation_config.json"
        )

    text = files.special_tokens.get("eos_token")
    named = None if text is None else files.tokenizer.token_to_id(text)
    if named is not None and named not in ids and named != turn_end:
        warnings.append(
            f"{directory}: eos_token of the tokenizer is {_shown(named, files)}, which is not an"
            f" EOS token of the model ({listed}), so generation does not stop at it; add {named} to"
            " eos_token_id in generation_config.json, or correct eos_token in tokenizer_config.json"
        )
    return warnings


def report_end_tokens(directory: Path, ids: Sequence[int]) -> list[str]:
    """Return the lines about EOS tokens that `aligner validate` prints for a model directory.

    Raises ConfigError for a tokenizer or a chat template that cannot be read.
    """
    files = read_tokenizer_files(directory)
    warnings = end_token_warnings(directory, ids, files)
    return [describe_end_tokens(ids, files), *(f"warning: {warning}" for warning in warnings)]


def _shown(id: int, files: TokenizerFiles) -> str:
    """Return an id with the text of its token."""
    text = files.tokenizer.id_to_token(id)
    return f"{id} (no token of the tokenizer)" if text is None else f"{id} {text!r}"
