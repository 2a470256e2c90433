"""Worker processes of the sides that a benchmark compares.

A `Group` starts processes with a given number of threads, sends them method calls over pipes, and
stops them.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aligner.launcher.rank_environment import FreePorts, library_environment
from aligner.paths import replace_environment


@dataclass(frozen=True)
class Way:
    """A way to use the cores: a number of threads per process, and for aligner's trainer a Megatron
    layout."""

    name: str
    threads: int
    layout: dict[str, int] | None = None
    as_ranks: bool = False
    """Whether the processes get the environment variables of the ranks of a launch."""

    @property
    def processes(self) -> int:
        layout = self.layout or {}
        return layout.get("data", 1) * layout.get("pipeline", 1)


OUR_WAYS = (
    Way("1 process, 2 threads", 2, as_ranks=True),
    Way("data parallel, 2 ranks", 1, {"data": 2}, as_ranks=True),
)
"""Ways to run aligner's trainer."""


def _serve(pipe: Any, make: Callable[[], Any], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    try:
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        worker = make()
        while (message := pipe.recv()) is not None:
            name, args = message
            pipe.send((True, getattr(worker, name)(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


class Group:
    """The processes of one way. A context manager, which stops the processes on exit."""

    def __init__(self, way: Way, make: Callable[[], Any]) -> None:
        """Set the function with which each process creates its worker; `call` calls methods of the
        worker."""
        self.way, self._make = way, make
        self._workers: list[tuple[Any, Any]] = []
        self._ports = FreePorts()

    def __enter__(self) -> Group:
        context = multiprocessing.get_context("spawn")
        port = next(self._ports)
        for rank in range(self.way.processes):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.way.processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(self.way.threads),
            }
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, self._make, environment), daemon=True
            )
            # Libraries read their environment variables before the process could set them itself.
            libraries = library_environment(self.way.threads) if self.way.as_ranks else {}
            with replace_environment({**os.environ, **libraries}):
                process.start()
            self._workers.append((process, ours))
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in self._workers:
            if process.is_alive():
                pipe.send(None)
            process.join(timeout=5)
            process.kill()
            process.join()

    def call(self, method: str, *args: Any) -> float:
        """Call a method of the worker in every process, and return the largest result.

        Raises RuntimeError with the traceback if a process fails.
        """
        for _, pipe in self._workers:
            pipe.send((method, args))
        answers = [pipe.recv() for _, pipe in self._workers]
        for good, value in answers:
            if not good:
                raise RuntimeError(value)
        return max(value for _, value in answers)
