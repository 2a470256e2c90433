"""Strings that end a response (`rollout.stop`, and `stop` in requests of the OpenAI API).

All engines search the text of a response for its stop strings with `StopSearch`, so that a response
ends at the same token in every engine.
"""

from collections.abc import Iterable, Sequence

from aligner.data.tokenizer import Tokenizer

# Number of tokens before the searched text with which it is decoded.
_CONTEXT_TOKENS = 8
# Number of bytes of a character that the searched text may begin inside; UTF-8 has up to 4.
_CHARACTER_BYTES = 4


class StopSearch:
    """Searches the text of a response for stop strings, token by token."""

    def __init__(
        self, tokenizer: Tokenizer, strings: Sequence[str], tokens: Sequence[int], search_start: int
    ) -> None:
        """Begin after the tokens of a prompt, and of the response so far.

        Args:
            tokenizer: The tokenizer of the model.
            strings: The stop strings, of at least one character each.
            tokens: The tokens so far, without a complete stop string.
            search_start: Index of the first token in which a stop string may begin; it may be
                greater than the number of tokens.
        """
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        # Each token has at least one byte, so no stop string extends over more tokens.
        self._window_size = _CHARACTER_BYTES + max(len(string.encode()) for string in strings)
        self._skipped_tokens = max(0, search_start - len(tokens))
        """Number of next tokens in which no stop string may begin."""
        self._context = list(tokens[:search_start])[-_CONTEXT_TOKENS:]
        """Last tokens before the window."""
        self._window = list[int]()
        """Last tokens that a stop string may contain."""
        for token in tokens[search_start:]:
            self._append(token)

    def find_end(self, tokens: Sequence[int]) -> int | None:
        """Append the next tokens of the response.

        Returns:
            The number of these tokens up to and including the one that completes a stop string;
            None if no stop string is complete. After a stop string, the search has ended.
        """
        for count, token in enumerate(tokens, 1):
            self._append(token)
            text = self._tokenizer.decode_after(
                self._context, self._window, skip_special_tokens=False
            )
            if any(string in text for string in self._strings):
                return count
        return None

    def _append(self, token: int) -> None:
        """Add a token to the window, or to the context if no stop string may begin in it."""
        if self._skipped_tokens:
            self._skipped_tokens -= 1
            self._context.append(token)
        else:
            self._window.append(token)
        if len(self._window) > self._window_size:
            self._context.append(self._window.pop(0))
        del self._context[:-_CONTEXT_TOKENS]


def cut_before_stop(text: str, strings: Iterable[str]) -> str:
    """Return the text before the first stop string; the whole text if it contains none."""
    positions = [text.find(string) for string in strings if string in text]
    return text[: min(positions)] if positions else text
