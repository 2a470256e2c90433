"""Guesses at a response's next tokens, which one pass checks together (`engine.speculation`).

Prompt lookup: what followed the same few tokens the last time, in prompt or response (Saxena 2023,
"Prompt Lookup Decoding").
"""

from collections.abc import Sequence


class Lookup:
    """Of one growing sequence: what came after each run of `ngram` tokens."""

    def __init__(self, ngram: int) -> None:
        self._ngram = ngram
        self._after: dict[tuple[int, ...], int] = {}
        self._seen = ngram
        """Places up to this one are known by what is before them."""

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """The next `most` tokens by what followed these the last time, none where they are new.

        tokens: those of the call before, and more behind.
        """
        for place in range(self._seen, len(tokens)):
            self._after[tuple(tokens[place - self._ngram : place])] = place
        self._seen = max(self._seen, len(tokens))
        last = self._after.get(tuple(tokens[-self._ngram :]))
        if last is None:
            return []
        sequence = [*tokens[last : last + most]]
        for at in range(most):  # where it ends, what was guessed goes on: a loop
            sequence.append(sequence[at])
        return sequence[:most]
