from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before torch is imported anywhere: two spinning thread pools on two cores cost milliseconds a parallel region.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false")

from tests.worker_pool import WorkerPool


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `make test` runs at the same time: a file's tests stay together, in order, as do all that look at the one
    undisturbed run. Whole runs, which take longest, come first.
    """
    for item in items:
        shared = "undisturbed" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("undisturbed" if shared else item.nodeid.partition("::")[0]))
    items.sort(key=lambda item: item.get_closest_marker("system") is None)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    workers.close()
