"""Weight sync when a process of the trainer or of the engine is killed during the update."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from aligner.resharding.transport import Link
from aligner.schema import EngineParallelConfig, ParallelConfig
from tests.resharding.jobs import Rank, make_plan

TRAINER, ENGINE = ParallelConfig(tensor=2), EngineParallelConfig(data=2)
TIMEOUT = timedelta(seconds=60)
"""Timeout of the store, which normally answers at once."""


def run_rank(pipe: Connection, port: int, at: int) -> None:
    """Execute the commands that arrive on `pipe`, until None arrives.

    Commands: ("connect", (generation, timeout in s)), ("publish", version), ("fail", version),
    ("die", version).
    """
    torch.set_num_threads(1)
    plan = make_plan(TRAINER, ENGINE, separate=True)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    rank: Rank | None = None
    pipe.send(None)
    while (order := pipe.recv()) is not None:
        what, value = order
        if what == "connect":
            generation, timeout_s = value
            link = Link(
                store, at, plan.labels, timeout=timedelta(seconds=timeout_s), generation=generation
            )
            rank = Rank(plan, link, bucket_bytes=512, sink=rank and rank.sink)
            pipe.send(None)
            continue
        assert rank is not None
        if what == "fail":
            result = rank.failed_publish(value)
            rank.check(1)
            pipe.send(result)
            continue
        if what == "die":
            rank.before_read, rank.sink.before_load = die_at_norm, die
        rank.publish(value)
        rank.check(value)
        pipe.send(None)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_norm(name: str) -> None:
    """Kill this process while it sends: after the large pieces, before the small ones."""
    if name == "model.norm.weight":
        die()


class Worlds:
    """Processes of a trainer and an engine that share only a store, which this process hosts."""

    def __init__(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: dict[int, tuple[BaseProcess, Connection]] = {}
        self.start(*range(TRAINER.ranks + ENGINE.ranks))

    def start(self, *ranks: int) -> None:
        """Start processes, and wait until they are ready for commands."""
        context = multiprocessing.get_context("spawn")
        for at in ranks:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run_rank, args=(theirs, self._store.port, at), daemon=True
            )
            process.start()
            theirs.close()
            self._processes[at] = process, ours
        for at in ranks:
            self._answer(at)

    def order(
        self, what: str, value: Any, *, instead: Mapping[int, str] | None = None
    ) -> dict[int, Any]:
        """Send a command to every rank, and return each rank's answer, None for a killed rank.

        `instead` has other commands for some of the ranks.
        """
        for at, (_, pipe) in self._processes.items():
            pipe.send(((instead or {}).get(at, what), value))
        return {at: self._answer(at) for at in self._processes}

    def _answer(self, at: int) -> Any:
        process, pipe = self._processes[at]
        assert pipe.poll(60), f"rank {at} does not answer"
        try:
            return pipe.recv()
        except EOFError:
            process.join()
            assert process.exitcode == -signal.SIGKILL
            return None

    def close(self) -> None:
        for process, _ in self._processes.values():
            process.kill()
        for process, _ in self._processes.values():
            process.join()


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    running = Worlds()
    yield running
    running.close()


@pytest.mark.promise("killed-rank-in-weight-sync-is-named")
@pytest.mark.parametrize(
    ("generation", "killed", "name", "timeout_s", "limit_s"),
    # The other ranks notice at once that a rank dies while it sends. They wait for the timeout if
    # the rank has sent everything.
    [(0, 1, "trainer rank 1", 40, 30), (2, 3, "engine rank 1", 6, 30)],
    ids=["while-it-sends", "when-it-has-received"],
)
@pytest.mark.slow
def test_killed_rank_is_named_and_old_version_serves(
    worlds, generation, killed, name, timeout_s, limit_s
):
    worlds.order("connect", (generation, timeout_s))
    worlds.order("publish", 1)
    results = worlds.order("fail", 2, instead={killed: "die"})
    assert results.pop(killed) is None
    for at, result in results.items():
        assert name in result["error"], result["error"]
        assert not any(
            other in result["error"]
            for other in ("trainer rank 0 does not", "engine rank 0 does not")
        )
        assert result["seconds"] < limit_s
        assert result["aborted"] == (1 if at >= TRAINER.ranks else 0)
    worlds.start(killed)
    worlds.order("connect", (generation + 1, timeout_s))
    worlds.order("publish", 3)
