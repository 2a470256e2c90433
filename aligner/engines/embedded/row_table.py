"""Whose the rows of the cache are: in use, or waiting for a response that has ended a turn and may
be told to go on."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class WaitingRow(NamedTuple):
    """A row that nobody uses now."""

    row: int
    tokens: int
    """Whose keys and values it holds."""


@dataclass
class RowTable:
    """Rows stay where they are while they wait; where one is wanted, the one that has waited the
    longest is another's."""

    rows: int
    _free: set[int] = field(init=False)
    _waiting: dict[Hashable, WaitingRow] = field(default_factory=dict)
    """In the order in which they began to."""

    def __post_init__(self) -> None:
        self._free = set(range(self.rows))

    def __contains__(self, owner: Hashable) -> bool:
        """Whether its row waits for it."""
        return owner in self._waiting

    def take(self) -> int:
        """A row for whoever begins."""
        if not self._free:
            self.drop(next(iter(self._waiting)))
        row = min(self._free)
        self._free.remove(row)
        return row

    def release(self, row: int) -> None:
        """It is in use no more."""
        self._free.add(row)

    def park(self, owner: Hashable, row: int, tokens: int) -> None:
        """Keep a row, with the keys and values of so many tokens, for its owner."""
        self._waiting[owner] = WaitingRow(row, tokens)

    def resume(self, owner: Hashable) -> WaitingRow:
        """The owner's row, which is in use again."""
        return self._waiting.pop(owner)

    def drop(self, owner: Hashable) -> None:
        """Nothing waits for this owner any more."""
        if owner in self._waiting:
            self._free.add(self._waiting.pop(owner).row)

    def forget(self) -> None:
        """Of all who wait."""
        for owner in list(self._waiting):
            self.drop(owner)

    def moves(self, in_use: Sequence[int], *, past_waiting: bool) -> list[int]:
        """Where the last ones of some rows, in ascending order, are to go so that nobody's row is
        before them.

        With `past_waiting` none that waits either.
        """
        gaps = sorted(
            self._free | {waiting.row for waiting in self._waiting.values() if past_waiting}
        )
        count = 0
        while count < min(len(gaps), len(in_use)) and gaps[count] < in_use[-count - 1]:
            count += 1
        return gaps[:count]

    def exchange(self, row: int, other: int) -> int:
        """A row in use becomes one that waits or is free, which was `other`; how many tokens of
        that one matter."""
        if other in self._free:
            self._free.remove(other)
            self._free.add(row)
            return 0
        owner, waiting = next(each for each in self._waiting.items() if each[1].row == other)
        self._waiting[owner] = WaitingRow(row, waiting.tokens)
        return waiting.tokens
