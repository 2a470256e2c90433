"""Base class of the OpenAI-compatible HTTP servers, which run in a thread of their process."""

import asyncio
import itertools
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator, Sequence
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
# timeout of the start in seconds
_START_S = 30.0
# Maximum size of a character in JSON (two \uXXXX escapes), and of all fields besides messages.
_BYTES_PER_CHARACTER = 12
_MORE_BYTES = 1 << 16
_T = TypeVar("_T")


class OpenAIServer(ABC):
    """HTTP server that serves `routes`, and returns errors in OpenAI's format.

    Requests are handled on an asyncio loop in the server's own thread.
    """

    def __init__(self, host: str, port: int, most_characters: int, key: str) -> None:
        """Create a server that is not listening yet.

        Args:
            host: Address of this machine.
            port: TCP port; 0 selects a free one.
            most_characters: Maximum number of characters of a request body.
            key: Configuration key or option that sets `host`, for error messages.
        """
        self._host = host
        self._port = port
        self._key = key
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
        """Return the routes of the server."""

    def start(self) -> None:
        """Start the thread, and return when the server accepts requests.

        Raises AlignerError if the host is not an address of this machine, the port is in use, or
        the server does not start in time.
        """
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
        """URL of the server without a path."""
        if self._socket is None:
            raise AssertionError  # `start` must have been called
        return f"http://{self._host}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        """Stop the server and its thread. May be called repeatedly."""
        if self._thread.is_alive():
            self._server.should_exit = True
            self._thread.join()
            self._loop.close()
        if self._socket is not None:
            self._socket.close()

    def on_loop(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the server's loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def answer(
        self,
        request: Request,
        body: CompletionBody,
        work: Awaitable[Sequence[Answer]],
        name: str = "",
    ) -> Response:
        """Return the response with the answers of `work`, which is cancelled on a disconnect.

        Args:
            request: The request; its body must have been read.
            body: The validated body of the request.
            work: Awaitable that returns the answers.
            name: Name of the episode, part of the response's id; empty without one.
        """
        answer_task = asyncio.ensure_future(work)
        disconnect = asyncio.create_task(_gone(request))
        await asyncio.wait([answer_task, disconnect], return_when=asyncio.FIRST_COMPLETED)
        disconnect.cancel()
        if not answer_task.done():
            answer_task.cancel()
            _log.info(
                "%s: the client disconnected before the response was complete", name or "endpoint"
            )
            return Response(status_code=499)

        answers = answer_task.result()
        kind = "chatcmpl" if isinstance(body, ChatBody) else "cmpl"
        name = "-".join(part for part in (kind, name, str(next(self._names))) if part)
        if body.stream:
            return StreamingResponse(
                _each(streamed(name, body, answers)), media_type="text/event-stream"
            )
        return JSONResponse(answered(name, body, answers))

    async def read(self, request: Request) -> bytes:
        """Return the body of a request. Raises Refused if it is too large."""
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
        """Serve requests until `close`; runs in the server's thread."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._server.serve([self._socket] if self._socket else None))

    def _app(self) -> Starlette:
        """Return the Starlette application with the routes and error handlers."""
        return Starlette(
            routes=self.routes(),
            exception_handlers={Refused: _refused, HTTPException: _refused, Exception: _failed},
        )


def models_response(name: str) -> JSONResponse:
    """Return the response to `/v1/models` of a server with one model."""
    return JSONResponse(
        {
            "object": "list",
            "data": [{"id": name, "object": "model", "created": 0, "owned_by": "aligner"}],
        }
    )


async def _gone(request: Request) -> None:
    """Return when the client of a request has disconnected; its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _each(events: Iterator[str]) -> AsyncIterator[str]:
    """Return an iterator as an asynchronous one, which Starlette does not move to a thread."""
    for event in events:
        yield event


async def _refused(request: Request, error: Exception) -> Response:
    """Return the response to a request that the server or a route has refused."""
    if isinstance(error, HTTPException):
        error = Refused(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    assert isinstance(error, Refused)
    return JSONResponse(error.content(), error.status)


async def _failed(request: Request, error: Exception) -> Response:
    """Return the response to a request whose handler raised an unexpected exception."""
    refused = Refused(500, f"{type(error).__name__}: {error}")
    return JSONResponse(refused.content(), refused.status)
