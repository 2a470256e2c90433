"""Client of vLLM, which runs as a process in its own Python environment.

The client starts the program in the folder `program/`, and exchanges JSON messages with it over a
socket (see `program/serve.py`).
"""

import asyncio
import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from aligner.checks.vllm_arguments import format_environment
from aligner.data import grammar_matcher
from aligner.data.grammar_matcher import GrammarVocabulary
from aligner.engines.engine_protocol import (
    EngineRequest,
    SamplingOptions,
    ScoringRequest,
    TokenScores,
)
from aligner.engines.external.client import Client, EventLoop, shut_down_on_failure
from aligner.engines.external.responses import Response, ResponseGenerator
from aligner.engines.vllm.replica_nodes import ReplicaNode
from aligner.errors import FAILED, AlignerError, EngineExited
from aligner.models.layouts import cache_bytes_per_token, iterate_engine_stages
from aligner.models.pipeline_stages import count_engine_stage_layers
from aligner.models.shape import Experts, ModelShape
from aligner.schema import EngineConfig
from aligner.triton_cleanup import kill_processes

NAME = "vLLM"
_PROGRAM = Path(__file__).parent / "program"
# Maximum size of an answer, in bytes. An answer with many tokens and their log-probs can exceed
# asyncio's default of 64 KiB.
_MAX_LINE_BYTES = 1 << 28
# Number of tokens per block of the KV cache on CPUs.
_CPU_BLOCK_TOKENS = 128
# Maximum number of tokens that one step prefills on CPUs, vLLM's default; at least one sequence.
_CPU_PREFILL_TOKENS = 2048
# Timeout for the exit of the program and its processes, in seconds.
_EXIT_TIMEOUT_S = 20.0
# Descriptions of the orders for error messages.
_ORDER_DESCRIPTIONS = {
    "begin": "start the weight update",
    "load": "load weights",
    "finish": "finish the weight update",
    "find_wrong_weights": "compare its weights with the received ones",
    "find_changed_weights": "compare its weights with those of the last weight update",
    "sleep": "release GPU memory",
    "wake": "reallocate GPU memory",
    "score": "score tokens",
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
    cached_tokens: int = 0
    """Number of input tokens whose KV cache was resident and was not computed again."""


class Request:
    """Generation request in flight; used only on the event loop's thread.

    Iterating over the request yields the request itself whenever it has new tokens.

    Attributes:
        outputs: One completion, which grows.
        answers: Queue of the program's answers to this request.
    """

    def __init__(self, program: "Program", order_id: int) -> None:
        """Create a request.

        Args:
            program: Program that executes the request.
            order_id: Id of the request's order.
        """
        self._program = program
        self._order_id = order_id
        self.outputs: Sequence[Completion] = (Completion(),)
        self.answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def abort(self) -> None:
        """Abort the request; its finish reason becomes `cancelled`."""
        with contextlib.suppress(EngineExited):
            self._program.send({"id": self._order_id, "do": "abort"})

    async def __aiter__(self) -> AsyncIterator["Request"]:
        """Yield this request after each answer, until the generation ends.

        Raises:
            AlignerError: The generation failed.
            EngineExited: The program or one of its processes has exited.
        """
        (completion,) = self.outputs
        while completion.finish_reason is None:
            answer = await self.answers.get()
            _raise_on_error(answer, "generate")
            completion.token_ids += answer["tokens"]
            completion.logprobs += answer["logprobs"]
            completion.finish_reason = answer["finish"]
            # The last answer of an aborted request has no count.
            completion.cached_tokens = answer.get("cached", completion.cached_tokens)
            yield self


class Program:
    """Process in vLLM's Python environment, as the leader of its own process group.

    Except for `terminate`, all methods must be called on the event loop's thread.

    Attributes:
        process: The process.
        vllm_version: Version of vLLM; empty before `start`.
        llguidance_version: Version of llguidance in vLLM's environment; None without it.
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
            # The process has inherited this end. If it stayed open here too, the end of the process
            # would not close the connection.
            program_socket.close()

        self._socket = client_socket
        self._requests: dict[int, Request] = {}
        """Requests in flight, by the id of their order."""
        self._pending_answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        """Futures of the answers to other orders, by the id of the order."""
        self._last_order_id = 0
        self._exit_reason: str | None = None
        """Reason why the program no longer executes orders; None while it does."""
        self.vllm_version = ""
        self.llguidance_version: str | None = None

    async def start(self, settings: Mapping[str, Any], hint: str = "") -> None:
        """Start the engine in the process.

        Args:
            settings: Keyword arguments of vLLM's `AsyncEngineArgs`.
            hint: End of the error message if vLLM does not start.

        Raises:
            AlignerError: vLLM did not start; the message contains its error.
        """
        self._answer_reader, self._order_writer = await asyncio.open_connection(
            sock=self._socket, limit=_MAX_LINE_BYTES
        )
        self._order_writer.write(json.dumps(settings).encode() + b"\n")

        line = await self._answer_reader.readline()
        # An empty line means that the process has exited without an answer.
        answer = json.loads(line) if line else {"refused": self._describe_exit()}
        if "refused" in answer:
            raise AlignerError(
                f"{NAME} did not start: {answer['refused']}; see {NAME}'s output in this process's"
                f" log{hint}"
            )

        self.vllm_version = answer["release"]
        self.llguidance_version = answer["llguidance"]
        self._read_task = asyncio.create_task(self._read_answers())

    def generate(self, tokens: Sequence[int], sampling: Mapping[str, Any]) -> Request:
        """Start a request that continues a sequence of tokens.

        Args:
            tokens: Prompt and the tokens generated so far.
            sampling: Keyword arguments of vLLM's `SamplingParams`.
        """
        order_id = self._create_order_id()
        request = Request(self, order_id)
        self._requests[order_id] = request
        self.send(
            {"id": order_id, "do": "draw", "tokens": list(tokens), "sampling": dict(sampling)}
        )
        return request

    async def execute(self, name: str, **arguments: Any) -> Any:
        """Send an order, wait until it is done, and return its result, a JSON value.

        Args:
            name: Name of the order, a key of `_ORDER_DESCRIPTIONS`.
            arguments: Arguments of the order.

        Raises:
            AlignerError: The order failed; the message contains the reason.
            EngineExited: The program or one of its processes has exited.
        """
        order_id = self._create_order_id()
        answer = asyncio.get_running_loop().create_future()
        self._pending_answers[order_id] = answer
        self.send({"id": order_id, "do": name, "with": arguments})
        received = await answer
        _raise_on_error(received, _ORDER_DESCRIPTIONS[name])
        return received["result"]

    def send(self, order: Mapping[str, Any]) -> None:
        """Send an order without waiting for its answer.

        Raises:
            EngineExited: The program has exited.
        """
        if self._exit_reason is not None:
            raise EngineExited(f"{NAME}: {self._exit_reason}")
        self._order_writer.write(json.dumps(order).encode() + b"\n")

    async def wait_for_exit(self) -> str:
        """Wait until the process has closed the connection, and return the reason."""
        await self._read_task
        assert self._exit_reason is not None
        return self._exit_reason

    def terminate(self) -> None:
        """Terminate the process and all processes that it has started.

        The method may be called on any thread and at any time.
        """
        with contextlib.suppress(OSError):
            # The program exits by itself when the connection is closed.
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_TIMEOUT_S)
        # Kill the processes that have not exited in time.
        kill_processes(list(_find_group_processes(self.process.pid)))
        self.process.wait()

    def _create_order_id(self) -> int:
        """Return a new id for an order."""
        self._last_order_id += 1
        return self._last_order_id

    async def _read_answers(self) -> None:
        """Distribute the program's answers until it closes the connection.

        Afterwards, all requests and orders in flight get an answer `gone`.
        """
        with contextlib.suppress(ConnectionError):
            while line := await self._answer_reader.readline():
                self._dispatch(json.loads(line))

        # From here on, `send` raises, so that no order waits for an answer that cannot arrive.
        self._exit_reason = self._describe_exit()
        # A copy of the ids, since `_dispatch` removes them.
        for order_id in [*self._requests, *self._pending_answers]:
            self._dispatch({"id": order_id, "gone": self._exit_reason})

    def _dispatch(self, answer: dict[str, Any]) -> None:
        """Pass an answer to the request or the future that waits for it."""
        order_id = answer["id"]
        if (future := self._pending_answers.pop(order_id, None)) is not None:
            # The future is done already if its caller has cancelled it.
            if not future.done():
                future.set_result(answer)
            return

        # The request may be unknown: if it is aborted just when it completes, it gets two last
        # answers.
        if (request := self._requests.get(order_id)) is not None:
            request.answers.put_nowait(answer)
            # An answer without `finish` contains an error, so it is the last one.
            if answer.get("finish", "failed") is not None:
                del self._requests[order_id]

    def _describe_exit(self) -> str:
        """Return a description of the way in which the process has ended."""
        try:
            code = self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "its process closed the connection"
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process exited with code {code}"


def _find_group_processes(group_id: int) -> Iterator[psutil.Process]:
    """Yield the processes of a process group."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group_id:
                yield process


def _raise_on_error(answer: Mapping[str, Any], description: str) -> None:
    """Raise an exception if an answer contains an error.

    Args:
        answer: The program's answer.
        description: Description of the order, for the error message.

    Raises:
        AlignerError: The order failed.
        EngineExited: The program or one of its processes has exited.
    """
    if "gone" in answer:
        raise EngineExited(f"{NAME}: {answer['gone']}; see {NAME}'s output in this process's log")
    if "error" in answer:
        raise AlignerError(f"{NAME} failed to {description}: {answer['error']}")


class VLLMClient(Client):
    """Client of one vLLM instance with one worker per rank of the replica."""

    def __init__(
        self,
        python: str,
        directory: Path,
        shape: ModelShape,
        settings: EngineConfig,
        seed: int,
        dtype: torch.dtype,
        gpus: Sequence[str] = (),
        node: ReplicaNode | None = None,
    ) -> None:
        """Start vLLM. The model has no weights yet.

        Args:
            python: Path of the Python interpreter of vLLM's environment (`engine.vllm.python`).
            directory: Model directory, from which only the configuration is read.
            shape: Dimensions of the model.
            settings: Section `engine` of the configuration.
            seed: Seed of the random streams of the samples.
            dtype: Data type of the model.
            gpus: Names of the GPUs of this node's workers in CUDA_VISIBLE_DEVICES, in rank order;
                empty if vLLM runs on CPUs.
            node: First node of the replica; None if the replica has only this node.

        Raises:
            AlignerError: vLLM failed to start, or did not start within `engine.vllm.timeout_s`.
        """
        super().__init__(NAME, settings.vllm.timeout_s)
        self._update_timeout_s = settings.update_timeout_s
        self._verify = settings.verify
        self._update_count = 0
        """Number of weight updates that were started."""
        self._vocabulary_files: dict[GrammarVocabulary, Path] = {}
        """Files that the workers read the tokens' bytes from, for guided decoding."""
        with shut_down_on_failure(NAME, self.shutdown):
            self._program = _start_program(
                self._exit_stack,
                self._loop,
                settings,
                python,
                _build_environment(os.environ, settings, shape.num_layers, gpus, node),
                _build_engine_arguments(
                    directory, shape, settings, seed, dtype, node, on_gpus=bool(gpus)
                ),
            )

            self._vocab_size = shape.vocab_size
            self._response_generator = self._create_response_generator(seed)

    def _create_response_generator(self, seed: int) -> ResponseGenerator:
        """Return a generator of responses with random streams of this seed."""
        return ResponseGenerator(
            NAME,
            self._start_request,
            seed,
            self._timeout_s,
            "engine.vllm.timeout_s",
            supports_min_tokens=True,
            compute_scores=self._compute_scores,
        )

    def pause_generation(self, *, interrupt_responses: bool) -> None:
        """Pause generation (see `Client.pause_generation`), and start a weight update."""
        super().pause_generation(interrupt_responses=interrupt_responses)
        # The engine is idle now, so vLLM can prepare its layers for new weights.
        verify = self._verify == "sync" or (self._verify == "first" and self._update_count == 0)
        self._update_count += 1
        order = self._program.execute("begin", verify=verify)
        self._loop.run("starting the weight update", order, self._update_timeout_s)

    def find_wrong_weights(self) -> list[str]:
        """Return the tensors of the last update that the workers' parameters do not contain."""
        order = self._program.execute("find_wrong_weights")
        return list(self._loop.run("comparing weights", order, self._update_timeout_s))

    def find_changed_weights(self) -> list[str]:
        """Return the workers' parameters that have changed since `find_wrong_weights`."""
        order = self._program.execute("find_changed_weights")
        return list(self._loop.run("comparing weights", order, self._update_timeout_s))

    def update_weights(self, handles: Mapping[str, Any] | None) -> None:
        """Load tensors, or finish the weight update.

        Args:
            handles: Handles of the shared memory by rank of the replica; None finishes the update
                and clears the KV cache.
        """
        if handles is None:
            order = self._program.execute("finish")
        else:
            order = self._program.execute("load", of_ranks=handles)
        self._loop.run("loading weights", order, self._update_timeout_s)

    def release_memory(self) -> None:
        """Free the memory of the model and of the KV cache, whose contents are lost."""
        self._loop.run("releasing GPU memory", self._program.execute("sleep"), self._timeout_s)

    def resume_memory(self, *, cache: bool) -> None:
        """Allocate memory again after `release_memory`.

        Args:
            cache: Whether to allocate the memory of the KV cache; otherwise that of the model.
        """
        tags = ["kv_cache" if cache else "weights"]
        self._loop.run(
            "reallocating GPU memory", self._program.execute("wake", tags=tags), self._timeout_s
        )

    def _start_request(
        self,
        tokens: list[int],
        response: Response,
        options: SamplingOptions,
        seed: int,
        tokens_to_minimum: int,
    ) -> Request:
        """Start the generation of a response, up to its maximum number of tokens.

        Args:
            tokens: Prompt and the tokens generated so far.
            response: The response.
            options: Sampling parameters.
            seed: Seed of this request.
            tokens_to_minimum: Unused; vLLM supports a minimum number of tokens itself.
        """
        max_tokens = response.max_tokens - len(response.tokens)
        min_tokens = max(0, options.min_new_tokens - len(response.tokens))
        extra_arguments: dict[str, Any] = {}
        if (grammar := response.request.grammar) is not None:
            # The grammar decides when a stop token is allowed.
            min_tokens = 0
            extra_arguments = {
                "grammar": grammar.text,
                "stop_token_ids": list(grammar.stop_token_ids),
                "grammar_tokens": len(tokens) - response.request.first_grammar_token,
                "matcher_file": grammar_matcher.__file__,
                "vocabulary_file": self._write_vocabulary(response.request),
            }
        return self._program.generate(
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
                "extra_args": extra_arguments,
            },
        )

    async def _compute_scores(self, request: ScoringRequest) -> TokenScores:
        """Return the scores of a sequence, from vLLM's log-probs of prompt tokens."""
        top_count = min(request.top_logprobs, self._vocab_size)
        scores: dict[str, list[Any]] = {"logprobs": [], "top_ids": [], "top_logprobs": []}
        if request.start < len(request.tokens):
            scores = await self._program.execute(
                "score",
                tokens=request.tokens.tolist(),
                start=request.start,
                top_logprobs=top_count,
                temperature=request.temperature,
            )
        # An empty list has no second dimension.
        shape = (-1 if top_count else len(scores["logprobs"]), top_count)
        return TokenScores(
            torch.tensor(scores["logprobs"], dtype=torch.float32),
            torch.tensor(scores["top_ids"], dtype=torch.int64).reshape(shape),
            torch.tensor(scores["top_logprobs"], dtype=torch.float32).reshape(shape),
        )

    def find_grammar_problem(self) -> str | None:
        """Return why vLLM cannot follow a grammar; None if it can."""
        version = self._program.llguidance_version
        if version == grammar_matcher.VERSION:
            return None
        return (
            f"guided decoding requires the same version of llguidance in {NAME}'s environment and"
            f" in aligner's: got {version} and {grammar_matcher.VERSION}; install the version of"
            f" {NAME}'s environment with pip install llguidance==VERSION"
        )

    def _write_vocabulary(self, request: EngineRequest) -> str:
        """Return the path of the file with the request's vocabulary, written at the first use."""
        assert request.grammar_matcher is not None
        vocabulary = request.grammar_matcher.vocabulary
        if vocabulary not in self._vocabulary_files:
            if not self._vocabulary_files:
                directory = tempfile.TemporaryDirectory(prefix="aligner-grammars-")
                self._exit_stack.callback(directory.cleanup)
                self._vocabulary_directory = Path(directory.name)
            file = self._vocabulary_directory / f"{len(self._vocabulary_files)}.json"
            vocabulary.save(file)
            self._vocabulary_files[vocabulary] = file
        return str(self._vocabulary_files[vocabulary])


class HeadlessWorkers:
    """vLLM's workers on a node other than the first one of their replica.

    vLLM on the first node controls them. If they exit unexpectedly, this process exits too, because
    its replica is then incomplete, and its main thread may wait for other ranks.
    """

    def __init__(
        self,
        python: str,
        directory: Path,
        shape: ModelShape,
        settings: EngineConfig,
        seed: int,
        dtype: torch.dtype,
        gpus: Sequence[str],
        node: ReplicaNode,
    ) -> None:
        """Start the workers, and wait until those of all nodes are connected.

        Args:
            python: Path of the Python interpreter of vLLM's environment (`engine.vllm.python`).
            directory: Model directory, from which only the configuration is read.
            shape: Dimensions of the model.
            settings: Section `engine` of the configuration.
            seed: Seed of the run.
            dtype: Data type of the model.
            gpus: Names of the GPUs of this node's workers in CUDA_VISIBLE_DEVICES, in rank order;
                empty if vLLM runs on CPUs.
            node: This node.

        Raises:
            AlignerError: The workers failed to start, or did not start within
                `engine.vllm.timeout_s`.
        """
        self._is_exit_expected = False
        self._exit_stack = contextlib.ExitStack()
        self._loop = EventLoop(NAME)
        self._exit_stack.callback(self._loop.close)
        atexit.register(self.shutdown)
        with shut_down_on_failure(NAME, self.shutdown):
            self._program = _start_program(
                self._exit_stack,
                self._loop,
                settings,
                python,
                _build_environment(os.environ, settings, shape.num_layers, gpus, node),
                _build_engine_arguments(
                    directory, shape, settings, seed, dtype, node, on_gpus=bool(gpus)
                ),
            )
            self._loop.submit(self._watch())

    def expect_exit(self) -> None:
        """Let this process continue when the workers exit."""
        self._is_exit_expected = True

    def shutdown(self) -> None:
        """End the workers and the event loop; further calls have no effect."""
        self.expect_exit()
        atexit.unregister(self.shutdown)
        self._exit_stack.close()

    async def _watch(self) -> None:
        """End this process if the workers exit unexpectedly."""
        reason = await self._program.wait_for_exit()
        if not self._is_exit_expected:
            print(
                f"{NAME}'s workers on this node exited: {reason}; see {NAME}'s output above",
                file=sys.stderr,
                flush=True,
            )
            os._exit(FAILED)


def _start_program(
    exit_stack: contextlib.ExitStack,
    loop: EventLoop,
    settings: EngineConfig,
    python: str,
    environment: Mapping[str, str],
    arguments: Mapping[str, Any],
) -> Program:
    """Start vLLM in a process that `exit_stack` terminates, and wait until it has started.

    Args:
        exit_stack: Gets the termination of the process, also if vLLM does not start.
        loop: Event loop of the process's connection.
        settings: Section `engine` of the configuration.
        python: Path of the Python interpreter of vLLM's environment.
        environment: Environment variables of the process.
        arguments: Keyword arguments of vLLM's `AsyncEngineArgs`.

    Raises:
        AlignerError: vLLM failed to start, or did not start within `engine.vllm.timeout_s`.
    """
    program = Program(python, environment)
    exit_stack.callback(program.terminate)
    start_coroutine = program.start(arguments, _describe_pass_through(settings))
    loop.run("starting (engine.vllm.timeout_s)", start_coroutine, settings.vllm.timeout_s)
    return program


def _describe_pass_through(settings: EngineConfig) -> str:
    """Return the end of an error message that names the settings which vLLM got unchanged; empty
    if there are none."""
    keys = [f"engine.vllm.args.{name}" for name in settings.vllm.args]
    keys += [f"engine.vllm.env.{name}" for name in settings.vllm.env]
    return f"; check {', '.join(keys)}" if keys else ""


def _build_environment(
    environ: Mapping[str, str],
    settings: EngineConfig,
    num_layers: int,
    gpus: Sequence[str],
    node: ReplicaNode | None = None,
) -> dict[str, str]:
    """Return the environment in which vLLM starts.

    It is the environment of this process without the variables of its process group and its Python
    environment, and with only the GPUs of this replica.

    Args:
        environ: Environment variables of this process.
        settings: Section `engine` of the configuration.
        num_layers: Number of layers of the model.
        gpus: Names of the workers' GPUs in CUDA_VISIBLE_DEVICES; empty if vLLM runs on CPUs.
        node: This node of the replica; None if the replica has only one.
    """
    excluded_variables = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PYTHONHOME",
        "VIRTUAL_ENV",
    )
    environment = {name: value for name, value in environ.items() if name not in excluded_variables}
    # By default, vLLM binds each worker to a NUMA node of its own, and would bind the workers of
    # all replicas to the same nodes.
    if settings.parallel.ranks > 1:
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # vLLM's workers use the first GPUs that are visible.
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    environment |= {
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
    if settings.parallel.pipeline > 1:
        # The stages must have the layers whose weights the transfer plan sends to them.
        stage_layers = count_engine_stage_layers(num_layers, settings.parallel.pipeline)
        environment["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, stage_layers))
    if node is not None and node.count > 1:
        # The workers of the other nodes connect to this address.
        environment["VLLM_HOST_IP"] = node.address
    return environment | format_environment(settings.vllm)


def _build_engine_arguments(
    directory: Path,
    shape: ModelShape,
    settings: EngineConfig,
    seed: int,
    dtype: torch.dtype,
    node: ReplicaNode | None = None,
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
        node: This node of the replica; None if the replica has only one.
        on_gpus: Whether vLLM runs on GPUs; otherwise on CPUs.
    """
    user_arguments = settings.vllm.args
    # Bytes of the KV cache per worker; None means vLLM's default.
    cache_bytes = None if settings.kv_cache_mib is None else settings.kv_cache_mib << 20
    # On CPUs, vLLM would allocate most of the machine's memory. Instead, allocate enough blocks for
    # the maximum number of sequences of maximum length, and one more.
    if cache_bytes is None and not on_gpus:
        block_tokens = user_arguments.get("block_size") or _CPU_BLOCK_TOKENS
        sequence_blocks = -(-shape.max_positions // block_tokens)
        tokens = block_tokens * (sequence_blocks * settings.batch_size + 1)
        # Each worker gets the same number of bytes, which must suffice for the largest stage.
        token_bytes = max(
            cache_bytes_per_token(stage, settings.parallel.tensor, dtype.itemsize)
            for stage in iterate_engine_stages(shape, settings.parallel.pipeline)
        )
        cache_bytes = tokens * token_bytes

    arguments = {
        "model": str(directory),
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": settings.parallel.tensor,
        "pipeline_parallel_size": settings.parallel.pipeline,
        # vLLM then distributes the experts over all ranks of a pipeline stage.
        "enable_expert_parallel": settings.parallel.expert > 1,
        "max_model_len": shape.max_positions,
        "max_num_seqs": settings.batch_size,
        "seed": seed % 2**32,
        "enforce_eager": not (settings.cuda_graphs and on_gpus),
        "enable_sleep_mode": settings.sleep and on_gpus,
        "stream_interval": settings.vllm.stream_interval,
        # `score` may request the log-probs of any number of tokens; vLLM's default limit is 20.
        "max_logprobs": shape.vocab_size,
        # A turn of an episode prefills only the tokens after the last full block of the turns
        # before it. The cache is reset at each weight update.
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    if node is not None and node.count > 1:
        arguments |= {
            "distributed_executor_backend": "mp",
            "nnodes": node.count,
            "node_rank": node.index,
            "master_addr": node.master_address,
            "master_port": node.master_port,
        }
    if shape.experts is not None:
        arguments["hf_overrides"] = _build_router_entries(shape.experts)
    if cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = cache_bytes
    if on_gpus:
        arguments["gpu_memory_utilization"] = settings.vllm.memory_fraction
    else:
        # vLLM 0.32 on CPUs fails if it divides the prefill of a request with a seed: it then calls
        # a method that CPU random number generators do not have.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(_CPU_PREFILL_TOKENS, shape.max_positions)
        if shape.latent_attention is not None and dtype == torch.float32:
            # vLLM's default on CPUs with AMX computes in bf16 only.
            arguments["attention_backend"] = "CPU_MLA"
    return arguments | user_arguments


def _build_router_entries(experts: Experts) -> dict[str, Any]:
    """Return the entries of config.json from which vLLM's models read how a router works.

    Some of these entries are ignored by transformers, so a file may lack them, or contain values
    that the trainer ignores too.
    """
    return {
        "scoring_func": experts.score_function,
        "topk_method": "noaux_tc" if experts.has_correction_bias else "group_limited_greedy",
        "use_routing_bias": experts.has_correction_bias,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
        "norm_topk_prob": experts.normalizes_weights,
    }
