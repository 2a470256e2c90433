"""Allocation of the rows of the KV cache.

A row is free, in use, or parked. A parked row belongs to a response that has ended a turn and may
be resumed in a later turn.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class ParkedRow(NamedTuple):
    """Parked row of the KV cache, which no running response uses."""

    row: int
    """Index of the row."""
    tokens: int
    """Number of tokens whose keys and values the row contains."""


@dataclass
class RowTable:
    """Table of the free, used and parked rows of the KV cache.

    Parked rows keep their contents until a new response needs a row. If no row is free then, the
    row that has been parked the longest is evicted.
    """

    rows: int
    """Number of rows of the KV cache."""
    _free: set[int] = field(init=False)
    _parked: dict[Hashable, ParkedRow] = field(default_factory=dict)
    """Parked rows by owner, in the order in which they were parked."""

    def __post_init__(self) -> None:
        self._free = set(range(self.rows))

    def __contains__(self, owner: Hashable) -> bool:
        """Return whether a row is parked for this owner."""
        return owner in self._parked

    def allocate(self) -> int:
        """Return a row for a new response, the lowest free one, and mark it as in use.

        If no row is free, the row that has been parked the longest is evicted.
        """
        if not self._free:
            # A dict keeps the order of insertion, so its first key was parked first.
            self.evict(next(iter(self._parked)))
        # The lowest row keeps the rows in use at the start of the cache, where they form few runs.
        row = min(self._free)
        self._free.remove(row)
        return row

    def release(self, row: int) -> None:
        """Mark a row in use as free."""
        self._free.add(row)

    def park(self, owner: Hashable, row: int, tokens: int) -> None:
        """Park a row for its owner.

        Args:
            owner: Key of the response, which `resume` and `evict` take.
            row: Index of the row.
            tokens: Number of tokens whose keys and values the row contains.
        """
        self._parked[owner] = ParkedRow(row, tokens)

    def resume(self, owner: Hashable) -> ParkedRow:
        """Return the parked row of an owner, and mark it as in use."""
        return self._parked.pop(owner)

    def evict(self, owner: Hashable) -> None:
        """Free the parked row of an owner, if there is one."""
        if owner in self._parked:
            self._free.add(self._parked.pop(owner).row)

    def evict_all(self) -> None:
        """Free all parked rows."""
        for owner in list(self._parked):
            self.evict(owner)

    def find_moves(self, in_use: Sequence[int], *, include_parked: bool) -> list[int]:
        """Return target rows for the last rows in use, so that no gap remains before a row in use.

        The target rows are in ascending order, as are the rows that move there: with n targets,
        target i is for row `in_use[-n + i]`. Each row moves to a lower index.

        Args:
            in_use: Rows in use, in ascending order.
            include_parked: Whether parked rows count as gaps too. The caller then swaps
                their contents with `swap`.
        """
        gaps = set(self._free)
        if include_parked:
            gaps.update(parked.row for parked in self._parked.values())
        sorted_gaps = sorted(gaps)

        # Fill the lowest gaps with the highest rows in use, as long as a gap is below such a row.
        count = 0
        max_moves = min(len(sorted_gaps), len(in_use))
        while count < max_moves and sorted_gaps[count] < in_use[-count - 1]:
            count += 1
        return sorted_gaps[:count]

    def swap(self, row: int, other: int) -> int:
        """Swap a row in use with a free or parked row in the table; the caller moves the contents.

        Args:
            row: Row in use; it becomes free or parked, as `other` was.
            other: Free or parked row; it becomes the row in use.

        Returns:
            Number of tokens of `other` that must be preserved, by copying them to `row`; 0 if it
            was free.
        """
        if other in self._free:
            self._free.remove(other)
            self._free.add(row)
            return 0
        owner, parked = next(item for item in self._parked.items() if item[1].row == other)
        self._parked[owner] = ParkedRow(row, parked.tokens)
        return parked.tokens
