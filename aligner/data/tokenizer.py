"""Text to tokens and back, from a model directory's `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from aligner.data.chat import ChatTemplate
from aligner.data.model_directory import read_shape, read_tokenizer
from aligner.errors import AlignerError, ConfigError


class Tokenizer:
    """The tokenizer of a model directory; adds no special tokens of its own."""

    def __init__(self, directory: Path) -> None:
        shape = read_shape(directory)
        self.directory = directory
        self._tokenizer = read_tokenizer(directory)
        self.eos_token_ids: tuple[int, ...] = shape.eos_token_ids
        self.pad_token_id: int = shape.pad_token_id

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """How chat messages are worded; read when first asked for. Raises ConfigError for a model that has none."""
        return ChatTemplate(self.directory)

    def encode(self, text: str) -> Tensor:
        """int64 [P]; AlignerError for a text that the vocabulary, or UTF-8, cannot express, naming the characters it lacks."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can escape half of a character
            raise AlignerError(f"{text!r} cannot be tokenized: it is not text that UTF-8 has: {error}") from error
        try:
            tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        # tokenizers raises nothing more specific than Exception.
        except Exception as error:
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
        """int64 [R]: a response with an end-of-sequence token last: its own where only space follows, else the first.

        Raises AlignerError where the model has none.
        """
        if not self.eos_token_ids:
            raise AlignerError(f"{self.directory}: config.json has no eos_token_id for a response to end with")
        ends = torch.isin(tokens, torch.tensor(self.eos_token_ids)).nonzero().flatten().tolist()
        if ends and not self.decode(tokens[ends[-1] + 1 :]).strip():
            return tokens[: ends[-1] + 1]
        return torch.cat([tokens, torch.tensor(self.eos_token_ids[:1])])

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """The text of tokens (int64 [T]), special tokens left out."""
        return self._tokenizer.decode(torch.as_tensor(tokens, dtype=torch.int64).tolist(), skip_special_tokens=True)
