"""Allocation of the rows of the KV cache.

A row is free, in use, or resident. A resident row holds the KV cache of a completed sequence, which
a later request may continue.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Owner = TypeVar("Owner", bound=Hashable)


class ResidentRow(NamedTuple):
    """Resident row of the KV cache, which no request in flight uses."""

    row: int
    """Index of the row."""
    tokens: int
    """Number of tokens in the row's KV cache."""


@dataclass
class RowTable(Generic[Owner]):
    """Table of the free and resident rows of the KV cache; all other rows are in use.

    A resident row keeps its contents until a request needs a row while none is free. Then the row
    that has been resident the longest is evicted.
    """

    rows: int
    """Number of rows of the KV cache."""
    _free: set[int] = field(init=False)
    """Indices of the free rows."""
    _resident: dict[Owner, ResidentRow] = field(default_factory=dict)
    """Resident rows by owner, in the order in which they became resident."""

    def __post_init__(self) -> None:
        self._free = set(range(self.rows))

    def __contains__(self, owner: Owner) -> bool:
        """Return whether this owner has a resident row."""
        return owner in self._resident

    @property
    def owners(self) -> list[Owner]:
        """Owners of the resident rows, in the order in which the rows became resident."""
        return [*self._resident]

    def allocate(self) -> int:
        """Return the lowest free row, and mark it as in use.

        If no row is free, evict the row that has been resident the longest, and return that row.
        """
        if not self._free:
            # A dict keeps the order of insertion, so its first row became resident first.
            self.evict(next(iter(self._resident)))
        # The lowest row keeps the rows in use consecutive, at the start of the cache.
        row = min(self._free)
        self._free.remove(row)
        return row

    def release(self, row: int) -> None:
        """Mark a row in use as free."""
        self._free.add(row)

    def make_resident(self, owner: Owner, row: int, tokens: int) -> None:
        """Mark a row in use as resident for its owner.

        Args:
            owner: Object that identifies the row in `resume` and `evict`.
            row: Index of the row.
            tokens: Number of tokens in the row's KV cache.
        """
        self._resident[owner] = ResidentRow(row, tokens)

    def resume(self, owner: Owner) -> ResidentRow:
        """Return the resident row of an owner, and mark it as in use."""
        return self._resident.pop(owner)

    def evict(self, owner: Owner) -> None:
        """Free the resident row of an owner, if there is one."""
        if owner in self._resident:
            self._free.add(self._resident.pop(owner).row)

    def evict_all(self) -> None:
        """Free all resident rows."""
        for owner in self.owners:
            self.evict(owner)

    def find_moves(self, in_use: Sequence[int], *, include_resident: bool) -> list[int]:
        """Return target rows for the last rows in use, so that no gap remains before a row in use.

        The target rows are in ascending order, as are the rows that move there: with n targets,
        target i is for row `in_use[-n + i]`. Each row moves to a lower index.

        Args:
            in_use: Rows in use, in ascending order.
            include_resident: Whether resident rows count as gaps, too. The caller must call `swap`
                for each move, and swap the contents of the two rows.
        """
        gaps = set(self._free)
        if include_resident:
            gaps.update(resident.row for resident in self._resident.values())
        sorted_gaps = sorted(gaps)

        # Fill the lowest gaps with the highest rows in use, as long as a gap is below such a row.
        count = 0
        max_moves = min(len(sorted_gaps), len(in_use))
        while count < max_moves and sorted_gaps[count] < in_use[-count - 1]:
            count += 1
        return sorted_gaps[:count]

    def swap(self, row: int, other: int) -> int:
        """Swap a row in use with a free or resident row; the caller copies the contents.

        Args:
            row: Row in use; it becomes free or resident, as `other` was.
            other: Free or resident row; it becomes the row in use.

        Returns:
            Number of tokens whose KV cache the caller must copy from `other` to `row`; 0 if `other`
            was free.
        """
        if other in self._free:
            self._free.remove(other)
            self._free.add(row)
            return 0
        owner, resident = next(item for item in self._resident.items() if item[1].row == other)
        self._resident[owner] = ResidentRow(row, resident.tokens)
        return resident.tokens
