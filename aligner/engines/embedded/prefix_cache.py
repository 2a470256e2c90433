"""Completed sequences whose blocks stay in the KV cache, for requests that continue them."""

from collections.abc import Sequence
from dataclasses import dataclass

from aligner.engines.embedded.block_pool import BlockPool


@dataclass(eq=False)
class CachedSequence:
    """A completed sequence with its blocks."""

    sample_key: tuple[int, int]
    """Prompt id and sample index."""
    tokens: list[int]
    """All tokens of the sequence. The last one is not in the KV cache."""
    blocks: list[int]
    """Block table of the sequence."""


class PrefixCache:
    """Completed sequences that hold references to their blocks.

    A sequence stays until a request continues it, or until a request needs its blocks while none is
    free. Then the sequence that has been cached the longest is evicted.
    """

    def __init__(self, pool: BlockPool) -> None:
        """Create an empty cache.

        Args:
            pool: Pool that receives the references of evicted sequences.
        """
        self._pool = pool
        self._by_sample: dict[tuple[int, int], list[CachedSequence]] = {}
        """Sequences by prompt id and sample index."""
        self._in_order: dict[CachedSequence, None] = {}
        """Sequences in the order in which they completed."""

    @property
    def sample_keys(self) -> list[tuple[int, int]]:
        """Prompt id and sample index of the cached sequences, in the order of their completion."""
        return [*self._by_sample]

    def add(self, sequence: CachedSequence) -> None:
        """Add a completed sequence, which takes over the references to its blocks."""
        self._by_sample.setdefault(sequence.sample_key, []).append(sequence)
        self._in_order[sequence] = None

    def find_prefix(
        self, sample_key: tuple[int, int], tokens: Sequence[int]
    ) -> CachedSequence | None:
        """Return the longest sequence of a sample that is a proper prefix of the tokens; None if
        there is none."""
        prefixes = [
            sequence
            for sequence in self._by_sample.get(sample_key, [])
            if len(sequence.tokens) < len(tokens)
            and tokens[: len(sequence.tokens)] == sequence.tokens
        ]
        return max(prefixes, key=lambda sequence: len(sequence.tokens), default=None)

    def take(self, sequence: CachedSequence) -> None:
        """Remove a sequence; the caller takes over the references to its blocks."""
        del self._in_order[sequence]
        sequences = self._by_sample[sequence.sample_key]
        sequences.remove(sequence)
        if not sequences:
            del self._by_sample[sequence.sample_key]

    def evict_oldest(self) -> bool:
        """Evict the sequence that has been cached the longest; return whether there was one."""
        if not self._in_order:
            return False
        # A dict keeps the order of insertion.
        self._evict(next(iter(self._in_order)))
        return True

    def evict_sample(self, sample_key: tuple[int, int]) -> None:
        """Evict the sequences of a sample."""
        for sequence in [*self._by_sample.get(sample_key, [])]:
            self._evict(sequence)

    def evict_all(self) -> None:
        """Evict all sequences."""
        while self.evict_oldest():
            pass

    def _evict(self, sequence: CachedSequence) -> None:
        self.take(sequence)
        self._pool.release(sequence.blocks)
