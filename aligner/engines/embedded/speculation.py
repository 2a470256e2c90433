"""Draft tokens for speculative decoding (`engine.speculation`).

The draft method is prompt lookup: it proposes the tokens that followed the same n-gram at its last
occurrence in the prompt or the response (Saxena 2023, "Prompt Lookup Decoding"). One forward pass
verifies all draft tokens.
"""

from collections.abc import Sequence


class PromptLookup:
    """Prompt lookup in one growing sequence: an index of its n-grams."""

    def __init__(self, ngram: int) -> None:
        """Create an empty index of runs of `ngram` tokens."""
        self._ngram = ngram
        self._next_positions: dict[tuple[int, ...], int] = {}
        """Position after the last occurrence of each n-gram."""
        self._indexed_length = ngram
        """Position up to which the n-grams are indexed; they end before that position."""

    def draft(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        """Return `num_tokens` draft tokens, or none if the last n-gram has not occurred before.

        Args:
            tokens: All tokens of the sequence. They must start with the tokens of the previous
                call.
            num_tokens: Number of draft tokens.
        """
        # The n-gram that ends the sequence is not indexed yet: it has no next token, and the lookup
        # below must find its previous occurrence.
        for position in range(self._indexed_length, len(tokens)):
            self._next_positions[tuple(tokens[position - self._ngram : position])] = position
        self._indexed_length = max(self._indexed_length, len(tokens))

        start = self._next_positions.get(tuple(tokens[-self._ngram :]))
        if start is None:
            return []

        # If the sequence ends within the draft, the draft repeats its own tokens periodically: a
        # sequence that reaches its own end in this way is usually in a loop.
        draft_tokens = [*tokens[start : start + num_tokens]]
        for index in range(num_tokens):
            draft_tokens.append(draft_tokens[index])
        return draft_tokens[:num_tokens]
