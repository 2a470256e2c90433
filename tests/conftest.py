"""Settings of all tests: threads, signals, the order of tests, and the pool of worker ranks."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Set before torch is imported: two spinning thread pools on two cores cost milliseconds for each
# parallel region.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false")

from tests.worker_pool import GC_THRESHOLD, WorkerPool

# Batch processes do not preempt each other when they wake up. Otherwise a thread of gloo preempts
# the thread that holds the lock of its connection, and spins until that thread is scheduled again.
# This takes a fifth of the time of tests with several ranks on two cores.
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# A shell's background jobs and `nohup` ignore these signals, and every process that a test starts
# would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

_LONGEST_FIRST = ("system", "servers", "launcher", "gpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest folders first: `make test` assigns one file at a time to a process."""
    tests = Path(__file__).parent
    items.sort(key=lambda item: item.path.relative_to(tests).parts[0] not in _LONGEST_FIRST)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip the tests that begin after `ALIGNER_TESTS_END`, a time in seconds since 1970.

    On a slow machine, the slow round would take longer than CI has. The summary states the number of
    these tests.
    """
    end = os.environ.get("ALIGNER_TESTS_END")
    if end is not None and time.time() > float(end):
        pytest.skip("not run, because the time for this round is over (ALIGNER_TESTS_END)")


def pytest_collection_finish() -> None:
    """Collect garbage less often, and exclude all imported modules and collected tests."""
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assign all fast tests of `servers` to one process, as if they were one file.

    The servers and worker ranks that they share then start in one process only. The slow tests of
    this folder start their own servers.
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
