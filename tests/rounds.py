"""Tables of tests of which typical rows are of the first round, and the others of the second."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def typical(rows: Iterable[Any], first: Collection[Any]) -> list[Any]:
    """Rows for `pytest.mark.parametrize`, those that are not among `first` marked as slow; tuples
    are a row of several."""
    return [
        row if row in first else slow(*row) if isinstance(row, tuple) else slow(row) for row in rows
    ]


def slow(*values: Any) -> Any:
    """A row of the second round."""
    return pytest.param(*values, marks=pytest.mark.slow)


bounds_seconds = pytest.mark.flaky(reruns=2)
"""A test that bounds seconds: other tests run beside it, so that it may fail where the machine was
busy; not three times."""
