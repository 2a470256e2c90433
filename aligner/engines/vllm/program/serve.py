"""Server process that runs vLLM behind a socket.

    python serve.py DESCRIPTOR

vLLM's own Python environment runs this program, and aligner is not installed there. DESCRIPTOR is
the number of an inherited socket. The client sends one JSON object per line: first the engine's
settings, then orders, each with an `id`. Each answer contains the `id` of its order. Prompts and
responses are token ids, never text.

When the client closes the socket, this process exits, and terminates all processes that it has
started.
"""

import asyncio
import contextlib
import json
import os
import select
import socket
import sys
import threading
import traceback
from typing import Any

from ending import end_group

# Time that the processes that vLLM has started have to exit after SIGTERM, in seconds.
_END_S = 5.0
# Maximum size of an order, in bytes.
_LINE = 1 << 28
# Interval at which a running order checks whether vLLM has failed, in seconds.
_LOOK_S = 0.5


class Gone(Exception):
    """Error: one of vLLM's processes has exited."""


class Server:
    """Executes orders, each in a task of its own.

    An order `draw` generates tokens until it is aborted or complete.
    """

    def __init__(self, llm: Any, answers: asyncio.StreamWriter) -> None:
        """Create a server.

        Args:
            llm: vLLM's `AsyncLLM`.
            answers: Stream to which the answers are written.
        """
        self._llm = llm
        self._answers = answers
        self._drawing: dict[int, asyncio.Task[None]] = {}
        """Tasks of the `draw` orders in flight, by the order's id."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks of all orders in flight."""
        self._updating = False
        """Whether a weight update has been started and not finished."""
        self.over = asyncio.Event()
        """Event that is set when vLLM cannot continue, because one of its processes has exited."""

    def take(self, order: dict[str, Any]) -> None:
        """Start the execution of an order.

        An order `abort` takes effect immediately and has no answer of its own; the aborted request
        sends a last answer.
        """
        number = order["id"]
        what = order["do"]
        if what == "abort":
            if (request := self._drawing.get(number)) is not None:
                request.cancel()
            return

        task = asyncio.create_task(
            self._draw(order) if what == "draw" else self._obey(number, what, order)
        )
        # asyncio holds only weak references to tasks; this set keeps them alive.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if what == "draw":
            self._drawing[number] = task
            task.add_done_callback(lambda task: self._drawn(number, aborted=task.cancelled()))

    def answer(self, **content: Any) -> None:
        """Send an answer, whose fields are the keyword arguments."""
        self._answers.write(json.dumps(content).encode() + b"\n")

    async def _draw(self, order: dict[str, Any]) -> None:
        """Generate tokens for a request, and send them as they arrive."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        number = order["id"]
        options = SamplingParams(
            output_kind=RequestOutputKind.DELTA, logprobs=0, detokenize=False, **order["sampling"]
        )
        try:
            prompt = {"prompt_token_ids": order["tokens"]}
            async for output in self._llm.generate(prompt, options, str(number)):
                (part,) = output.outputs
                tokens = list(part.token_ids)
                logprobs = [
                    entry[token].logprob
                    for token, entry in zip(tokens, part.logprobs or (), strict=True)
                ]
                finish = None if part.finish_reason is None else str(part.finish_reason)
                self.answer(
                    id=number,
                    tokens=tokens,
                    logprobs=logprobs,
                    finish="cancelled" if finish == "abort" else finish,
                )
        except Exception as error:
            self._fail(number, error)

    def _drawn(self, number: int, *, aborted: bool) -> None:
        """Remove a request that has ended.

        A request whose task was cancelled has sent no last answer, and possibly had not even
        started, so this method sends the answer.
        """
        del self._drawing[number]
        if aborted:
            self.answer(id=number, tokens=[], logprobs=[], finish="cancelled")

    async def _obey(self, number: int, what: str, order: dict[str, Any]) -> None:
        """Execute an order other than `draw`, and send its answer.

        Args:
            number: Id of the order.
            what: Name of the method of this class, without the underscore.
            order: The order; its field `with` contains the method's keyword arguments.
        """
        try:
            work = asyncio.create_task(getattr(self, f"_{what}")(**order.get("with", {})))
            while not (await asyncio.wait([work], timeout=_LOOK_S))[0]:
                # After a failure of vLLM's engine, calls that wait for it never return.
                if self._llm.errored:
                    work.cancel()
                    raise Gone("one of its processes exited")
            work.result()
            self.answer(id=number, done=True)
        except Exception as error:
            self._fail(number, error)

    def _fail(self, number: int, error: Exception) -> None:
        """Answer an order with an error.

        If vLLM cannot continue, the field is `gone` instead of `error`, and `over` is set.
        """
        traceback.print_exception(error)
        message = (
            str(error)
            if (is_gone := isinstance(error, Gone))
            else f"{type(error).__name__}: {error}"
        )
        if is_gone or self._llm.errored:
            self.answer(id=number, gone=message)
            self.over.set()
        else:
            self.answer(id=number, error=message)

    async def _begin(self) -> None:
        """Start a weight update on all workers.

        If the previous update was not finished, it is ended first.
        """
        if self._updating:
            await self._on_workers("give_up")
        self._updating = True
        await self._on_workers("start_weight_update")

    async def _load(self, **group: Any) -> None:
        """Load tensors on all workers; the keyword arguments are the fields of `SharedPieces`."""
        await self._on_workers("update_weights", update_info=group)

    async def _finish(self) -> None:
        """Finish the weight update on all workers, and reset the prefix cache."""
        await self._on_workers("end_update")
        self._updating = False
        await self._forget()

    async def _on_workers(self, what: str, **arguments: Any) -> None:
        """Call a method of every worker.

        Raises:
            RuntimeError: The method failed on some workers; the message contains their errors.
            Gone: A worker cannot answer.
        """
        try:
            answers = await self._llm.collective_rpc("attempt", args=(what,), kwargs=arguments)
        # `attempt` itself does not raise, so a worker has exited. vLLM may notice this later.
        except Exception as error:
            raise Gone(f"{type(error).__name__}: {error}") from error
        if errors := {answer for answer in answers if answer is not None}:
            raise RuntimeError("; ".join(sorted(errors)))

    async def _forget(self) -> None:
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


def _watch(connection: socket.socket, started: threading.Event) -> None:
    """Terminate all processes if the client disconnects while vLLM starts.

    The event loop is blocked during the start and cannot notice a closed connection. This function
    therefore runs in a thread.

    Args:
        connection: Socket to the client.
        started: Event that is set when vLLM has started.
    """
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    while not started.wait(0.5):
        if poll.poll(0):
            end_group(1.0)
            os._exit(1)


async def serve(connection: socket.socket) -> None:
    """Start vLLM, and execute orders until the client disconnects or vLLM fails."""
    started = threading.Event()
    threading.Thread(target=_watch, args=(connection, started), daemon=True).start()
    orders, answers = await asyncio.open_connection(sock=connection, limit=_LINE)
    settings = json.loads(await orders.readline())

    # The import takes seconds. `_watch` already observes the connection during this time.
    from vllm import AsyncEngineArgs
    from vllm import __version__ as release
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        arguments = AsyncEngineArgs(
            **settings,
            skip_tokenizer_init=True,
            load_format="dummy",
            logprobs_mode="raw_logprobs",  # receive.py computes these at the temperature
            disable_log_stats=True,
            weight_transfer_config=WeightTransferConfig(backend="aligner"),
            worker_extension_cls="receive.AlignerWorker",
        )
        llm = AsyncLLM.from_engine_args(arguments)
    except Exception as error:
        traceback.print_exc()
        answers.write(json.dumps({"refused": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        await answers.drain()
        return

    started.set()
    server = Server(llm, answers)
    server.answer(release=release)

    reading = asyncio.create_task(_read(orders, server))
    over = asyncio.create_task(server.over.wait())
    await asyncio.wait([reading, over], return_when=asyncio.FIRST_COMPLETED)
    with contextlib.suppress(ConnectionError):
        await answers.drain()
    llm.shutdown()


async def _read(orders: asyncio.StreamReader, server: Server) -> None:
    """Read orders and start them until the client disconnects."""
    with contextlib.suppress(ConnectionError):
        while line := await orders.readline():
            server.take(json.loads(line))


def main() -> None:
    """Run the server; when it ends for any reason, terminate all processes of the group."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        asyncio.run(serve(connection))
    finally:
        end_group(_END_S)


if __name__ == "__main__":
    main()
