"""vLLM in an environment of its own, driven through a socket: JSON there and back."""

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
_LINE = 1 << 28
"""Bytes of an answer, at most."""
_BLOCK = 128
"""Tokens of a block of keys and values on CPUs."""
_CLOSE_S = 20.0
"""How long the program has for ending what it has started."""
_ORDERS = {
    "begin": "start the weight update",
    "load": "load weights",
    "finish": "finish the weight update",
    "sleep": "release GPU memory",
    "wake": "reallocate GPU memory",
}
"""What the orders do, for error messages."""


@dataclass
class Completion:
    """What a request has given so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class Request:
    """A request under way, on the event loop's thread."""

    def __init__(self, program: "Program", number: int) -> None:
        self._program, self._number = program, number
        self.outputs: Sequence[Completion] = (Completion(),)
        self.arrived: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def abort(self) -> None:
        """Draw no further."""
        with contextlib.suppress(EngineGone):
            self._program.send({"id": self._number, "do": "abort"})

    async def __aiter__(self) -> AsyncIterator["Request"]:
        (completion,) = self.outputs
        while completion.finish_reason is None:
            answer = await self.arrived.get()
            _raise_for(answer, "generate")
            completion.token_ids += answer["tokens"]
            completion.logprobs += answer["logprobs"]
            completion.finish_reason = answer["finish"]
            yield self


class Program:
    """The process in vLLM's environment, seen from the event loop's thread; in a process group of
    its own."""

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        command = [python, str(_PROGRAM / "serve.py"), str(theirs.fileno())]
        try:
            # A session of its own: a terminal's interrupt is for us, and all that it starts can be
            # ended together.
            self.process = subprocess.Popen(
                command,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what it says is for the log, and not among what this process answers
            )
        except OSError as error:
            raise AlignerError(
                f"engine.vllm.python={python}: {error.strerror}; install vLLM with"
                " `aligner install-vllm`"
            ) from error
        finally:
            theirs.close()
        self._socket = ours
        self._requests: dict[int, Request] = {}
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self._why_over: str | None = None
        self.release = ""

    async def begin(self, settings: Mapping[str, Any]) -> None:
        """Start the engine. Raises AlignerError with its reason where it refuses, or ends."""
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
        """Have it go on from tokens."""
        number = self._next()
        self._requests[number] = request = Request(self, number)
        self.send({"id": number, "do": "draw", "tokens": list(tokens), "sampling": dict(sampling)})
        return request

    async def order(self, what: str, **arguments: Any) -> None:
        """Have something done. Raises AlignerError with the reason where it was not, EngineGone
        where nobody will."""
        number = self._next()
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        self.send({"id": number, "do": what, "with": arguments})
        _raise_for(await answer, _ORDERS[what])

    def send(self, order: Mapping[str, Any]) -> None:
        """Send an order. Raises EngineGone where nobody would read it."""
        if self._why_over is not None:
            raise EngineGone(f"{NAME}: {self._why_over}")
        self._orders.write(json.dumps(order).encode() + b"\n")

    def end(self) -> None:
        """End the process and all that it has started. From any thread, at any time."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # it ends by itself at that
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_CLOSE_S)
        kill_processes(list(_group(self.process.pid)))
        self.process.wait()

    def _next(self) -> int:
        self._count += 1
        return self._count

    async def _read(self) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await self._answers.readline():
                self._take(json.loads(line))
        self._why_over = self._ended()
        for number in [*self._requests, *self._waiting]:
            self._take({"id": number, "gone": self._why_over})

    def _take(self, answer: dict[str, Any]) -> None:
        number = answer["id"]
        if (future := self._waiting.pop(number, None)) is not None:
            if not future.done():
                future.set_result(answer)
            return
        if (request := self._requests.get(number)) is not None:
            request.arrived.put_nowait(answer)
            if answer.get("finish", "failed") is not None:
                del self._requests[number]

    def _ended(self) -> str:
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
    """The processes of a group."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == leader:
                yield process


def _raise_for(answer: Mapping[str, Any], what: str) -> None:
    """Raise what an answer tells: AlignerError, or EngineGone where nothing else will come."""
    if "gone" in answer:
        raise EngineGone(f"{NAME}: {answer['gone']}; see {NAME}'s output in this process's log")
    if "error" in answer:
        raise AlignerError(f"{NAME} failed to {what}: {answer['error']}")


class VLLMClient(Client):
    """One vLLM of TP' workers."""

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
        """Start it; it has no weights yet. Raises AlignerError when it does not start in time.

        `gpus` are its workers', in order, as CUDA_VISIBLE_DEVICES names them; none where it runs on
        CPUs.
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
        """Let responses be finished or interrupted, and an update begin."""
        super().hold(interrupts=interrupts)
        self._loop.run(
            "starting the weight update", self._program.order("begin"), self._update_timeout_s
        )

    def update_weights(self, handles: Mapping[str, Any] | None) -> None:
        """Load tensors that are shared; None ends an update and forgets keys and values."""
        work = (
            self._program.order("finish")
            if handles is None
            else self._program.order("load", of_ranks=handles)
        )
        self._loop.run("loading weights", work, self._update_timeout_s)

    def release(self) -> None:
        """Free the memory of the model and of keys and values."""
        self._loop.run("releasing GPU memory", self._program.order("sleep"), self._timeout_s)

    def resume(self, *, cache: bool) -> None:
        """Take back the memory of keys and values, or the model's."""
        tags = ["kv_cache" if cache else "weights"]
        self._loop.run(
            "reallocating GPU memory", self._program.order("wake", tags=tags), self._timeout_s
        )

    def _draw(
        self, tokens: list[int], response: Response, options: SamplingOptions, seed: int, most: int
    ) -> Request:
        left = response.limit - len(response.tokens)
        least = max(0, options.min_new_tokens - len(response.tokens))
        return self._program.draw(
            tokens,
            {
                "max_tokens": left,
                "min_tokens": min(least, left),
                # The likeliest token as the only one of which one is drawn: its log-prob is at the
                # temperature then.
                "temperature": options.temperature,
                "top_k": 1 if options.greedy else options.top_k,
                "top_p": 1.0 if options.greedy else options.top_p,
                "min_p": 0.0 if options.greedy else options.min_p,
                "seed": seed % 2**63,
                "stop_token_ids": list(options.stop_token_ids),
                "ignore_eos": True,  # of the model's own: those that end a response are named
            },
        )


def _environment(
    environ: Mapping[str, str], settings: EngineConfig, gpus: Sequence[str]
) -> dict[str, str]:
    """This process's, without what is its own: its world, its Python, and the GPUs of other
    replicas."""
    ours = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PYTHONHOME",
        "VIRTUAL_ENV",
    )
    kept = {name: value for name, value in environ.items() if name not in ours}
    # it would want a NUMA node for each worker, and take the same ones for every replica
    if settings.parallel.ranks > 1:
        kept.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if gpus:  # its workers take the first ones that they see
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return kept | {
        "PYTHONPATH": str(_PROGRAM),  # where workers find `receive`
        "VLLM_NO_USAGE_STATS": "1",
        # a fork, its way on GPUs, would hold our socket open behind the program
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # whose sampler is another than the one of `receive`
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
    """Keywords of vLLM's AsyncEngineArgs."""
    memory = None if settings.kv_cache_mib is None else settings.kv_cache_mib << 20
    # where vLLM would take most of the machine's memory: room for all that can be asked
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
