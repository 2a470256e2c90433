"""Parametrized tests whose typical rows run in the fast round, and the other rows in the slow round.

Tests of every model family at every layout have too many rows for the slow round. A part of their
rows runs only in `make test-families`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def typical(rows: Iterable[Any], first: Collection[Any], every: int = 1) -> list[Any]:
    """Return rows for `pytest.mark.parametrize`, with rows that are not in `first` marked as slow.

    Args:
        rows: The rows; a tuple is a row of several values.
        first: Rows of the fast round.
        every: Only each `every`-th of the other rows is in the slow round; the rest runs in
            `make test-families`.
    """
    marked = []
    count = 0
    for row in rows:
        values = row if isinstance(row, tuple) else (row,)
        if row in first:
            marked.append(row)
            continue
        marked.append(slow(*values) if count % every == 0 else rare(*values))
        count += 1
    return marked


def slow(*values: Any) -> Any:
    """Return a row of the slow round."""
    return pytest.param(*values, marks=pytest.mark.slow)


def rare(*values: Any) -> Any:
    """Return a row that runs in `make test-families` only."""
    return pytest.param(*values, marks=(pytest.mark.slow, pytest.mark.families))


bounds_seconds = pytest.mark.flaky(reruns=2)
"""Marker of a test with a time limit. It may fail on a busy machine, and is repeated up to twice."""
