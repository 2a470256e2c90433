"""Fixtures for environment pools, and the log of calls that the test environments write."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from aligner.agents.environment_pool import EnvironmentPool
from tests.agents.acting import pool_of


class Log:
    """The calls that the test environments have logged."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def lines(self) -> list[list[str]]:
        return (
            [line.split(maxsplit=2) for line in self.file.read_text().splitlines()]
            if self.file.exists()
            else []
        )

    def calls(self, name: str) -> list[str]:
        return [what for episode, _, what in self.lines() if episode == name]

    def pids(self, name: str = "") -> list[int]:
        """Return the process ids of an episode's workers in order.

        Without a name: of all workers and of the processes that they have started.
        """
        found = [int(pid) for episode, pid, _ in self.lines() if name in ("", episode)]
        children = [
            int(what.split()[1])
            for _, _, what in self.lines()
            if what.startswith("child ") and not name
        ]
        return list(dict.fromkeys(found + children))

    def wait_for(self, name: str, what: str) -> None:
        end = time.monotonic() + 20
        while what not in self.calls(name):
            assert time.monotonic() < end, self.lines()
            time.sleep(0.01)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log(tmp_path / "log")
    yield log
    for pid in log.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def make(log: Log) -> Iterator[Callable[..., EnvironmentPool]]:
    """A function that starts pools; they are closed after the test."""
    pools = []

    def made(**settings: Any) -> EnvironmentPool:
        pools.append(pool_of(log.file, **settings))
        pools[-1].start()
        return pools[-1]

    yield made
    for pool in pools:
        pool.close()


def have_exited(pids: list[int], within_s: float = 15.0) -> bool:
    """Whether all processes exit within a time limit; zombies count as exited."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not any(map(_lives, pids)):
            return True
        time.sleep(0.02)
    return False


def _lives(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False
