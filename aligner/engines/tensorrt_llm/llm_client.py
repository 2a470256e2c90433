"""TensorRT-LLM's asynchronous client, seen from a program that is not: every call here waits for its answer."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from aligner.engines.engine_protocol import SamplingOptions
from aligner.engines.tensorrt_llm.llm_arguments import llm_arguments, llm_keywords, load_package, memory_tags
from aligner.engines.tensorrt_llm.responses import Responder, Response
from aligner.environment_variables import environment
from aligner.errors import AlignerError
from aligner.models.shape import ModelShape
from aligner.schema import EngineConfig

T = TypeVar("T")

_CLOSE_S = 10.0
"""How long a loop that is closed has for cancelling what runs there."""
_OTHER_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "SLURM_")
_OTHER_WORLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def worker_environment(environ: Mapping[str, str], devices: Sequence[int]) -> dict[str, str]:
    """The driving rank's environment without its own launcher and world, with the workers' GPUs visible.

    `devices` are the machine's GPU indices. Every driver starts a Ray cluster of its own, which takes the visible GPUs.
    """
    kept = {
        name: value for name, value in environ.items() if not name.startswith(_OTHER_LAUNCHERS) and name not in _OTHER_WORLD
    }
    return kept | {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",
        "TLLM_DISABLE_MPI": "1",
        # Weights of an update would be copied from several threads, on streams that nothing waits for.
        "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",
    }


def device_index(environ: Mapping[str, str], ordinal: int) -> int:
    """The machine's index of this process's `ordinal`-th GPU.

    Raises AlignerError when CUDA_VISIBLE_DEVICES does not list indices: Ray and TensorRT-LLM count GPUs.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return ordinal
    try:
        return int(visible.split(",")[ordinal])
    except (ValueError, IndexError) as error:
        raise AlignerError(f"CUDA_VISIBLE_DEVICES={visible}: TensorRT-LLM needs GPU indices there, such as 0,1") from error


@contextlib.contextmanager
def ending_on_failure(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` when the block raises; when that fails too, the error tells both."""
    try:
        yield
    except BaseException as error:
        try:
            end()
        except Exception as failure:
            raise AlignerError(f"{error}; then TensorRT-LLM could not be ended: {failure}") from error
        raise


class EventLoop:
    """An event loop on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work` there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, what: str, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run `work` there and wait for its result. Raises AlignerError naming `what` when that takes longer."""
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            if future.done():  # the work's own
                raise
            future.cancel()
            raise AlignerError(f"TensorRT-LLM did not answer within {timeout_s:g} s: {what}") from error
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what runs there and end the thread. A loop that is blocked can not be ended: it goes with the process."""
        stopping = self.submit(_cancel_others())
        if stopping not in concurrent.futures.wait([stopping], _CLOSE_S).done:
            return
        stopping.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Client:
    """One TensorRT-LLM instance and its workers, which end with this process if not before."""

    def __init__(
        self,
        directory: Path,
        shape: ModelShape,
        settings: EngineConfig,
        seed: int,
        dtype: torch.dtype,
        devices: Sequence[int],
        uuids: Sequence[str],
    ) -> None:
        """Start one worker on each of `devices`, the machine's indices; it has no weights yet.

        `uuids` are the identifiers (GPU-…) of the same GPUs. Raises AlignerError when the workers run on others.
        """
        self._workers, self._timeout_s = settings.parallel.tensor, settings.tensorrt_llm.timeout_s
        self._update_timeout_s = settings.update_timeout_s
        self._end = contextlib.ExitStack()  # all of it is tried, whatever fails of it
        self._loop = EventLoop("tensorrt-llm")
        self._end.callback(self._loop.close)
        with ending_on_failure(self.shutdown):
            with environment(worker_environment(os.environ, devices)):
                package = load_package()  # which starts MPI where a launcher's variables ask for it
                arguments = llm_arguments(llm_keywords(), directory, shape, settings, dtype)
                self._tags = memory_tags() if settings.sleep else ((), ())
                self._llm = package.AsyncLLM(**arguments)
                self._end.callback(self._llm.shutdown)
                self._loop.run("starting", self._llm.setup_async(), self._timeout_s)
            self._check_devices(uuids)
            self._responder = Responder(self._llm, package.SamplingParams, seed, self._timeout_s)
        atexit.register(self.shutdown)

    def start(self, responses: Sequence[Response], options: SamplingOptions) -> list[Any]:
        """One task for each response, done when it is complete."""
        return self._loop.run("submitting", self._responder.start(responses, options), self._timeout_s)

    def cancel(self, responses: Mapping[Any, Response]) -> None:
        """Drop responses, by their tasks."""
        self._loop.run("cancelling", self._responder.cancel(responses), self._timeout_s)

    def wait(self, tasks: Sequence[Any]) -> None:
        """Return when a task is done, or when none can be."""
        self._loop.run("generating", self._responder.wait(tasks))

    def hold(self, *, interrupts: bool) -> None:
        """Let responses be finished or interrupted; none goes on until `admit`."""
        self._loop.run("ending responses", self._responder.hold(interrupts=interrupts))

    def admit(self, version: int) -> None:
        """Responses go on; `version` stamps the tokens that they draw."""
        self._loop.run("going on", self._responder.admit(version), self._timeout_s)

    def update_weights(self, handles: dict[str, str] | None) -> None:
        """Load tensors given by handles, of every worker's GPU; None ends an update and forgets keys and values."""
        self._call("update_weights", handles, timeout_s=self._update_timeout_s)

    def release(self) -> None:
        """Free the memory of the model and of keys and values, which are forgotten."""
        self._call("forget_prefixes")
        model, cache = self._tags
        self._loop.run("releasing memory", self._llm.release([*model, *cache]), self._timeout_s)

    def resume(self, *, cache: bool) -> None:
        """Take back the memory of keys and values, or the model's."""
        self._loop.run("taking memory back", self._llm.resume(list(self._tags[cache])), self._timeout_s)

    def shutdown(self) -> None:
        """End the workers; once is enough."""
        atexit.unregister(self.shutdown)
        self._end.close()

    def _call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """A method of every worker; their answers, in rank order. Raises AlignerError unless every one succeeds."""
        call = self._llm.collective_rpc(method, args=arguments)
        try:
            answers: list[Any] = self._loop.run(method, call, timeout_s or self._timeout_s)
        except AlignerError:
            raise
        except Exception as error:
            raise AlignerError(f"TensorRT-LLM's workers failed in {method}: {type(error).__name__}: {error}") from error
        if len(answers) != self._workers:
            raise AlignerError(f"{method}: {len(answers)} of TensorRT-LLM's {self._workers} workers answered")
        for rank, answer in enumerate(answers):
            if answer is False or isinstance(answer, BaseException):
                raise AlignerError(f"TensorRT-LLM's worker {rank} failed in {method}: {answer!r}")
        return answers

    def _check_devices(self, uuids: Sequence[str]) -> None:
        """Raise AlignerError when the workers run on other GPUs than these."""
        found, wanted = sorted(self._call("report_device_id")), sorted(uuids)
        if found != wanted:
            raise AlignerError(
                f"TensorRT-LLM's workers run on the GPUs {', '.join(found)}, the replica's ranks on {', '.join(wanted)}"
            )
