"""TensorRT-LLM's asynchronous client, seen from a program that is not: every call here waits for its answer."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aligner.engines.protocol import InFlight, SamplingOptions
from aligner.engines.tensorrt_llm.arguments import llm_arguments
from aligner.engines.tensorrt_llm.environment import environment, worker_environment
from aligner.engines.tensorrt_llm.event_loop import EventLoop
from aligner.engines.tensorrt_llm.features import llm_keywords, load_package, memory_tags
from aligner.engines.tensorrt_llm.responses import Responder, Response
from aligner.errors import AlignerError
from aligner.models.shape import ModelShape
from aligner.schema import EngineConfig


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


@dataclass
class Call:
    """A method of every worker, which runs."""

    future: Future[list[Any]]
    answers: list[Any] = field(default_factory=list)
    """The workers', in rank order, once all have answered."""

    @property
    def over(self) -> bool:
        """Whether it ended, well or not."""
        return self.future.done()


class Client:
    """One TensorRT-LLM instance and its workers, which end with this process if not before."""

    def __init__(
        self,
        directory: Path,
        shape: ModelShape,
        settings: EngineConfig,
        seed: int,
        context: int,
        dtype: torch.dtype,
        devices: Sequence[int],
    ) -> None:
        """Start one worker on each of `devices`, the machine's indices; it has no weights yet."""
        self._workers, self._timeout_s = settings.parallel.tensor, settings.tensorrt_llm.timeout_s
        self._update_timeout_s = settings.update_timeout_s
        self._end = contextlib.ExitStack()  # all of it is tried, whatever fails of it
        self._loop = EventLoop("tensorrt-llm")
        self._end.callback(self._loop.close)
        with ending_on_failure(self.shutdown):
            with environment(worker_environment(os.environ, devices)):
                package = load_package()  # which starts MPI where a launcher's variables ask for it
                arguments = llm_arguments(llm_keywords(), directory, shape, settings, dtype, context)
                self._tags = memory_tags() if settings.sleep else ((), ())
                self._llm = package.AsyncLLM(**arguments)
                self._end.callback(self._llm.shutdown)
                self._loop.run("starting", self._llm.setup_async(), self._timeout_s)
            self._responder = Responder(self._llm, package.SamplingParams, seed, self._timeout_s)
        atexit.register(self.shutdown)

    def devices(self) -> list[str]:
        """The workers' GPUs, in rank order, as GPU-… identifiers."""
        return self._call("report_device_id")

    def check_devices(self, uuids: Sequence[str]) -> None:
        """Raise AlignerError when the workers run on other GPUs than these."""
        found = self.devices()
        if sorted(found) != sorted(uuids):
            raise AlignerError(
                f"TensorRT-LLM's workers run on the GPUs {', '.join(sorted(found))}, the replica's ranks on"
                f" {', '.join(sorted(uuids))}"
            )

    def start(self, responses: Sequence[Response], options: SamplingOptions) -> list[Any]:
        """One task for each response, done when it is complete."""
        return self._loop.run("submitting", self._responder.start(responses, options), self._timeout_s)

    def cancel(self, responses: Mapping[Any, Response]) -> None:
        """Drop responses, by their tasks."""
        self._loop.run("cancelling", self._responder.cancel(responses), self._timeout_s)

    def wait(self, tasks: Sequence[Any]) -> None:
        """Return when a task is done, or when none can be."""
        self._loop.run("generating", self._responder.wait(tasks))

    def hold(self, in_flight: InFlight) -> None:
        """Let responses be finished or interrupted; none goes on until `admit`."""
        self._loop.run("ending responses", self._responder.hold(in_flight))

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
        """Take the model's memory back, with its contents; `cache`: that of keys and values too."""
        self._loop.run("taking memory back", self._llm.resume(list(self._tags[0])), self._timeout_s)
        if cache:
            self.resume_cache()

    def resume_cache(self) -> None:
        """Take the memory of keys and values back."""
        self._loop.run("taking memory back", self._llm.resume(list(self._tags[1])), self._timeout_s)

    def shutdown(self) -> None:
        """End the workers; once is enough."""
        atexit.unregister(self.shutdown)
        self._end.close()

    @contextlib.contextmanager
    def calling(self, method: str, *arguments: Any) -> Iterator[Call]:
        """A method of every worker, which runs while the block does. Raises AlignerError unless every one succeeds."""
        call = Call(self._loop.submit(self._llm.collective_rpc(method, args=arguments)))
        try:
            yield call
        except AlignerError as error:
            if call.over and (reason := call.future.exception()):  # which is why the block's part failed
                raise AlignerError(f"TensorRT-LLM's workers failed in {method}: {reason}") from error
            raise
        call.answers = self._answers(method, call.future, self._update_timeout_s)

    def _call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """A method of every worker; their answers, in rank order."""
        future = self._loop.submit(self._llm.collective_rpc(method, args=arguments))
        return self._answers(method, future, timeout_s or self._timeout_s)

    def _answers(self, method: str, future: Future[list[Any]], timeout_s: float) -> list[Any]:
        """The workers' answers. Raises AlignerError when one is missing, or says that it failed."""
        try:
            answers = self._loop.result(method, future, timeout_s)
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
