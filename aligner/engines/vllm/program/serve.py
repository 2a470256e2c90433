"""Server process that runs vLLM behind a socket.

    python serve.py DESCRIPTOR

The engine's settings contain the index of this process's node in its replica. On the first node the
process executes orders; on other nodes it only runs workers, which vLLM on the first node controls.

vLLM's own Python environment runs this program, and aligner is not installed there. DESCRIPTOR is
the number of an inherited socket. The client sends one JSON object per line: first the engine's
settings, then orders, each with an `id`. Each answer contains the `id` of its order. Prompts and
responses are token ids, never text.

When the client closes the socket, this process exits, and terminates all processes that it has
started.
"""

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import select
import socket
import sys
import threading
import traceback
from typing import Any

from process_group import terminate_group

# Time that the processes that vLLM has started have to exit after SIGTERM, in seconds.
_TERMINATE_TIMEOUT_S = 5.0
# Maximum size of an order, in bytes. A long prompt exceeds asyncio's default of 64 KiB.
_MAX_LINE_BYTES = 1 << 28
# Interval at which a running order checks whether vLLM has failed, in seconds.
_POLL_S = 0.5


class EngineExited(Exception):
    """Error: one of vLLM's processes has exited."""


class Server:
    """Executes orders, each in a task of its own.

    An order `draw` generates tokens until it is aborted or complete, and an order `score` computes
    the log-probs of given tokens.
    """

    def __init__(self, llm: Any, answers: asyncio.StreamWriter) -> None:
        """Create a server.

        Args:
            llm: vLLM's `AsyncLLM`.
            answers: Stream to which the answers are written.
        """
        self._llm = llm
        self._answers = answers
        self._generation_tasks: dict[int, asyncio.Task[None]] = {}
        """Tasks of the `draw` orders in flight, by the order's id."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks of all orders in flight."""
        self._score_numbers = itertools.count()
        """Numbers for the ids of `score` requests."""
        self._is_updating = False
        """Whether a weight update has been started and not finished."""
        self.engine_exited = asyncio.Event()
        """Event that is set when vLLM cannot continue, because one of its processes has exited."""

    def start_order(self, order: dict[str, Any]) -> None:
        """Start the execution of an order.

        An order `abort` takes effect immediately and has no answer of its own; the aborted request
        sends a last answer.
        """
        order_id = order["id"]
        name = order["do"]
        if name == "abort":
            # The request is unknown if it has just completed.
            if (request := self._generation_tasks.get(order_id)) is not None:
                request.cancel()
            return

        is_generation = name == "draw"
        work = self._generate(order) if is_generation else self._execute(order_id, name, order)
        task = asyncio.create_task(work)
        # asyncio holds only weak references to tasks; this set keeps them alive.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if is_generation:
            self._generation_tasks[order_id] = task
            task.add_done_callback(
                lambda task: self._remove_request(order_id, was_aborted=task.cancelled())
            )

    def send_answer(self, **content: Any) -> None:
        """Send an answer, whose fields are the keyword arguments."""
        self._answers.write(json.dumps(content).encode() + b"\n")

    async def _generate(self, order: dict[str, Any]) -> None:
        """Generate tokens for a request, and send them as they arrive."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        order_id = order["id"]
        options = SamplingParams(
            output_kind=RequestOutputKind.DELTA, logprobs=0, detokenize=False, **order["sampling"]
        )
        try:
            prompt = {"prompt_token_ids": order["tokens"]}
            async for output in self._llm.generate(prompt, options, str(order_id)):
                (completion,) = output.outputs
                # With `RequestOutputKind.DELTA`, only the tokens since the last output.
                tokens = list(completion.token_ids)
                logprobs = [
                    entry[token].logprob
                    for token, entry in zip(tokens, completion.logprobs or (), strict=True)
                ]
                finish_reason = None
                if completion.finish_reason is not None:
                    finish_reason = str(completion.finish_reason)
                if finish_reason == "abort":
                    finish_reason = "cancelled"
                self.send_answer(
                    id=order_id,
                    tokens=tokens,
                    logprobs=logprobs,
                    finish=finish_reason,
                    cached=output.num_cached_tokens or 0,
                )
        except Exception as error:
            self._fail(order_id, error)

    def _remove_request(self, order_id: int, *, was_aborted: bool) -> None:
        """Remove a request that has ended.

        A request whose task was cancelled has sent no last answer, and possibly had not even
        started, so this method sends the answer.
        """
        del self._generation_tasks[order_id]
        if was_aborted:
            self.send_answer(id=order_id, tokens=[], logprobs=[], finish="cancelled")

    async def _execute(self, order_id: int, name: str, order: dict[str, Any]) -> None:
        """Execute an order other than `draw`, and send its answer.

        Args:
            order_id: Id of the order.
            name: Name of the order: the name of a method of this class, without the underscore.
            order: The order; its field `with` contains the method's keyword arguments.
        """
        try:
            method = getattr(self, f"_{name}")
            task = asyncio.create_task(method(**order.get("with", {})))
            while not (await asyncio.wait([task], timeout=_POLL_S))[0]:
                # After a failure of vLLM's engine, calls that wait for it never return.
                if self._llm.errored:
                    task.cancel()
                    raise EngineExited("one of its processes exited")
            self.send_answer(id=order_id, result=task.result())
        except Exception as error:
            self._fail(order_id, error)

    def _fail(self, order_id: int, error: Exception) -> None:
        """Answer an order with an error.

        If vLLM cannot continue, the field is `gone` instead of `error`, and `engine_exited` is set.
        """
        traceback.print_exception(error)
        has_exited = isinstance(error, EngineExited)
        message = str(error) if has_exited else f"{type(error).__name__}: {error}"
        if has_exited or self._llm.errored:
            self.send_answer(id=order_id, gone=message)
            # Ends `serve`, after it has sent the answer.
            self.engine_exited.set()
        else:
            self.send_answer(id=order_id, error=message)

    async def _score(
        self, tokens: list[int], start: int, top_logprobs: int, temperature: float
    ) -> dict[str, list[Any]]:
        """Return the log-probs of the tokens from index `start` on, and the most probable tokens at
        each of these positions with their log-probs."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = SamplingParams(
            prompt_logprobs=top_logprobs,
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
            # vLLM generates at least one token. It is ignored.
            max_tokens=1,
            temperature=0.0,
            # Read by `receive._get_prompt_logprobs`.
            extra_args={"score_temperature": temperature},
        )
        prompt = {"prompt_token_ids": tokens}
        request_id = f"score-{next(self._score_numbers)}"
        async for output in self._llm.generate(prompt, options, request_id):
            prompt_logprobs = output.prompt_logprobs

        scores: dict[str, list[Any]] = {"logprobs": [], "top_ids": [], "top_logprobs": []}
        for token, entry in zip(tokens[start:], prompt_logprobs[start:], strict=True):
            scores["logprobs"].append(entry[token].logprob)
            # Besides the most probable tokens, the entry contains the token itself.
            ranked = sorted(entry.items(), key=lambda item: item[1].rank)[:top_logprobs]
            scores["top_ids"].append([top_token for top_token, _ in ranked])
            scores["top_logprobs"].append([top_entry.logprob for _, top_entry in ranked])
        return scores

    async def _begin(self, verify: bool) -> None:
        """Start a weight update on all workers.

        If the previous update was not finished, it is ended first.

        Args:
            verify: Whether the order `find_wrong_weights` follows the update.
        """
        if self._is_updating:
            await self._call_workers("abandon_update")
        self._is_updating = True
        await self._call_workers("begin_update", verify=verify)

    async def _load(self, **group: Any) -> None:
        """Load tensors on all workers. The arguments are the fields of `receive.SharedTensors`."""
        await self._call_workers("update_weights", update_info=group)

    async def _finish(self) -> None:
        """Finish the weight update on all workers, and reset the prefix cache."""
        await self._call_workers("end_update")
        self._is_updating = False
        # The cached keys and values were computed with the previous weights.
        await self._reset_prefix_cache()

    async def _find_wrong_weights(self) -> list[str]:
        """Return a description of each tensor of the last update that a worker's model does not
        contain."""
        return _name_workers(await self._call_workers("find_wrong_weights"))

    async def _find_changed_weights(self) -> list[str]:
        """Return the names of the workers' parameters that have changed since the last order
        `find_wrong_weights`."""
        return _name_workers(await self._call_workers("find_changed_weights"))

    async def _call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of every worker, and return the results in the order of the workers.

        Raises:
            RuntimeError: The method failed on some workers; the message contains their errors.
            EngineExited: A worker cannot answer.
        """
        try:
            # The workers call `receive.AlignerWorker.call_method`.
            answers = await self._llm.collective_rpc(
                "call_method", args=(method,), kwargs=arguments
            )
        # `call_method` itself does not raise, so a worker has exited. vLLM may notice this later.
        except Exception as error:
            raise EngineExited(f"{type(error).__name__}: {error}") from error

        # An error such as a missing tensor is often the same on all workers.
        workers_by_error: dict[str, list[int]] = {}
        for worker, (message, _) in enumerate(answers):
            if message is not None:
                workers_by_error.setdefault(message, []).append(worker)
        if workers_by_error:
            raise RuntimeError(
                "; ".join(
                    message if len(workers) == len(answers) else f"{message} ({_list(workers)})"
                    for message, workers in sorted(workers_by_error.items())
                )
            )
        return [result for _, result in answers]

    async def _reset_prefix_cache(self) -> None:
        """Reset the prefix cache; raise RuntimeError if vLLM refuses."""
        if not await self._llm.reset_prefix_cache():
            raise RuntimeError("the KV cache of the previous weights could not be reset")

    async def _sleep(self) -> None:
        """Free the memory of the model and of the KV cache."""
        # Level 2 discards the weights; level 1 would copy them to host memory.
        await self._llm.sleep(level=2)

    async def _wake(self, tags: list[str]) -> None:
        """Allocate the memory with these tags again."""
        await self._llm.wake_up(tags)


def _list(workers: list[int]) -> str:
    """Return the indices of workers as text."""
    return f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"


def _name_workers(names_by_worker: list[list[str]]) -> list[str]:
    """Return the names of all workers, each with the index of its worker if there are several."""
    if len(names_by_worker) == 1:
        return names_by_worker[0]
    return [
        f"{name} on worker {worker}"
        for worker, names in enumerate(names_by_worker)
        for name in names
    ]


def _watch_connection(connection: socket.socket, vllm_started: threading.Event) -> None:
    """Terminate all processes if the client disconnects while vLLM starts.

    The event loop is blocked during the start and cannot notice a closed connection. This function
    therefore runs in a thread.

    Args:
        connection: Socket to the client.
        vllm_started: Event that is set when vLLM has started.
    """
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    while not vllm_started.wait(0.5):
        if poll.poll(0):
            terminate_group(1.0)
            # The main thread is blocked in vLLM's start, so only `os._exit` ends the process.
            os._exit(1)


async def serve(connection: socket.socket) -> None:
    """Start vLLM, and execute orders until the client disconnects or vLLM fails."""
    vllm_started = threading.Event()
    threading.Thread(target=_watch_connection, args=(connection, vllm_started), daemon=True).start()
    orders, answers = await asyncio.open_connection(sock=connection, limit=_MAX_LINE_BYTES)
    settings = json.loads(await orders.readline())

    # The import takes seconds, during which `_watch_connection` already observes the connection.
    from vllm import AsyncEngineArgs
    from vllm import __version__ as release
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        arguments = AsyncEngineArgs(
            **_convert_settings(settings, AsyncEngineArgs),
            skip_tokenizer_init=True,
            load_format="dummy",  # the weights arrive by weight sync
            logprobs_mode="raw_logprobs",  # receive.py computes these at the temperature
            weight_transfer_config=WeightTransferConfig(backend="aligner"),
            worker_extension_cls="receive.AlignerWorker",
        )
        is_headless = arguments.node_rank > 0
        if is_headless:
            workers = _start_workers(arguments)
        else:
            llm = AsyncLLM.from_engine_args(arguments)
    except Exception as error:
        traceback.print_exc()
        answers.write(json.dumps({"refused": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        await answers.drain()
        return

    started = {"release": release, "llguidance": _get_llguidance_version()}
    if is_headless:
        answers.write(json.dumps(started).encode() + b"\n")
        await answers.drain()
        # Returns when a worker exits. When the client disconnects, `_watch_connection` ends this
        # process.
        workers.start_worker_monitor(inline=True)
        return

    vllm_started.set()
    server = Server(llm, answers)
    server.send_answer(**started)

    reading = asyncio.create_task(_read_orders(orders, server))
    waiting_for_exit = asyncio.create_task(server.engine_exited.wait())
    await asyncio.wait([reading, waiting_for_exit], return_when=asyncio.FIRST_COMPLETED)
    with contextlib.suppress(ConnectionError):
        await answers.drain()
    llm.shutdown()


def _start_workers(arguments: Any) -> Any:
    """Start the workers of a node other than the first one of their replica.

    vLLM on the first node controls them.

    Args:
        arguments: vLLM's `AsyncEngineArgs`.

    Returns:
        vLLM's `MultiprocExecutor`, when the workers of all nodes are connected.
    """
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT, headless=True)
    return MultiprocExecutor(config, monitor_workers=False)


def _convert_settings(settings: dict[str, Any], arguments_class: Any) -> dict[str, Any]:
    """Return the settings with mappings and lists converted to the types of their arguments.

    vLLM's `AsyncEngineArgs` converts only some of the mappings to its configuration classes.

    Args:
        settings: Keyword arguments from JSON.
        arguments_class: `AsyncEngineArgs`.

    Raises:
        ValueError: A value does not have the type of its argument; the message names the argument.
    """
    from pydantic import TypeAdapter, ValidationError

    types: dict[str, Any] = {
        field.name: field.type for field in dataclasses.fields(arguments_class)
    }
    converted = dict(settings)
    for name, value in settings.items():
        if isinstance(value, (dict, list)):
            try:
                converted[name] = TypeAdapter(types[name]).validate_python(value)
            except ValidationError as error:
                raise ValueError(f"{name}: {error}") from error
    return converted


def _get_llguidance_version() -> str | None:
    """Return the version of llguidance; None if it is not installed."""
    try:
        return importlib.metadata.version("llguidance")
    except importlib.metadata.PackageNotFoundError:
        return None


async def _read_orders(orders: asyncio.StreamReader, server: Server) -> None:
    """Read orders and start them until the client disconnects."""
    with contextlib.suppress(ConnectionError):
        while line := await orders.readline():
            server.start_order(json.loads(line))


def main() -> None:
    """Run the server; when it ends for any reason, terminate all processes of the group."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        asyncio.run(serve(connection))
    finally:
        terminate_group(_TERMINATE_TIMEOUT_S)


if __name__ == "__main__":
    main()
