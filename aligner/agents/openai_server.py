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
    RequestError,
    format_events,
    format_response,
)
from aligner.errors import AlignerError

_log = logging.getLogger(__name__)

# timeout of the start in seconds
_START_TIMEOUT_S = 30.0
# Maximum size of a character in JSON, in bytes: two \uXXXX escapes, because a character outside the
# Basic Multilingual Plane is escaped as a surrogate pair.
_BYTES_PER_CHARACTER = 12
# maximum size in bytes of all fields of a request besides its messages
_OTHER_FIELDS_BYTES = 1 << 16
_T = TypeVar("_T")


class OpenAIServer(ABC):
    """HTTP server that serves the routes of `build_routes`, and returns errors in OpenAI's format.

    Requests are handled on an asyncio loop in the server's own thread.
    """

    def __init__(self, host: str, port: int, max_characters: int, host_setting: str) -> None:
        """Create a server that is not listening yet.

        Args:
            host: Address of this machine.
            port: TCP port; 0 selects a free one.
            max_characters: Maximum number of characters of a request body.
            host_setting: Configuration key or option that sets `host`, for error messages.
        """
        self._host = host
        self._port = port
        self._host_setting = host_setting
        self._max_body_bytes = _BYTES_PER_CHARACTER * max_characters + _OTHER_FIELDS_BYTES
        self._response_numbers = itertools.count(1)
        self._socket: socket.socket | None = None
        # only the server's thread runs this loop; other threads submit coroutines to it
        self._loop = asyncio.new_event_loop()
        # the process configures its own logging, so uvicorn must not
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._build_app(),
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
    def build_routes(self) -> list[Route]:
        """Return the routes of the server."""

    def start(self) -> None:
        """Start the thread, and return when the server accepts requests.

        Raises AlignerError if the host is not an address of this machine, the port is in use, or
        the server does not start in time.
        """
        # bind here instead of in uvicorn, so that an error reaches the caller, and the port that
        # the system has chosen is known
        try:
            self._socket = socket.create_server((self._host, self._port), backlog=2048)
        except OSError as error:
            raise AlignerError(
                f"{self._host_setting}={self._host}: cannot listen on port {self._port}: {error};"
                " must be an address of this machine, with a free port"
            ) from error

        self._thread.start()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise AlignerError(f"{self._host_setting}={self._host}: the endpoint did not start")
            time.sleep(0.01)

    @property
    def url(self) -> str:
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

    def run_on_loop(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the server's loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def respond(
        self,
        request: Request,
        body: CompletionBody,
        pending_answers: Awaitable[Sequence[Answer]],
        episode: str = "",
    ) -> Response:
        """Wait for the answers to a request, and return its response.

        If the client disconnects first, `pending_answers` is cancelled.

        Args:
            request: The request; its body must have been read.
            body: The validated body of the request.
            pending_answers: Awaitable that returns the answers.
            episode: Name of the episode, part of the response's id; empty if there is no episode.
        """
        answer_task = asyncio.ensure_future(pending_answers)
        disconnect = asyncio.create_task(_wait_for_disconnect(request))
        await asyncio.wait([answer_task, disconnect], return_when=asyncio.FIRST_COMPLETED)
        disconnect.cancel()
        if not answer_task.done():
            answer_task.cancel()
            _log.info(
                "%s: the client disconnected before the response was complete",
                episode or "endpoint",
            )
            # nginx's code for a closed connection; no client reads it
            return Response(status_code=499)

        answers = answer_task.result()
        prefix = "chatcmpl" if isinstance(body, ChatBody) else "cmpl"
        number = str(next(self._response_numbers))
        response_id = "-".join(part for part in (prefix, episode, number) if part)
        if body.stream:
            return StreamingResponse(
                _iterate_async(format_events(response_id, body, answers)),
                media_type="text/event-stream",
            )
        return JSONResponse(format_response(response_id, body, answers))

    async def read_body(self, request: Request) -> bytes:
        """Return the body of a request. Raises RequestError if it is too large."""
        content = bytearray()
        try:
            async for part in request.stream():
                content += part
                # check each part, so that an oversized body is never held in memory as a whole
                if len(content) > self._max_body_bytes:
                    raise RequestError(
                        413,
                        f"the request body has more than {self._max_body_bytes} bytes",
                        "request_too_large",
                    )
        except ClientDisconnect:
            raise RequestError(400, "the client disconnected") from None
        return bytes(content)

    def _run(self) -> None:
        """Serve requests until `close`; runs in the server's thread."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._server.serve([self._socket] if self._socket else None))

    def _build_app(self) -> Starlette:
        """Return the Starlette application with the routes and error handlers."""
        return Starlette(
            routes=self.build_routes(),
            exception_handlers={
                RequestError: _respond_to_request_error,
                HTTPException: _respond_to_request_error,
                Exception: _respond_to_unexpected_error,
            },
        )


def build_models_response(name: str) -> JSONResponse:
    """Return the response to `/v1/models` of a server with one model."""
    return JSONResponse(
        {
            "object": "list",
            "data": [{"id": name, "object": "model", "created": 0, "owned_by": "aligner"}],
        }
    )


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the client of a request has disconnected; its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _iterate_async(events: Iterator[str]) -> AsyncIterator[str]:
    """Convert an iterator to an async iterator, which Starlette does not run in a thread."""
    for event in events:
        yield event


async def _respond_to_request_error(request: Request, error: Exception) -> Response:
    """Return the response to a request that the server or a route has rejected."""
    if isinstance(error, HTTPException):
        # Starlette's own errors, such as an unknown path, get OpenAI's format too
        error = RequestError(
            error.status_code, f"{request.method} {request.url.path}: {error.detail}"
        )
    assert isinstance(error, RequestError)
    return JSONResponse(error.to_json(), error.status)


async def _respond_to_unexpected_error(request: Request, error: Exception) -> Response:
    """Return the response to a request whose handler raised an unexpected exception."""
    server_error = RequestError(500, f"{type(error).__name__}: {error}")
    return JSONResponse(server_error.to_json(), server_error.status)
