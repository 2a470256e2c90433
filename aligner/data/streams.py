"""Endless, shuffled, mixed streams of examples that need no state but a position."""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np

from aligner.errors import ConfigError

Example = TypeVar("Example")
_AT_ONCE = 1024
"""Positions that are looked at together where nobody knows how many it takes."""


class ExampleStream(Generic[Example]):
    """Examples of one or more sources, each source one pass after another, in an order of its own
    when shuffled.

    What it yields is a pure function of (examples, weights, seed, position).
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Example]],
        weights: Sequence[float] | None = None,
        *,
        seed: int,
        shuffle: bool,
        notices: Sequence[str] = (),
    ) -> None:
        """`weights` are the sources' shares, above 0 and not necessarily of sum 1; equal ones where
        None.

        `notices` are what a person should know about the examples, a line each. Raises ConfigError
        without an example.
        """
        if not sources or not all(sources):
            raise ConfigError("every data source must have at least one record")
        self._sources = sources
        self._weights = [Fraction(str(weight)) for weight in weights or [1] * len(sources)]
        self._seed, self._shuffle = seed, shuffle
        self._order = lru_cache(maxsize=2 * len(sources))(self._pass_order)
        self.notices = tuple(notices)

    def __len__(self) -> int:
        """How many examples the sources have together."""
        return sum(map(len, self._sources))

    def examples(self) -> Iterator[Example]:
        """Every example of every source once, in the sources' own order."""
        return itertools.chain.from_iterable(self._sources)

    def hold_out(self, count: int) -> "tuple[ExampleStream[Example], list[Example]]":
        """A stream without `count` examples of each source, and those; ConfigError where a source
        has no more.

        They are a draw that depends on the seed and the source's size alone, those of a smaller
        count among those of a larger one; without shuffling they are the last ones.
        """
        if count == 0:
            return self, []
        for number, source in enumerate(self._sources, start=1):
            if len(source) <= count:
                which = (
                    f"source {number} of {len(self._sources)} has"
                    if len(self._sources) > 1
                    else "the data has"
                )
                raise ConfigError(
                    f"data.held_out={count}: {which} only {len(source)} records; hold out fewer"
                    " records, so that at least one record remains for training"
                )
        kept, held_out = [], []
        for number, source in enumerate(self._sources):
            out = set(self._drawn(number)[:count])
            kept.append([example for place, example in enumerate(source) if place not in out])
            held_out += [source[place] for place in sorted(out)]
        weights = [float(weight) for weight in self._weights]
        rest = ExampleStream(
            kept, weights, seed=self._seed, shuffle=self._shuffle, notices=self.notices
        )
        return rest, held_out

    def _drawn(self, source: int) -> list[int]:
        """A source's places in the order in which they are held out."""
        size = len(self._sources[source])
        if not self._shuffle:
            return list(range(size))[::-1]
        # The key makes it another draw than any pass's order.
        bits = np.random.Philox(np.random.SeedSequence([self._seed, source], spawn_key=(1,)))
        return [int(place) for place in np.random.Generator(bits).permutation(size)]

    def take(self, start: int, count: int) -> list[Example]:
        """The `count` examples at positions `start` and up."""
        return [self._sources[source][place] for source, place, _ in self._taken(start, count)]

    def origin(self, position: int) -> tuple[int, int]:
        """Which example is at a position, counted over all sources in their order, and in which
        pass over its own, from 0."""
        [(source, place, number)] = self._taken(position, 1)
        return sum(map(len, self._sources[:source])) + place, number

    def _taken(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Source, place in it and pass over it, at `count` positions."""
        for source, index in _places(self._weights, start, count):
            number, place = divmod(index, len(self._sources[source]))
            yield source, int(self._order(source, number)[place]), number

    def _origins(self, start: int) -> Iterator[tuple[int, int, int]]:
        """Position, example and pass as `origin` tells them, from `start` on without an end."""
        firsts = [0, *itertools.accumulate(map(len, self._sources))]
        for position in itertools.count(start, _AT_ONCE):
            taken = enumerate(self._taken(position, _AT_ONCE), start=position)
            yield from (
                (at, firsts[source] + place, number) for at, (source, place, number) in taken
            )

    def _pass_order(self, source: int, number: int) -> np.ndarray:
        """int64 [N]: which of a source's examples comes when in a pass."""
        size = len(self._sources[source])
        if not self._shuffle:
            return np.arange(size)
        bits = np.random.Philox(np.random.SeedSequence([self._seed, number, source]))
        return np.random.Generator(bits).permutation(size)


def _places(weights: Sequence[Fraction], start: int, count: int) -> Iterator[tuple[int, int]]:
    """(source, how many of it came before) at positions `start` to `start + count` of an endless
    interleaving.

    Sainte-Laguë's divisor method: item k of a source is due at (k + 1/2) / share, and items come in
    the order in which they are due. Shares are met exactly in the long run and about as nearly as
    whole numbers can in every stretch, so that small steps are mixed alike; a draw at each position
    would scatter them.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    # Before time t, ceil(share * t - 1/2) items of a source are due: fewer than t + len(shares) / 2
    # of all sources, and no less than t - len(shares) / 2. Starting so early skips at most one item
    # a source.
    time = max(Fraction(0), start - Fraction(len(shares), 2))
    counts = [max(0, math.ceil(share * time - Fraction(1, 2))) for share in shares]
    due = [
        ((taken + Fraction(1, 2)) / share, source)
        for source, (taken, share) in enumerate(zip(counts, shares, strict=True))
    ]
    heapq.heapify(due)
    for position in range(sum(counts), start + count):
        _, source = due[0]
        if position >= start:
            yield source, counts[source]
        counts[source] += 1
        heapq.heapreplace(due, ((counts[source] + Fraction(1, 2)) / shares[source], source))
