"""vLLM behind a socket: run by vLLM's own Python, in which nothing of aligner is installed.

    python serve.py DESCRIPTOR

The socket of that number brings a JSON object a line: first the engine's settings, then orders with
an `id` each; what comes back tells the `id` of the order that it answers. Tokens go in and come
out, never text. When the other end goes, so does this process, and with it all that it has started.
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

_END_S = 5.0
"""How long the processes that vLLM has started have for ending by themselves."""
_LINE = 1 << 28
"""Bytes of an order, at most."""
_LOOK_S = 0.5
"""How often it is looked whether vLLM can still carry out an order that takes longer."""


class Gone(Exception):
    """One of vLLM's processes has ended."""


class Server:
    """Carries out orders, each a task; a request draws until it is aborted or complete."""

    def __init__(self, llm: Any, answers: asyncio.StreamWriter) -> None:
        self._llm, self._answers = llm, answers
        self._drawing: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._updating = False
        self.over = asyncio.Event()
        """vLLM cannot go on: one of its processes has ended."""

    def take(self, order: dict[str, Any]) -> None:
        """Begin an order; an `abort` is at once, and is answered by the request that it ends."""
        number, what = order["id"], order["do"]
        if what == "abort":
            if (drawing := self._drawing.get(number)) is not None:
                drawing.cancel()
            return
        task = asyncio.create_task(
            self._draw(order) if what == "draw" else self._obey(number, what, order)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if what == "draw":
            self._drawing[number] = task
            task.add_done_callback(lambda task: self._drawn(number, aborted=task.cancelled()))

    def answer(self, **content: Any) -> None:
        """Send an object."""
        self._answers.write(json.dumps(content).encode() + b"\n")

    async def _draw(self, order: dict[str, Any]) -> None:
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
        """After a request's end; one that was aborted may not even have begun, and has answered
        nothing."""
        del self._drawing[number]
        if aborted:
            self.answer(id=number, tokens=[], logprobs=[], finish="cancelled")

    async def _obey(self, number: int, what: str, order: dict[str, Any]) -> None:
        try:
            work = asyncio.create_task(getattr(self, f"_{what}")(**order.get("with", {})))
            while not (await asyncio.wait([work], timeout=_LOOK_S))[0]:
                if self._llm.errored:  # nobody will answer what waits for its engine
                    work.cancel()
                    raise Gone("one of its processes exited")
            work.result()
            self.answer(id=number, done=True)
        except Exception as error:
            self._fail(number, error)

    def _fail(self, number: int, error: Exception) -> None:
        traceback.print_exception(error)
        told = (
            str(error)
            if (is_gone := isinstance(error, Gone))
            else f"{type(error).__name__}: {error}"
        )
        if is_gone or self._llm.errored:
            self.answer(id=number, gone=told)
            self.over.set()
        else:
            self.answer(id=number, error=told)

    async def _begin(self) -> None:
        """Before the first weights of an update; one that was given up is ended first."""
        if self._updating:
            await self._on_workers("give_up")
        self._updating = True
        await self._on_workers("start_weight_update")

    async def _load(self, **group: Any) -> None:
        await self._on_workers("update_weights", update_info=group)

    async def _finish(self) -> None:
        await self._on_workers("end_update")
        self._updating = False
        await self._forget()

    async def _on_workers(self, what: str, **arguments: Any) -> None:
        """Call a method of every worker. Raises RuntimeError with what went wrong on any, Gone
        where one can not answer."""
        try:
            answers = await self._llm.collective_rpc("attempt", args=(what,), kwargs=arguments)
        # an attempt raises nothing: a worker has ended, which vLLM may notice later than we do
        except Exception as error:
            raise Gone(f"{type(error).__name__}: {error}") from error
        if wrong := {answer for answer in answers if answer is not None}:
            raise RuntimeError("; ".join(sorted(wrong)))

    async def _forget(self) -> None:
        if not await self._llm.reset_prefix_cache():
            raise RuntimeError("the KV cache of the previous weights could not be reset")

    async def _sleep(self) -> None:
        await self._llm.sleep(level=2)

    async def _wake(self, tags: list[str]) -> None:
        await self._llm.wake_up(tags)


def _watch(connection: socket.socket, started: threading.Event) -> None:
    """End everything if the other end goes while vLLM starts, which nothing else would notice
    before it has."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    while not started.wait(0.5):
        if poll.poll(0):
            end_group(1.0)
            os._exit(1)


async def serve(connection: socket.socket) -> None:
    """Start vLLM and carry out orders until the other end is gone."""
    started = threading.Event()
    threading.Thread(target=_watch, args=(connection, started), daemon=True).start()
    orders, answers = await asyncio.open_connection(sock=connection, limit=_LINE)
    settings = json.loads(await orders.readline())
    from vllm import AsyncEngineArgs
    from vllm import __version__ as release
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        arguments = AsyncEngineArgs(
            **settings,
            skip_tokenizer_init=True,
            load_format="dummy",
            logprobs_mode="raw_logprobs",  # which receive.py takes at the temperature
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
    reading, over = (
        asyncio.create_task(_read(orders, server)),
        asyncio.create_task(server.over.wait()),
    )
    await asyncio.wait([reading, over], return_when=asyncio.FIRST_COMPLETED)
    with contextlib.suppress(ConnectionError):
        await answers.drain()
    llm.shutdown()


async def _read(orders: asyncio.StreamReader, server: Server) -> None:
    with contextlib.suppress(ConnectionError):
        while line := await orders.readline():
            server.take(json.loads(line))


def main() -> None:
    """Serve; at the end, however it comes, no process of the group is left."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        asyncio.run(serve(connection))
    finally:
        end_group(_END_S)


if __name__ == "__main__":
    main()
