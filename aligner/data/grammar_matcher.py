"""Token masks of a grammar, computed with llguidance.

vLLM's workers load this file by its path, because aligner is not installed in their environment.
The file therefore imports nothing of aligner. The trainer, the embedded engine and vLLM use this
code with the same vocabulary, so that their masks are identical.

A grammar is a text in llguidance's dialect of Lark. It describes the bytes of a response. The
tokens of a response are allowed as follows:

- A token is allowed if the grammar can continue with all of its bytes.
- A stop token is allowed if and only if the text so far is complete, also if the grammar allows the
  bytes of this token. A response can therefore not end before its text is complete.
- If the grammar allows no token, for example because it exceeds a limit of llguidance, the stop
  tokens are allowed.
"""

import contextlib
import importlib.metadata
import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

VERSION = importlib.metadata.version("llguidance")
"""Version of llguidance; equal versions compute equal masks."""
# Where only one text is possible, llguidance would allow only one tokenization of it. All of them
# are allowed instead, so that a mask depends on the bytes of tokens only.
_PREAMBLE = '%llguidance {"no_forcing": true}\n'
_LIMITS = llguidance.LLParserLimits()
# Errors describe the problem only, not the state of the parser. Releases before 1.3, such as the
# one in TensorRT-LLM's images, have no such option.
with contextlib.suppress(TypeError):
    _LIMITS = llguidance.LLParserLimits(verbose_errors=False)
# Number of compiled grammars that a vocabulary keeps.
_MAX_COMPILED = 256


class _TokenTable:
    """The interface that `llguidance.LLTokenizer` requires of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int], end: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = end

    def __call__(self, text: str) -> list[int]:
        """Raise, because masks depend on the bytes of tokens only."""
        raise NotImplementedError("llguidance computes masks without tokenizing text")


class GrammarVocabulary:
    """The bytes of a model's tokens, and the grammars that were compiled for them."""

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int]) -> None:
        """
        Args:
            tokens: Bytes of each token of the model's vocabulary; empty for ids that the tokenizer
                does not have, which no grammar allows.
            special_token_ids: Ids of special tokens. A grammar allows them only by their ids.
        """
        self.size = len(tokens)
        """Number of tokens of the model's vocabulary."""
        self.tokens = list(tokens)
        self.special_token_ids = list(special_token_ids)
        # An additional token marks the end of a complete text. The bit of this token in a mask
        # tells whether the stop tokens are allowed, which may differ between requests.
        end = self.size
        table: Any = _TokenTable([*self.tokens, b"<end>"], [*self.special_token_ids, end], end)
        self._tokenizer = llguidance.LLTokenizer(table, n_vocab=end + 1)
        self._compiled: dict[str, llguidance.LLMatcher] = {}
        # Requests are compiled in the threads of their callers.
        self._lock = threading.Lock()

    @property
    def mask_width(self) -> int:
        """Number of int32 values of a mask."""
        return -(-self.size // 32)

    def save(self, path: Path) -> None:
        """Write the vocabulary to a file, for `load`."""
        content = {
            "tokens": [token.hex() for token in self.tokens],
            "special_token_ids": self.special_token_ids,
        }
        path.write_text(json.dumps(content))

    @classmethod
    def load(cls, path: Path) -> "GrammarVocabulary":
        """Return the vocabulary that `save` wrote to a file."""
        content = json.loads(path.read_text())
        tokens = [bytes.fromhex(token) for token in content["tokens"]]
        return cls(tokens, content["special_token_ids"])

    def start(self, grammar: str, stop_token_ids: Sequence[int]) -> "GrammarMatcher":
        """Return a matcher at the start of a response.

        Raises:
            ValueError: The grammar is invalid, or this vocabulary has no token with which a
                response can begin.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None:
            # Other threads can use their grammars while this one is compiled.
            compiled = self._compile(grammar)
        with self._lock:
            if grammar not in self._compiled and len(self._compiled) >= _MAX_COMPILED:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[grammar] = compiled
            return GrammarMatcher(self, compiled.deep_copy(), stop_token_ids)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        # JSON text of `grammar_from_lark`. Its content is not checked before it is compiled.
        serialized = llguidance.LLMatcher.grammar_from_lark(_PREAMBLE + grammar)
        matcher = llguidance.LLMatcher(self._tokenizer, serialized, log_level=0, limits=_LIMITS)
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(shorten_error(matcher.get_error()))
        if not any(mask):
            raise ValueError("the model's vocabulary has no token with which the text can begin")
        return matcher

    def compute_masks(
        self, grammar: str, stop_token_ids: Sequence[int], tokens: Sequence[int]
    ) -> np.ndarray:
        """Return the mask at the position of each token of a response, int32 [T, mask width].

        Raises:
            ValueError: The grammar does not allow one of the tokens.
        """
        matcher = self.start(grammar, stop_token_ids)
        masks = np.empty((len(tokens), self.mask_width), dtype=np.int32)
        for index, token in enumerate(tokens):
            masks[index] = matcher.compute_mask()
            if not is_allowed(masks[index], token):
                raise ValueError(f"the grammar does not allow token {token} at position {index}")
            matcher.accept([token])
        return masks


class GrammarMatcher:
    """The state of one response that follows a grammar."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        matcher: llguidance.LLMatcher,
        stop_token_ids: Sequence[int],
    ) -> None:
        self.vocabulary = vocabulary
        self._matcher = matcher
        self._stop_mask = np.zeros(vocabulary.mask_width, dtype=np.uint32)
        for token in stop_token_ids:
            self._stop_mask[token >> 5] |= np.uint32(1 << (token & 31))
        self._stop_token_ids = frozenset(stop_token_ids)
        self.dead_end = ""
        """Reason why the response ended before its text was complete, because the grammar allowed
        no token; empty if it did not."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by tokens of the response. A stop token ends the response."""
        text_tokens = [token for token in tokens if token not in self._stop_token_ids]
        if text_tokens:
            self._matcher.consume_tokens(text_tokens)
        has_ended = len(text_tokens) < len(tokens)
        if has_ended and not self._matcher.is_accepting():
            # llguidance finds the reason when it computes a mask.
            self._matcher.compute_bitmask()
            self.dead_end = shorten_error(self._matcher.get_error()) or (
                "no token of the model's vocabulary continues the text"
            )

    def allows(self, tokens: Sequence[int]) -> bool:
        """Return whether all of these tokens are allowed, one after another.

        The matcher advances. The method is faster than one mask per token.
        """
        has_ended = bool(tokens) and tokens[-1] in self._stop_token_ids
        text_tokens = list(tokens[:-1] if has_ended else tokens)
        if not self._stop_token_ids.isdisjoint(text_tokens):
            return False
        if self._matcher.validate_tokens(text_tokens) < len(text_tokens):
            return False
        self._matcher.consume_tokens(text_tokens)
        return not has_ended or is_allowed(self.compute_mask(), tokens[-1])

    def compute_mask(self) -> np.ndarray:
        """Return which tokens are allowed next, int32 [mask width].

        Bit i % 32 of entry i // 32 belongs to token i.
        """
        size = self.vocabulary.size
        padded = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        is_complete = bool(padded[size >> 5] >> np.uint32(size & 31) & 1)
        mask = padded[: self.vocabulary.mask_width].copy()
        # The bit of the additional token is in the last entry unless that entry is full.
        if size & 31:
            mask[-1] &= np.uint32((1 << (size & 31)) - 1)

        mask &= ~self._stop_mask
        if is_complete or not mask.any():
            mask |= self._stop_mask
        return mask.view(np.int32)


def shorten_error(message: str) -> str:
    """Return an error of llguidance without the excerpt of the grammar."""
    if message.startswith("NoExtension"):
        return "no text satisfies it, or the model's vocabulary has no tokens for such a text"
    # "at 2(8): failed to compile JSON schema: PROBLEM", and the lines of the grammar around it
    problem = message.partition("\n   1 |")[0].partition("\n<non-verbose/>")[0]
    return re.sub(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?", "", problem)


def is_allowed(mask: np.ndarray, token: int) -> bool:
    """Return whether a mask, int32 [mask width], allows a token."""
    return bool(mask[token >> 5] >> (token & 31) & 1)
