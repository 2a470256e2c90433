"""Profiles of training steps (`profile.steps`): torch's profiler, memory snapshots, and marks for
NVIDIA Nsight Systems."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from aligner.paths import get_run_paths
from aligner.schema import Config

_log = logging.getLogger(__name__)
# Maximum number of allocations and frees in a memory snapshot.
_MEMORY_EVENTS = 200_000


class StepProfiler:
    """Profiler of the configured steps on one rank. Other steps and ranks are not slowed down."""

    def __init__(self, config: Config, rank: int) -> None:
        """Prepare the profiles of a rank of the trainer; nothing is recorded yet."""
        settings = config.profile
        self._steps = frozenset(settings.steps if rank in settings.ranks else ())
        self._uses_nsys = settings.tool == "nsys"
        self._records_memory = settings.memory
        self._rank = rank
        self._directory = get_run_paths(config).profile if self._steps else Path()
        self._is_profiling = False

    @contextmanager
    def profile(self, step: int) -> Iterator[None]:
        """Profile the block, which runs a training step, if the step is configured."""
        if step not in self._steps:
            yield
            return
        self._directory.mkdir(exist_ok=True)
        name = f"trainer-{self._rank}-step_{step:06d}"
        with ExitStack() as stack:
            if self._records_memory:
                snapshot = self._directory / f"{name}-memory.pickle"
                stack.enter_context(_record_memory(snapshot))
            if self._uses_nsys:
                stack.enter_context(_mark_for_nsys(step))
            else:
                trace = self._directory / f"{name}.json.gz"
                stack.enter_context(_record_trace(trace))
            self._is_profiling = True
            try:
                yield
            finally:
                self._is_profiling = False

    def open_range(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that names the operations of a phase in the profile of the current step;
        it does nothing if the step is not profiled."""
        if not self._is_profiling:
            return nullcontext()
        if self._uses_nsys:
            return torch.cuda.nvtx.range(name)
        return torch.profiler.record_function(name)


@contextmanager
def _record_trace(file: Path) -> Iterator[None]:
    """Record the operations of the block with torch's profiler, and write a Chrome trace."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        yield
    # The profiler compresses a file whose name ends with `.gz`.
    temporary = file.with_name(f".{file.name}")
    profiler.export_chrome_trace(str(temporary))
    temporary.replace(file)
    _log.info("profile of the step: %s", file)


@contextmanager
def _record_memory(file: Path) -> Iterator[None]:
    """Record the allocations and frees of GPU memory in the block, and write a snapshot."""
    memory = torch.cuda.memory
    memory._record_memory_history(max_entries=_MEMORY_EVENTS)
    try:
        yield
        temporary = file.with_name(f".{file.name}")
        memory._dump_snapshot(str(temporary))
        temporary.replace(file)
        _log.info("memory snapshot of the step: %s", file)
    finally:
        memory._record_memory_history(enabled=None)


@contextmanager
def _mark_for_nsys(step: int) -> Iterator[None]:
    """Make Nsight Systems record the block, as a range with the number of the step."""
    torch.cuda.profiler.start()
    try:
        with torch.cuda.nvtx.range(f"step {step}"):
            yield
            # Kernels that the step has started belong to its profile.
            torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()
