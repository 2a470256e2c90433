from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before torch is imported anywhere: two spinning thread pools on two cores cost milliseconds a parallel region.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false")

from tests.worker_pool import WorkerPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs, which take longest, come first: `make test` gives two processes a file at a time."""
    items.sort(key=lambda item: item.get_closest_marker("system") is None)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    workers.close()
