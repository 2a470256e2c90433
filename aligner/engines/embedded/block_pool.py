"""Allocation of the blocks of the KV cache."""

import heapq
from collections.abc import Iterable


class BlockPool:
    """Free blocks of the KV cache, and reference counts of the others."""

    def __init__(self, blocks: int) -> None:
        """Create a pool whose blocks are all free."""
        # An ascending list is a heap.
        self._free = [*range(blocks)]
        """Heap of the free blocks."""
        self._references = [0] * blocks
        """Number of block tables that contain each block."""
        self.num_touched = 0
        """Number of blocks up to the last one that was ever allocated."""

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of blocks that a block table contains."""
        return len(self._references) - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Return the lowest free blocks, each with one reference.

        The lowest blocks keep the blocks in use adjacent, and the touched memory small.

        Args:
            count: Number of blocks; at most `num_free`.
        """
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            self.num_touched = max(self.num_touched, block + 1)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks in use."""
        for block in blocks:
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a reference from blocks; blocks without references become free."""
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                heapq.heappush(self._free, block)
