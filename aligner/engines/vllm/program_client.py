"""Client of vLLM, which runs as a process in its own Python environment.

The client starts the program in the folder `program/`, and exchanges JSON messages with it over a
socket (see `program/serve.py`).
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from aligner.engines.engine_protocol import SamplingOptions
from aligner.engines.foreign.client import Client, ending_on_failure
from aligner.engines.foreign.responses import Responder, Response
from aligner.errors import AlignerError, EngineGone
from aligner.models.layouts import cache_bytes_per_token
from aligner.models.shape import ModelShape
from aligner.schema import EngineConfig
from aligner.triton_cleanup import kill_processes

NAME = "vLLM"
_PROGRAM = Path(__file__).parent / "program"
# Maximum size of an answer, in bytes.
_LINE = 1 << 28
# Number of tokens per block of the KV cache on CPUs.
_BLOCK = 128
# Timeout for the exit of the program and its processes, in seconds.
_CLOSE_S = 20.0
# Descriptions of the orders for error messages.
_ORDERS = {
    "begin": "start the weight update",
    "load": "load weights",
    "finish": "finish the weight update",
    "sleep": "release GPU memory",
    "wake": "reallocate GPU memory",
}


@dataclass
class Completion:
    """Generated tokens of a request so far, with the fields of vLLM's `CompletionOutput`."""

    token_ids: list[int] = field(default_factory=list)
    """Token ids generated so far."""
    logprobs: list[float] = field(default_factory=list)
    """Log-prob of each token."""
    finish_reason: str | None = None
    """Reason for the end of the generation; None while it is in flight."""


class Request:
    """Generation request in flight; used only on the event loop's thread.

    Iterating over the request yields the request itself whenever it has new tokens.

    Attributes:
        outputs: One completion, which grows.
        arrived: Queue of the program's answers to this request.
    """

    def __init__(self, program: "Program", number: int) -> None:
        """Create a request.

        Args:
            program: Program that executes the request.
            number: Id of the request's order.
        """
        self._program = program
        self._number = number
        self.outputs: Sequence[Completion] = (Completion(),)
        self.arrived: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def abort(self) -> None:
        """Abort the request; its finish reason becomes `cancelled`."""
        with contextlib.suppress(EngineGone):
            self._program.send({"id": self._number, "do": "abort"})

    async def __aiter__(self) -> AsyncIterator["Request"]:
        """Yield this request after each answer, until the generation ends.

        Raises:
            AlignerError: The generation failed.
            EngineGone: The program or one of its processes has exited.
        """
        (completion,) = self.outputs
        while completion.finish_reason is None:
            answer = await self.arrived.get()
            _raise_for(answer, "generate")
            completion.token_ids += answer["tokens"]
            completion.logprobs += answer["logprobs"]
            completion.finish_reason = answer["finish"]
            yield self


class Program:
    """Process in vLLM's Python environment, as the leader of its own process group.

    Except for `end`, all methods must be called on the event loop's thread.

    Attributes:
        process: The process.
        release: Version of vLLM; empty before `begin`.
    """

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        """Start the process.

        Args:
            python: Path of the Python interpreter of vLLM's environment (`engine.vllm.python`).
            environment: Environment variables of the process.

        Raises:
            AlignerError: The interpreter cannot be started.
        """
        client_socket, program_socket = socket.socketpair()
        command = [python, str(_PROGRAM / "serve.py"), str(program_socket.fileno())]
        try:
            # In a session of its own, the process does not receive the terminal's interrupt, and
            # all processes that it starts can be terminated as one group.
            self.process = subprocess.Popen(
                command,
                env=dict(environment),
                pass_fds=[program_socket.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                # Its output belongs to the log. This process's stdout may carry its own results.
                stdout=2,
            )
        except OSError as error:
            raise AlignerError(
                f"engine.vllm.python={python}: {error.strerror}; install vLLM with"
                " `aligner install-vllm`"
            ) from error
        finally:
            program_socket.close()

        self._socket = client_socket
        self._requests: dict[int, Request] = {}
        """Requests in flight, by the id of their order."""
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        """Futures of the answers to other orders, by the id of the order."""
        self._count = 0
        self._why_over: str | None = None
        """Reason why the program no longer executes orders; None while it does."""
        self.release = ""

    async def begin(self, settings: Mapping[str, Any]) -> None:
        """Start the engine in the process.

        Args:
            settings: Keyword arguments of vLLM's `AsyncEngineArgs`.

        Raises:
            AlignerError: vLLM did not start; the message contains its error.
        """
        self._answers, self._orders = await asyncio.open_connection(sock=self._socket, limit=_LINE)
        self._orders.write(json.dumps(settings).encode() + b"\n")
        line = await self._answers.readline()
        answer = json.loads(line) if line else {"refused": self._ended()}
        if "refused" in answer:
            raise AlignerError(
                f"{NAME} did not start: {answer['refused']}; see {NAME}'s output in this process's"
                " log"
            )
        self.release = answer["release"]
        self._reader = asyncio.create_task(self._read())

    def draw(self, tokens: Sequence[int], sampling: Mapping[str, Any]) -> Request:
        """Start a request that continues a sequence of tokens.

        Args:
            tokens: Prompt and the tokens generated so far.
            sampling: Keyword arguments of vLLM's `SamplingParams`.
        """
        number = self._next()
        self._requests[number] = request = Request(self, number)
        self.send({"id": number, "do": "draw", "tokens": list(tokens), "sampling": dict(sampling)})
        return request

    async def order(self, what: str, **arguments: Any) -> None:
        """Send an order, and wait until it is done.

        Args:
            what: Name of the order, a key of `_ORDERS`.
            arguments: Arguments of the order.

        Raises:
            AlignerError: The order failed; the message contains the reason.
            EngineGone: The program or one of its processes has exited.
        """
        number = self._next()
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        self.send({"id": number, "do": what, "with": arguments})
        _raise_for(await answer, _ORDERS[what])

    def send(self, order: Mapping[str, Any]) -> None:
        """Send an order without waiting for its answer.

        Raises:
            EngineGone: The program has exited.
        """
        if self._why_over is not None:
            raise EngineGone(f"{NAME}: {self._why_over}")
        self._orders.write(json.dumps(order).encode() + b"\n")

    def end(self) -> None:
        """Terminate the process and all processes that it has started.

        The method may be called on any thread and at any time.
        """
        with contextlib.suppress(OSError):
            # The program exits by itself when the connection is closed.
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_CLOSE_S)
        # Kill the processes that have not exited in time.
        kill_processes(list(_group(self.process.pid)))
        self.process.wait()

    def _next(self) -> int:
        """Return a new id for an order."""
        self._count += 1
        return self._count

    async def _read(self) -> None:
        """Distribute the program's answers until it closes the connection.

        Afterwards, all requests and orders in flight get an answer `gone`.
        """
        with contextlib.suppress(ConnectionError):
            while line := await self._answers.readline():
                self._take(json.loads(line))
        self._why_over = self._ended()
        for number in [*self._requests, *self._waiting]:
            self._take({"id": number, "gone": self._why_over})

    def _take(self, answer: dict[str, Any]) -> None:
        """Pass an answer to the request or the future that waits for it."""
        number = answer["id"]
        if (future := self._waiting.pop(number, None)) is not None:
            # The future is done already if its caller has cancelled it.
            if not future.done():
                future.set_result(answer)
            return
        if (request := self._requests.get(number)) is not None:
            request.arrived.put_nowait(answer)
            # An answer without `finish` contains an error, so it is the last one.
            if answer.get("finish", "failed") is not None:
                del self._requests[number]

    def _ended(self) -> str:
        """Return a description of the way in which the process has ended."""
        try:
            code = self.process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            return "its process closed the connection"
        return (
            f"its process was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"its process exited with code {code}"
        )


def _group(leader: int) -> Iterator[psutil.Process]:
    """Yield the processes of a process group, whose id is `leader`."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == leader:
                yield process


def _raise_for(answer: Mapping[str, Any], what: str) -> None:
    """Raise an exception if an answer contains an error.

    Args:
        answer: The program's answer.
        what: Description of the order, for the error message.

    Raises:
        AlignerError: The order failed.
        EngineGone: The program or one of its processes has exited.
    """
    if "gone" in answer:
        raise EngineGone(f"{NAME}: {answer['gone']}; see {NAME}'s output in this process's log")
    if "error" in answer:
        raise AlignerError(f"{NAME} failed to {what}: {answer['error']}")


class VLLMClient(Client):
    """Client of one vLLM instance with one worker per tensor-parallel rank."""

    def __init__(
        self,
        python: str,
        directory: Path,
        shape: ModelShape,
        settings: EngineConfig,
        seed: int,
        dtype: torch.dtype,
        gpus: Sequence[str] = (),
    ) -> None:
        """Start vLLM. The model has no weights yet.

        Args:
            python: Path of the Python interpreter of vLLM's environment (`engine.vllm.python`).
            directory: Model directory, from which only the configuration is read.
            shape: Dimensions of the model.
            settings: Section `engine` of the configuration.
            seed: Seed of the random streams of the samples.
            dtype: Data type of the model.
            gpus: Names of the workers' GPUs in CUDA_VISIBLE_DEVICES, in rank order; empty if vLLM
                runs on CPUs.

        Raises:
            AlignerError: vLLM failed to start, or did not start within `engine.vllm.timeout_s`.
        """
        super().__init__(NAME, settings.vllm.timeout_s)
        self._update_timeout_s = settings.update_timeout_s
        with ending_on_failure(NAME, self.shutdown):
            self._program = Program(python, _environment(os.environ, settings, gpus))
            self._end.callback(self._program.end)
            start = self._program.begin(
                _arguments(directory, shape, settings, seed, dtype, on_gpus=bool(gpus))
            )
            self._loop.run("starting (engine.vllm.timeout_s)", start, self._timeout_s)
            timeout_key = "engine.vllm.timeout_s"
            self._responder = Responder(
                NAME, self._draw, seed, self._timeout_s, timeout_key, has_least=True
            )

    def hold(self, *, interrupts: bool) -> None:
        """Pause generation (see `Client.hold`), and start a weight update."""
        super().hold(interrupts=interrupts)
        self._loop.run(
            "starting the weight update", self._program.order("begin"), self._update_timeout_s
        )

    def update_weights(self, handles: Mapping[str, Any] | None) -> None:
        """Load tensors, or finish the weight update.

        Args:
            handles: Handles of the shared memory by tensor-parallel rank; None finishes the update
                and clears the KV cache.
        """
        work = (
            self._program.order("finish")
            if handles is None
            else self._program.order("load", of_ranks=handles)
        )
        self._loop.run("loading weights", work, self._update_timeout_s)

    def release(self) -> None:
        """Free the memory of the model and of the KV cache, whose contents are lost."""
        self._loop.run("releasing GPU memory", self._program.order("sleep"), self._timeout_s)

    def resume(self, *, cache: bool) -> None:
        """Allocate memory again after `release`.

        Args:
            cache: Whether to allocate the memory of the KV cache; otherwise that of the model.
        """
        tags = ["kv_cache" if cache else "weights"]
        self._loop.run(
            "reallocating GPU memory", self._program.order("wake", tags=tags), self._timeout_s
        )

    def _draw(
        self, tokens: list[int], response: Response, options: SamplingOptions, seed: int, most: int
    ) -> Request:
        """Start the generation of a response, up to its maximum number of tokens.

        Args:
            tokens: Prompt and the tokens generated so far.
            response: The response.
            options: Sampling parameters.
            seed: Seed of this request.
            most: Unused; vLLM supports a minimum number of tokens itself.
        """
        max_tokens = response.limit - len(response.tokens)
        min_tokens = max(0, options.min_new_tokens - len(response.tokens))
        return self._program.draw(
            tokens,
            {
                "max_tokens": max_tokens,
                "min_tokens": min(min_tokens, max_tokens),
                # Greedy decoding is requested as top-k sampling with k = 1, so that the log-probs
                # are at the sampling temperature. vLLM's own greedy mode is temperature 0.
                "temperature": options.temperature,
                "top_k": 1 if options.greedy else options.top_k,
                "top_p": 1.0 if options.greedy else options.top_p,
                "min_p": 0.0 if options.greedy else options.min_p,
                "seed": seed % 2**63,
                "stop_token_ids": list(options.stop_token_ids),
                # The model's own end token has no effect; only `stop_token_ids` end a response.
                "ignore_eos": True,
            },
        )


def _environment(
    environ: Mapping[str, str], settings: EngineConfig, gpus: Sequence[str]
) -> dict[str, str]:
    """Return the environment in which vLLM starts.

    It is the environment of this process without the variables of its process group and its Python
    environment, and with only the GPUs of this replica.

    Args:
        environ: Environment variables of this process.
        settings: Section `engine` of the configuration.
        gpus: Names of the workers' GPUs in CUDA_VISIBLE_DEVICES; empty if vLLM runs on CPUs.
    """
    own_variables = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PYTHONHOME",
        "VIRTUAL_ENV",
    )
    environment = {name: value for name, value in environ.items() if name not in own_variables}
    # By default, vLLM binds each worker to a NUMA node of its own, and would bind the workers of
    # all replicas to the same nodes.
    if settings.parallel.ranks > 1:
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # vLLM's workers use the first GPUs that are visible.
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment | {
        # The workers import `receive` from here.
        "PYTHONPATH": str(_PROGRAM),
        "VLLM_NO_USAGE_STATS": "1",
        # A forked worker, which is vLLM's default on GPUs, would inherit the socket, and the
        # connection would stay open after the program has exited.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # The V2 model runner has a different sampler, which `receive` does not adapt.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }


def _arguments(
    directory: Path,
    shape: ModelShape,
    settings: EngineConfig,
    seed: int,
    dtype: torch.dtype,
    *,
    on_gpus: bool,
) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's `AsyncEngineArgs`.

    Args:
        directory: Model directory.
        shape: Dimensions of the model.
        settings: Section `engine` of the configuration.
        seed: Seed of the run.
        dtype: Data type of the model.
        on_gpus: Whether vLLM runs on GPUs; otherwise on CPUs.
    """
    # Bytes of the KV cache per worker; None means vLLM's default.
    memory = None if settings.kv_cache_mib is None else settings.kv_cache_mib << 20
    # On CPUs, vLLM would allocate most of the machine's memory. Instead, allocate enough blocks for
    # the maximum number of sequences of maximum length, and one more.
    if memory is None and not on_gpus:
        tokens = _BLOCK * (-(-shape.max_positions // _BLOCK) * settings.batch_size + 1)
        memory = tokens * cache_bytes_per_token(shape, settings.parallel.tensor, dtype.itemsize)
    return {
        "model": str(directory),
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": settings.parallel.tensor,
        "max_model_len": shape.max_positions,
        "max_num_seqs": settings.batch_size,
        "seed": seed % 2**32,
        "enforce_eager": not (settings.cuda_graphs and on_gpus),
        "enable_sleep_mode": settings.sleep and on_gpus,
        "stream_interval": settings.vllm.stream_interval,
        **({} if memory is None else {"kv_cache_memory_bytes": memory}),
        **({"gpu_memory_utilization": settings.vllm.memory_fraction} if on_gpus else {}),
    }
