"""Decode the tokens of a response as the text that stands behind its prompt."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import tokenizers
from torch import Tensor

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
