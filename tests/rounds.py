"""Parametrized tests whose typical rows run in the fast round, and the other rows in the slow round.

Tests of every model family at every layout have too many rows for the slow round. A part of their
rows, which covers each kind of row, runs there. The rest runs only in `make test-families`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest

Describe = Callable[[Any], Collection[str]]
"""Function from a row to its features."""


def typical(rows: Iterable[Any], first: Collection[Any]) -> list[Any]:
    """Return rows for `pytest.mark.parametrize`, with rows that are not in `first` marked as slow.

    Args:
        rows: The rows; a tuple is a row of several values.
        first: Rows of the fast round.
    """
    return [row if row in first else slow(*_values(row)) for row in rows]


def covering(rows: Iterable[Any], first: Collection[Any], features: Describe) -> list[Any]:
    """Return rows for `pytest.mark.parametrize`, of which fast and slow round cover every feature.

    Args:
        rows: The rows; a tuple is a row of several values.
        first: Rows of the fast round. The slow round has rows with the features that these lack;
            the rest runs in `make test-families`.
        features: Function from a row to its features.
    """
    rows = list(rows)
    chosen = choose_covering_rows(rows, first, features)
    return [
        row if row in first else (slow if row in chosen else rare)(*_values(row)) for row in rows
    ]


def choose_covering_rows(
    rows: Sequence[Any], first: Collection[Any], features: Describe
) -> list[Any]:
    """Return few rows that have all features which the rows of `first` lack.

    Each row is the one with the most missing features (Chvatal 1979, "A greedy heuristic for the
    set-covering problem").
    """
    described = [set(features(row)) for row in rows]
    missing = set().union(*described)
    for row, found in zip(rows, described, strict=True):
        if row in first:
            missing -= found
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(described[index] & missing))
        chosen.append(rows[best])
        missing -= described[best]
    return chosen


def _values(row: Any) -> tuple[Any, ...]:
    return row if isinstance(row, tuple) else (row,)


def slow(*values: Any) -> Any:
    """Return a row of the slow round."""
    return pytest.param(*values, marks=pytest.mark.slow)


def rare(*values: Any) -> Any:
    """Return a row that runs in `make test-families` only."""
    return pytest.param(*values, marks=(pytest.mark.slow, pytest.mark.families))


bounds_seconds = pytest.mark.flaky(reruns=2)
"""Marker of a test with a time limit. It may fail on a busy machine, and is repeated up to twice."""
