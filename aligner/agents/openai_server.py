"""A server of OpenAI's API over HTTP, in a thread of a process's."""

import asyncio
import itertools
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from aligner.agents.openai_protocol import (
    Answer,
    ChatBody,
    CompletionBody,
    Refused,
    answered,
    streamed,
)
from aligner.errors import AlignerError

_log = logging.getLogger(__name__)
_START_S = 30.0
_BYTES_PER_CHARACTER, _MORE_BYTES = 12, 1 << 16
"""The most that a character takes in JSON, and what there is beside messages."""
_T = TypeVar("_T")


class OpenAIServer(ABC):
    """Serves `routes` at an address; errors are worded as OpenAI words them."""

    def __init__(self, host: str, port: int, most_characters: int, key: str) -> None:
        """Port 0 is one that is free; bodies of more than `most_characters` are refused. `key` is
        what gave `host`."""
        self._host, self._port, self._key = host, port, key
        self._most_bytes = _BYTES_PER_CHARACTER * most_characters + _MORE_BYTES
        self._names = itertools.count(1)
        self._socket: socket.socket | None = None
        self._loop = asyncio.new_event_loop()
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app(),
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
                timeout_keep_alive=3600,
            )
        )
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)

    @abstractmethod
    def routes(self) -> list[Route]:
        """What is served."""

    def start(self) -> None:
        """Listen. Raises AlignerError where the host is not this machine's, or the port is
        taken."""
        try:
            self._socket = socket.create_server((self._host, self._port), backlog=2048)
        except OSError as error:
            raise AlignerError(
                f"{self._key}={self._host}: cannot listen on port {self._port}: {error}; must be an"
                " address of this machine, with a free port"
            ) from error
        self._thread.start()
        end = time.monotonic() + _START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise AlignerError(f"{self._key}={self._host}: the endpoint did not start")
            time.sleep(0.01)

    @property
    def address(self) -> str:
        """Where it is served."""
        if self._socket is None:
            raise AssertionError  # it has been started
        return f"http://{self._host}:{self._socket.getsockname()[1]}"

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have a function called on the loop that requests live on."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """End the thread and hang up. May be repeated."""
        if self._thread.is_alive():
            self._server.should_exit = True
            self._thread.join()
            self._loop.close()
        if self._socket is not None:
            self._socket.close()

    def on_loop(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Have the loop do it, and wait."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def answer(
        self,
        request: Request,
        body: CompletionBody,
        work: Awaitable[Sequence[Answer]],
        name: str = "",
    ) -> Response:
        """What `work`, which ends where the client goes before, answers a request that was read to
        its end."""
        answering = asyncio.ensure_future(work)
        gone = asyncio.create_task(_gone(request))
        await asyncio.wait([answering, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answering.done():
            answering.cancel()
            _log.info(
                "%s: the client disconnected before the response was complete", name or "endpoint"
            )
            return Response(status_code=499)
        answers = answering.result()
        kind = "chatcmpl" if isinstance(body, ChatBody) else "cmpl"
        name = "-".join(part for part in (kind, name, str(next(self._names))) if part)
        if body.stream:
            return StreamingResponse(
                _each(streamed(name, body, answers)), media_type="text/event-stream"
            )
        return JSONResponse(answered(name, body, answers))

    async def read(self, request: Request) -> bytes:
        """All of a request's body. Raises Refused for too much."""
        content = bytearray()
        try:
            async for part in request.stream():
                content += part
                if len(content) > self._most_bytes:
                    raise Refused(
                        413,
                        f"the request body has more than {self._most_bytes} bytes",
                        "request_too_large",
                    )
        except ClientDisconnect:
            raise Refused(400, "the client disconnected") from None
        return bytes(content)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._server.serve([self._socket] if self._socket else None))

    def _app(self) -> Starlette:
        return Starlette(
            routes=self.routes(),
            exception_handlers={Refused: _refused, HTTPException: _refused, Exception: _failed},
        )


def models_response(name: str) -> JSONResponse:
    """What `/v1/models` tells of one model."""
    return JSONResponse(
        {
            "object": "list",
            "data": [{"id": name, "object": "model", "created": 0, "owned_by": "aligner"}],
        }
    )


async def _gone(request: Request) -> None:
    """Return when the client has gone, whose request was read to its end."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _each(events: Iterator[str]) -> AsyncIterator[str]:
    for event in events:
        yield event


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = Refused(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    assert isinstance(error, Refused)
    return JSONResponse(error.content(), error.status)


async def _failed(request: Request, error: Exception) -> Response:
    refused = Refused(500, f"{type(error).__name__}: {error}")
    return JSONResponse(refused.content(), refused.status)
