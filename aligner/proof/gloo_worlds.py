"""Worlds of ranks on this machine: processes that are connected by gloo and run one function."""

import importlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, Protocol

from aligner.errors import AlignerError
from aligner.launcher.rank_environment import FreePorts

_TIMEOUT_S = 600
_TIMEOUT_AFTER_FAILURE_S = 5
_PORTS = FreePorts()
_CONTEXT = multiprocessing.get_context("forkserver")


class RunRanks(Protocol):
    """Function that calls a function on every rank of a world."""

    def __call__(self, function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
        """Return the results of the ranks, in the order of the ranks.

        Args:
            function: A function at the top level of a module.
            world: Number of ranks.
            *arguments: Arguments of the function.
        """


def preload() -> None:
    """Start the process from which ranks are forked. It imports torch and megatron-core meanwhile.

    The environment of ranks is that of the first call.
    """
    _CONTEXT.set_forkserver_preload(["aligner.proof.rank_jobs"])
    forkserver.ensure_running()


def run_ranks(function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    """Start the ranks of a world as processes, and return the results of a function on each rank.

    Raises:
        AlignerError: A rank has failed; the message contains its traceback.
    """
    preload()
    port = next(_PORTS)
    message = (function.__module__, function.__name__, arguments)
    ranks = []
    for rank in range(world):
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(
            target=_run_rank, args=(theirs, rank, world, port, message), daemon=True
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return _collect([pipe for _, pipe in ranks])
    finally:
        for process, pipe in ranks:
            process.kill()
            process.join()
            pipe.close()


def _collect(pipes: list[Connection]) -> list[Any]:
    results: list[Any] = []
    failures: list[str] = []
    for rank, pipe in enumerate(pipes):
        # Do not wait for ranks that wait for a failed rank.
        if not pipe.poll(_TIMEOUT_AFTER_FAILURE_S if failures else _TIMEOUT_S):
            failures.append(f"rank {rank} of {len(pipes)} did not answer")
            continue
        try:
            has_result, value = pipe.recv()
        except EOFError:
            failures.append(f"rank {rank} of {len(pipes)} exited")
            continue
        (results if has_result else failures).append(value)
    if failures:
        raise AlignerError("\n".join(failures))
    return results


def _run_rank(pipe: Connection, rank: int, world: int, port: int, message: tuple[Any, ...]) -> None:
    """Run the function of a message as a rank, and send its result."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
    )
    import torch

    torch.set_num_threads(1)
    module, name, arguments = message
    try:
        from aligner.proof.rank_jobs import replace_tensors

        result = getattr(importlib.import_module(module), name)(*arguments)
        pipe.send((True, replace_tensors(result)))
    except BaseException:
        pipe.send((False, f"rank {rank} of {world}:\n{traceback.format_exc()}"))
