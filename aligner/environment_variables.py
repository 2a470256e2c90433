"""The environment variables of this process."""

import contextlib
import os
from collections.abc import Iterator, Mapping

OPENMP_WAITS = {"GOMP_SPINCOUNT": "20000"}
"""How long a thread spins between parallel regions, in turns: about a millisecond. One that spins
on takes the core of another process; to wake one that sleeps costs a tenth of a training step.
Counts only before torch is imported."""


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Have exactly these environment variables meanwhile."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
