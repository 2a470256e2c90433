from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported anywhere: two spinning thread pools on two cores cost milliseconds a parallel region.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false")

from tests.worker_pool import WorkerPool

# A shell's background job and `nohup` have these ignored, and every process that a test starts inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

_LONGEST_FIRST = ("system", "servers", "launcher", "gpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first: `make test` gives two processes a file at a time."""
    tests = Path(__file__).parent
    items.sort(key=lambda item: item.path.relative_to(tests).parts[0] not in _LONGEST_FIRST)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    workers.close()
