"""Worker ranks that live across tests, forked from a process that has imported torch and
megatron-core."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from aligner.launcher.server_ports import FreePorts

MAX_WORLD = 4


_PORTS = FreePorts()


def free_port() -> int:
    """A port of loopback that no test nor run has or will have while this process lives."""
    return next(_PORTS)


def _serve(pipe: Any) -> None:
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", MKL_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    imported: set[str] = set()
    while True:
        message = pipe.recv()
        if message is None:
            return
        module, name, rank, world, port, args, kwargs = message
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        try:
            function = getattr(importlib.import_module(module), name)
            if module not in imported:
                imported.add(module)
                gc.freeze()  # what an import leaves stays: collecting need not look at it
            dist.init_process_group(
                "gloo", rank=rank, world_size=world, timeout=timedelta(seconds=120)
            )
            try:
                pipe.send((True, function(*args, **kwargs)))
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
                # Models refer to process groups in cycles, and a group keeps its threads for as
                # long as it is there.
                gc.collect()
        except BaseException:
            pipe.send((False, f"rank {rank} of {world}:\n{traceback.format_exc()}"))


class WorkerPool:
    """Runs a module-level function on every rank of a gloo world and returns each rank's result, in
    rank order."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "aligner.megatron.policy"])
        self._workers: list[tuple[Any, Any]] = []

    def _grow(self, size: int) -> None:
        while len(self._workers) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))

    def run(
        self,
        function: Callable[..., Any],
        world: int,
        *args: Any,
        timeout: float = 240,
        **kwargs: Any,
    ) -> list[Any]:
        """Every rank calls function(*args, **kwargs) with torch.distributed initialised; results
        must pickle."""
        self._grow(world)
        port = free_port()
        for rank in range(world):
            self._workers[rank][1].send(
                (function.__module__, function.__name__, rank, world, port, args, kwargs)
            )
        results, failures = [], []
        for rank in range(world):
            pipe = self._workers[rank][1]
            if not pipe.poll(5 if failures else timeout):
                failures.append(f"rank {rank} of {world} did not answer")
                continue
            good, value = pipe.recv()
            (results if good else failures).append(value)
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    def close(self) -> None:
        """End every worker; the next run starts new ones."""
        for process, _ in self._workers:
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []
