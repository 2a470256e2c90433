"""Allocation of the rows of the KV cache.

A row is free, in use, or parked. A parked row belongs to a response that has ended a turn and may
be resumed in a later turn.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class WaitingRow(NamedTuple):
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
    _waiting: dict[Hashable, WaitingRow] = field(default_factory=dict)
    """Parked rows by owner, in the order in which they were parked."""

    def __post_init__(self) -> None:
        self._free = set(range(self.rows))

    def __contains__(self, owner: Hashable) -> bool:
        """Return whether a row is parked for this owner."""
        return owner in self._waiting

    def take(self) -> int:
        """Return a row for a new response, the lowest free one, and mark it as in use.

        If no row is free, the row that has been parked the longest is evicted.
        """
        if not self._free:
            self.drop(next(iter(self._waiting)))
        row = min(self._free)
        self._free.remove(row)
        return row

    def release(self, row: int) -> None:
        """Mark a row in use as free."""
        self._free.add(row)

    def park(self, owner: Hashable, row: int, tokens: int) -> None:
        """Park a row for its owner.

        Args:
            owner: Key of the response, which `resume` and `drop` take.
            row: Index of the row.
            tokens: Number of tokens whose keys and values the row contains.
        """
        self._waiting[owner] = WaitingRow(row, tokens)

    def resume(self, owner: Hashable) -> WaitingRow:
        """Return the parked row of an owner, and mark it as in use."""
        return self._waiting.pop(owner)

    def drop(self, owner: Hashable) -> None:
        """Free the parked row of an owner, if there is one."""
        if owner in self._waiting:
            self._free.add(self._waiting.pop(owner).row)

    def forget(self) -> None:
        """Free all parked rows."""
        for owner in list(self._waiting):
            self.drop(owner)

    def moves(self, in_use: Sequence[int], *, past_waiting: bool) -> list[int]:
        """Return target rows for the last rows in use, so that no gap remains before a row in use.

        The target rows are in ascending order, as are the rows that move there: with n targets,
        target i is for row `in_use[-n + i]`. Each row moves to a lower index.

        Args:
            in_use: Rows in use, in ascending order.
            past_waiting: Whether parked rows count as gaps too. `exchange` then swaps their
                contents.
        """
        gaps = sorted(
            self._free | {waiting.row for waiting in self._waiting.values() if past_waiting}
        )
        # Fill the lowest gaps with the highest rows in use, as long as a gap is below such a row.
        count = 0
        while count < min(len(gaps), len(in_use)) and gaps[count] < in_use[-count - 1]:
            count += 1
        return gaps[:count]

    def exchange(self, row: int, other: int) -> int:
        """Exchange a row in use with a free or parked row.

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
        owner, waiting = next(item for item in self._waiting.items() if item[1].row == other)
        self._waiting[owner] = WaitingRow(row, waiting.tokens)
        return waiting.tokens
