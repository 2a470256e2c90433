"""Worlds of worker ranks that stay alive between tests, forked from a process that has imported
torch and megatron-core.

Starting a world, connecting its process groups and destroying them took a third of the time of the
tests that use one. A world is therefore started once for each number of ranks, and its process
groups are reused.
"""

from __future__ import annotations

import gc
import importlib
import io
import multiprocessing
import os
import pickle
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from aligner.launcher.rank_environment import FreePorts

GC_THRESHOLD = 50_000
"""New objects between two garbage collections. Python's 700 took a tenth of the time of tests."""
_GROUP_TIMEOUT = timedelta(seconds=120)
_CHECK_TIMEOUT = timedelta(seconds=30)
_PORTS = FreePorts()


def free_port() -> int:
    """Return a loopback port that no other test or run uses while this process lives."""
    return next(_PORTS)


class _TensorPickler(pickle.Pickler):
    """Pickles tensors as bytes.

    A pipe of torch.multiprocessing passes a file descriptor for each tensor, in a connection of its
    own, which takes longer than to copy a small tensor.
    """

    def reducer_override(self, value: Any) -> Any:
        """See pickle.Pickler."""
        import torch

        if type(value) is not torch.Tensor or value.requires_grad or value.layout != torch.strided:
            return NotImplemented
        content = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return _tensor_of_bytes, (content, value.dtype, value.shape)


def _tensor_of_bytes(content: bytes, dtype: Any, shape: Sequence[int]) -> Any:
    import torch

    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


def _send(pipe: Any, message: Any) -> None:
    buffer = io.BytesIO()
    _TensorPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    pipe.send_bytes(buffer.getbuffer())


def _receive(pipe: Any) -> Any:
    return pickle.loads(pipe.recv_bytes())


class _KeptGroups:
    """The process groups of one rank, kept for the life of its process.

    A test gets the groups that an earlier test has made with the same ranks for the same purpose,
    and `destroy_process_group` keeps them. Two groups of one test are never one, also if they have
    the same ranks: collectives of two groups may overlap in another order on each rank.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._new_group = dist.new_group
        self._groups: dict[tuple[Any, ...], Any] = {}
        self._groups_of_call: Counter[tuple[Any, ...]] = Counter()
        self._calls = 0

    def connect(self, rank: int, size: int) -> None:
        """Join the world, and keep its groups from then on."""
        dist = self._dist
        _share_gloo_device()
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=_GROUP_TIMEOUT)
        self._store = dist.distributed_c10d._get_default_store()

        for module in (dist, dist.distributed_c10d):
            module.new_group = self._shared_group
            module.destroy_process_group = lambda group=None: None

    def begin_call(self) -> None:
        """Give the next test the default group that a new world would have."""
        c10d, world = self._dist.distributed_c10d, self._dist.group.WORLD
        self._calls += 1
        self._groups_of_call.clear()
        # The keys that earlier tests have left in the store stay out of the way.
        store = self._dist.PrefixStore(f"call{self._calls}", self._store)
        c10d._world.pg_map[world] = (c10d._world.pg_map[world][0], store)
        c10d._set_pg_timeout(_GROUP_TIMEOUT, world)

    def end_call(self) -> None:
        """Raise if the test left messages of a collective behind, or a rank in one."""
        self._dist.monitored_barrier(timeout=_CHECK_TIMEOUT)

    def _shared_group(
        self,
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        **options: Any,
    ) -> Any:
        purpose = (None if ranks is None else tuple(ranks), timeout, options.get("group_desc"))
        key = (*purpose, self._groups_of_call[purpose])
        self._groups_of_call[purpose] += 1
        if key not in self._groups:
            self._groups[key] = self._new_group(ranks, timeout, backend, **options)
        return self._groups[key]


def _share_gloo_device() -> None:
    """Give all process groups of this process one gloo device.

    torch makes a device for each group, with a thread that wakes up a hundred times a second also
    when nothing is sent. The kept groups of all ranks are hundreds, and took a sixth of the
    processor's time.
    """
    from torch.distributed import ProcessGroupGloo

    device = ProcessGroupGloo.create_device(hostname="127.0.0.1")
    initialize = ProcessGroupGloo.__init__

    def initialize_with_device(
        group: Any, store: Any, rank: int, size: int, timeout: timedelta
    ) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [device]
        options._timeout = timeout
        initialize(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = initialize_with_device  # type: ignore[method-assign]


def _serve(pipe: Any, rank: int, size: int, port: int, is_kept: bool) -> None:
    """Run the functions that the pipe names, until the pool kills this process."""
    os.environ.update(
        OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="PASSIVE",
        MKL_NUM_THREADS="1",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.set_threshold(GC_THRESHOLD)
    groups = _KeptGroups()
    imported: set[str] = set()

    while True:
        module, name, args, kwargs = _receive(pipe)
        try:
            function = getattr(importlib.import_module(module), name)
            if module not in imported:
                imported.add(module)
                gc.freeze()  # exclude imported objects from garbage collection

            if not is_kept:
                dist.init_process_group("gloo", rank=rank, world_size=size, timeout=_GROUP_TIMEOUT)
                _send(pipe, (True, function(*args, **kwargs)))
                continue

            if not dist.is_initialized():
                groups.connect(rank, size)
            groups.begin_call()
            result = function(*args, **kwargs)
            groups.end_call()
            _send(pipe, (True, result))
        except BaseException:
            _send(pipe, (False, f"rank {rank} of {size}:\n{traceback.format_exc()}"))


class _World:
    """The running processes of one world."""

    def __init__(self, context: Any, size: int, is_kept: bool) -> None:
        self.size = size
        self._ranks: list[tuple[Any, Any]] = []
        port = free_port()
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, size, port, is_kept), daemon=True
            )
            process.start()
            self._ranks.append((process, ours))

    def call(self, message: tuple[Any, ...], timeout: float) -> tuple[list[Any], list[str]]:
        """Return the results and the errors of the ranks."""
        for _, pipe in self._ranks:
            _send(pipe, message)

        results, failures = [], []
        for rank, (_, pipe) in enumerate(self._ranks):
            # Do not wait for ranks that wait for a failed rank.
            if not pipe.poll(5 if failures else timeout):
                failures.append(f"rank {rank} of {self.size} did not answer")
                continue
            try:
                is_result, value = _receive(pipe)
            except EOFError:
                failures.append(f"rank {rank} of {self.size} exited")
                continue
            (results if is_result else failures).append(value)
        return results, failures

    def close(self) -> None:
        for process, _ in self._ranks:
            process.kill()
        for process, pipe in self._ranks:
            process.join()
            pipe.close()


class WorkerPool:
    """Runs a module-level function on every rank of a gloo world and returns each rank's result, in
    rank order."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "aligner.megatron.policy"])
        self._worlds: dict[int, _World] = {}

    def run(
        self,
        function: Callable[..., Any],
        world: int,
        *args: Any,
        timeout: float = 240,
        fresh: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a function on every rank, with torch.distributed initialized.

        Args:
            function: A function at the top level of a module.
            world: Number of ranks.
            timeout: Seconds to wait for a rank's result.
            fresh: Start a world for this call only. For a function that breaks or leaves its world
                on purpose, or that looks at the world's threads and sockets.

        Returns:
            The results of the ranks, which must be picklable.

        Raises:
            AssertionError: A rank has raised an error or not answered. Its world is replaced.
        """
        message = (function.__module__, function.__name__, args, kwargs)
        if fresh:
            running = _World(self._context, world, is_kept=False)
        elif world in self._worlds:
            running = self._worlds[world]
        else:
            running = self._worlds[world] = _World(self._context, world, is_kept=True)

        results, failures = running.call(message, timeout)
        if fresh:
            running.close()
        elif failures:
            running.close()
            del self._worlds[world]
        if failures:
            test = os.environ.get("PYTEST_CURRENT_TEST", "a test")
            raise AssertionError("\n".join([f"{test} broke its world of {world}", *failures]))
        return results

    def close(self) -> None:
        """End every process; the next run starts new ones."""
        for world in self._worlds.values():
            world.close()
        self._worlds = {}
