"""Parametrized tests whose typical rows run in the fast round, and the other rows in the slow round."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def typical(rows: Iterable[Any], first: Collection[Any]) -> list[Any]:
    """Return rows for `pytest.mark.parametrize`, with rows that are not in `first` marked as slow.

    A tuple is a row of several values.
    """
    return [
        row if row in first else slow(*row) if isinstance(row, tuple) else slow(row) for row in rows
    ]


def slow(*values: Any) -> Any:
    """Return a row that is marked as slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


bounds_seconds = pytest.mark.flaky(reruns=2)
"""Marker of a test with a time limit. It may fail on a busy machine, and is repeated up to twice."""
