"""Rows of the cache that wait: of responses that have ended a turn, and may be told to go on with the next one."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from aligner.engines.embedded.cache import Cache


@dataclass(frozen=True)
class _Parked:
    row: int
    tokens: int
    """Whose keys and values it holds."""


@dataclass
class ParkedRows:
    """They lie behind the rows that are in use; where room is wanted the one that has waited the longest is forgotten."""

    cache: Cache
    _held: dict[Hashable, _Parked] = field(default_factory=dict)
    """In the order of their parking."""

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._held

    def park(self, owner: Hashable, row: int, tokens: int) -> None:
        """Keep a row, with the keys and values of so many tokens, that lies behind those that are in use from now on."""
        self._held[owner] = _Parked(row, tokens)

    def make_room(self, in_use: int, rows: int) -> None:
        """Have nothing in the `rows` behind the first `in_use`."""
        while self._held and in_use + rows + len(self._held) > self.cache.size.rows:
            self._held.pop(next(iter(self._held)))
        self._clear(in_use + rows)

    def take(self, owner: Hashable, row: int) -> int:
        """Move the owner's to a row, the first one behind those in use; how many tokens it holds."""
        own = self._held.pop(owner)
        if own.row != row:
            there = next((other for other, parked in self._held.items() if parked.row == row), None)
            if there is None:
                self.cache.copy_rows([own.row], [row], own.tokens)
            else:
                other = self._held[there]
                self.cache.copy_rows([own.row, row], [row, own.row], max(own.tokens, other.tokens))
                self._held[there] = _Parked(own.row, other.tokens)
        return own.tokens

    def forget(self) -> None:
        """Of all."""
        self._held.clear()

    def _clear(self, first: int) -> None:
        """Move those that lie before the row to free ones behind it; there is room."""
        taken = {parked.row for parked in self._held.values()}
        free = (row for row in range(first, self.cache.size.rows) if row not in taken)
        moving = [(owner, parked) for owner, parked in self._held.items() if parked.row < first]
        if not moving:
            return
        targets = [next(free) for _ in moving]
        width = max(parked.tokens for _, parked in moving)
        self.cache.copy_rows([parked.row for _, parked in moving], targets, width)
        for (owner, parked), target in zip(moving, targets, strict=True):
            self._held[owner] = _Parked(target, parked.tokens)
