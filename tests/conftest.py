from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported anywhere: two spinning thread pools on two cores cost milliseconds a
# parallel region.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false")

from tests.worker_pool import GC_THRESHOLD, WorkerPool

# Batch processes do not preempt each other when they wake up. Otherwise a thread of gloo preempts the
# one that holds the lock of its connection, and spins until that one is scheduled again: a fifth of
# the time of tests with several ranks on two cores.
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# A shell's background job and `nohup` have these ignored, and every process that a test starts
# inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

_LONGEST_FIRST = ("system", "servers", "launcher", "gpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first: `make test` gives two processes a file at a time."""
    tests = Path(__file__).parent
    items.sort(key=lambda item: item.path.relative_to(tests).parts[0] not in _LONGEST_FIRST)


def pytest_collection_finish() -> None:
    """Look for garbage less often, and not among all that was imported and collected."""
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The first round of `servers` is handed out as one file: its servers and worker ranks then
    start in one process alone.

    The second round's tests there have servers of their own.
    """
    if config.option.dist != "loadfile" or config.option.markexpr != "not slow":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "tests/servers" if file.startswith("tests/servers/") else file

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    workers.close()
