"""HTTP server that answers requests to a model, in a thread of its process.

Agents in training and clients of a stored model use the same server with different back ends:
`AgentSession` and `ServedModel`.
"""

import asyncio
import contextlib
import functools
import hmac
import itertools
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from aligner.agents.answers import prepare
from aligner.agents.client_connection import admit_client, call_if_cut, make_connection_class
from aligner.agents.protocols.anthropic_messages import (
    ANTHROPIC_MESSAGES,
    format_anthropic_error,
    parse_count_request,
)
from aligner.agents.protocols.chat_completions import CHAT_COMPLETIONS
from aligner.agents.protocols.openai_completions import IGNORED_FIELDS
from aligner.agents.protocols.requests import (
    Answer,
    ChatRequest,
    ModelRequest,
    RequestError,
)
from aligner.agents.protocols.response_store import ResponseStore
from aligner.agents.protocols.responses_api import RESPONSES
from aligner.agents.protocols.text_completions import TEXT_COMPLETIONS
from aligner.agents.protocols.wire_format import RequestContext, WireFormat, format_openai_error
from aligner.errors import AlignerError
from aligner.open_files import (
    OTHER_FILES,
    StrangerConnections,
    raise_open_file_limit,
    share_open_files,
)

_log = logging.getLogger(__name__)

# timeout of the start in seconds
_START_TIMEOUT_S = 30.0
# Maximum size of a character in JSON, in bytes: two \uXXXX escapes, because a character outside the
# Basic Multilingual Plane is escaped as a surrogate pair.
_BYTES_PER_CHARACTER = 12
# Maximum size of the body of a refused request that is received, and the timeout for it in seconds.
_MAX_DISCARDED_BYTES = 1 << 20
_DISCARD_TIMEOUT_S = 5.0
# Maximum number of requests that are answered at the same time; further ones get the status 429.
_MAX_REQUESTS = 16_384
# Maximum number of connections that wait to be accepted.
_BACKLOG = 2048
# after this time in seconds, a client may repeat a request with the status 429
_RETRY_AFTER_S = 1
# maximum size in bytes of all fields of a request besides its messages
_OTHER_FIELDS_BYTES = 1 << 16
# "false" marks a request whose answer a run does not train on
_TRAIN_HEADER = "X-Aligner-Train"
_T = TypeVar("_T")

_WIRE_FORMATS = (CHAT_COMPLETIONS, TEXT_COMPLETIONS, RESPONSES, ANTHROPIC_MESSAGES)


class Backend(Protocol):
    """A model, or the session of an agent, that answers requests."""

    @property
    def name(self) -> str:
        """Part of the ids of the responses; empty if they need none."""

    @property
    def model_name(self) -> str:
        """Name of the model in the list of models."""

    @property
    def stored_responses(self) -> ResponseStore:
        """Earlier responses that requests of the Responses API may continue."""

    def answer(self, request: ModelRequest) -> Coroutine[Any, Any, Sequence[Answer]]:
        """Return `request.n` answers.

        The coroutine is cancelled if the client disconnects.

        Raises:
            RequestError: The request is invalid or not supported, or the session has ended.
        """

    def mark_refused(self) -> None:
        """Note that a request was refused, because the server has too many requests."""

    def mark_unreceived(self, request: ModelRequest) -> None:
        """Note that the client has disconnected before it had received all of `request`'s answers.

        Called on the server's loop.
        """

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of input tokens of a chat; may run in any thread.

        Raises:
            RequestError: The messages are invalid.
        """


class ModelServer:
    """HTTP server that passes requests in all wire formats to back ends.

    Requests are handled on an asyncio loop in the server's own thread.
    """

    def __init__(
        self,
        host: str,
        port: int,
        max_characters: int,
        host_setting: str,
        find_backend: Callable[[Request], Backend],
        *,
        root: str = "",
        other_routes: Sequence[Route] = (),
        allows_browsers: bool = False,
        get_headers: Callable[[Request], Mapping[str, str]] = lambda request: {},
    ) -> None:
        """Create a server that is not listening yet.

        Args:
            host: Address of this machine.
            port: TCP port; 0 selects a free one.
            max_characters: Maximum number of characters of a request body.
            host_setting: Configuration key or option that sets `host`, for error messages.
            find_backend: Function that returns the back end of a request, and checks its
                authorization. Raises RequestError.
            root: Path before `/v1` of the routes; it may contain path parameters.
            other_routes: Further routes.
            allows_browsers: Whether scripts of any web page may send requests (CORS).
            get_headers: Function that returns further headers of the response to a request.
        """
        self._find_permitted_backend = find_backend
        self._host = host
        self._port = port
        self._host_setting = host_setting
        self._max_body_bytes = _BYTES_PER_CHARACTER * max_characters + _OTHER_FIELDS_BYTES
        self._response_numbers = itertools.count(1)
        # each request needs a connection
        file_limit = raise_open_file_limit()
        self.max_requests = min(_MAX_REQUESTS, max(1, file_limit - OTHER_FILES))
        """Maximum number of requests that are answered at the same time."""
        self._open_requests = 0
        # Many agents may connect at the same time, before the server reads their keys.
        strangers = StrangerConnections(share_open_files(2, _MAX_REQUESTS))
        # ignored fields that have been logged; each is logged only once
        self._logged_fields = set[str]()
        self._socket: socket.socket | None = None
        # only the server's thread runs this loop; other threads submit coroutines to it
        self._loop = asyncio.new_event_loop()
        # the process configures its own logging, so uvicorn must not
        self._server = uvicorn.Server(
            uvicorn.Config(
                _HeaderMiddleware(
                    self._build_app(root, other_routes, allows_browsers), get_headers
                ),
                http=make_connection_class(strangers),
                backlog=share_open_files(4, _BACKLOG),
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
                timeout_keep_alive=3600,
            )
        )
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)

    def start(self) -> None:
        """Start the thread, and return when the server accepts requests.

        Raises AlignerError if the host is not an address of this machine, the port is in use, or
        the server does not start in time.
        """
        # bind here instead of in uvicorn, so that an error reaches the caller, and the port that
        # the system has chosen is known
        try:
            self._socket = socket.create_server((self._host, self._port), backlog=_BACKLOG)
        except OSError as error:
            raise AlignerError(
                f"{self._host_setting}={self._host}: cannot listen on port {self._port}: {error};"
                " must be an address of this machine, with a free port"
            ) from error

        self._thread.start()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise AlignerError(f"{self._host_setting}={self._host}: the server did not start")
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

    def _find_backend(self, request: Request) -> Backend:
        """Return the back end of a request, whose client keeps its connection.

        Raises RequestError without authorization.
        """
        backend = self._find_permitted_backend(request)
        admit_client(request)
        return backend

    def _run(self) -> None:
        """Serve requests until `close`; runs in the server's thread."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._server.serve([self._socket] if self._socket else None))

    def _build_app(
        self, root: str, other_routes: Sequence[Route], allows_browsers: bool
    ) -> Starlette:
        """Return the Starlette application with the routes and error handlers."""
        routes = [
            Route(
                f"{root}/v1/{wire_format.path}", self._build_handler(wire_format), methods=["POST"]
            )
            for wire_format in _WIRE_FORMATS
        ]
        routes += [
            Route(f"{root}/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
            Route(f"{root}/v1/responses/{{response}}", self._get_response, methods=["GET"]),
            Route(f"{root}/v1/responses/{{response}}", self._delete_response, methods=["DELETE"]),
            Route(f"{root}/v1/models", self._list_models, methods=["GET"]),
            # names of models may contain slashes
            Route(f"{root}/v1/models/{{model:path}}", self._get_model, methods=["GET"]),
        ]
        cors = Middleware(
            CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]
        )
        return Starlette(
            routes=[*routes, *other_routes],
            middleware=[cors] if allows_browsers else [],
            exception_handlers={
                RequestError: _respond_to_request_error,
                HTTPException: _respond_to_request_error,
                Exception: _respond_to_unexpected_error,
            },
        )

    def _build_handler(self, wire_format: WireFormat) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of the requests in a wire format."""

        async def handle(http_request: Request) -> Response:
            """Answer an HTTP request in this wire format.

            Raises:
                RequestError: `max_requests` requests are in flight already (status 429).
            """
            backend = self._find_backend(http_request)
            if self._open_requests >= self.max_requests:
                backend.mark_refused()
                raise RequestError(
                    429,
                    f"the server answers {self.max_requests} requests already; try again later",
                    "rate_limit_exceeded",
                )
            self._open_requests += 1
            try:
                return await self._answer(wire_format, http_request, backend)
            finally:
                self._open_requests -= 1

        return handle

    async def _answer(
        self, wire_format: WireFormat, http_request: Request, backend: Backend
    ) -> Response:
        """Answer a request in a wire format."""
        content = await self.read_body(http_request)
        number = str(next(self._response_numbers))
        id_parts = (wire_format.id_prefix, backend.name, number)
        response_id = "-".join(part for part in id_parts if part)
        parsed = wire_format.parse(content, RequestContext(response_id, backend.stored_responses))
        self._log_ignored_fields(parsed.request)
        request = replace(parsed.request, is_trained=_read_train_header(http_request))

        answers = await _await_connected(backend.answer(request), http_request, backend.name)
        if answers is None:
            # nginx's code for a closed connection; no client reads it
            return Response(status_code=499)
        parsed.record(answers)
        call_if_cut(http_request, functools.partial(backend.mark_unreceived, request))
        if parsed.request.stream:
            # Without chunks, a client that stops after the last event has read the whole body; see
            # `call_if_cut`.
            events = "".join(parsed.format_events(answers))
            return Response(events, media_type="text/event-stream")
        return JSONResponse(parsed.format_response(answers))

    def _log_ignored_fields(self, request: ModelRequest) -> None:
        """Log the fields of a request that have no effect; each only once."""
        for name in {*request.ignored_fields} - self._logged_fields:
            self._logged_fields.add(name)
            kind = "is ignored" if name in IGNORED_FIELDS else "is unknown and ignored"
            _log.warning("requests set %s, which %s", name, kind)

    async def _count_tokens(self, request: Request) -> Response:
        """Count the input tokens of a request in Anthropic's format."""
        backend = self._find_backend(request)
        chat_request = parse_count_request(await self.read_body(request))
        count = await prepare(chat_request, lambda: backend.count_tokens(chat_request))
        return JSONResponse({"input_tokens": count})

    async def _get_response(self, request: Request) -> Response:
        """Return a stored response of the Responses API."""
        if request.query_params.get("stream", "false") != "false":
            raise RequestError(400, "stream: must be false for a stored response", "unsupported")
        store = self._find_backend(request).stored_responses
        return JSONResponse(store.get(request.path_params["response"]))

    async def _delete_response(self, request: Request) -> Response:
        """Delete a stored response of the Responses API."""
        response_id = request.path_params["response"]
        self._find_backend(request).stored_responses.delete(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def _list_models(self, request: Request) -> Response:
        """List the only model of the back end."""
        model = _build_model(self._find_backend(request).model_name)
        return JSONResponse({"object": "list", "data": [model]})

    async def _get_model(self, request: Request) -> Response:
        """Return the model of the back end."""
        name = request.path_params["model"]
        model_name = self._find_backend(request).model_name
        if name != model_name:
            raise RequestError(
                404,
                f"The model '{name}' does not exist; this server has the model '{model_name}'.",
                "model_not_found",
                "model",
            )
        return JSONResponse(_build_model(model_name))


class _HeaderMiddleware:
    """ASGI application that adds headers to the responses of another application.

    Unlike a middleware of Starlette, it also adds them to the responses to unexpected errors.
    """

    def __init__(self, app: Starlette, get_headers: Callable[[Request], Mapping[str, str]]) -> None:
        self._app = app
        self._get_headers = get_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = self._get_headers(Request(scope))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(headers)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def has_key(request: Request, expected_key: str | None) -> bool:
    """Return whether a request has the expected API key; False if there is no such key."""
    if expected_key is None:
        return False
    # Anthropic's clients send the key in a header of its own
    key = request.headers.get("x-api-key")
    if key is None:
        # the name of the scheme is case-insensitive (RFC 9110, section 11.1)
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = token if scheme.lower() == "bearer" else ""
    # the comparison takes constant time, so that it does not reveal a prefix of the key
    return hmac.compare_digest(key.encode(), expected_key.encode())


def _read_train_header(request: Request) -> bool:
    """Return whether a run trains on the answers to a request.

    Raises RequestError if the header has an invalid value.
    """
    value = request.headers.get(_TRAIN_HEADER, "true")
    if value.lower() not in ("true", "false"):
        raise RequestError(
            400, f"header {_TRAIN_HEADER}: must be true or false, got {value!r}", "invalid_header"
        )
    return value.lower() == "true"


def _build_model(name: str) -> dict[str, Any]:
    """Return the JSON object that describes a model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "aligner"}


async def _await_connected(
    pending_answers: Coroutine[Any, Any, Sequence[Answer]], request: Request, name: str
) -> Sequence[Answer] | None:
    """Return the answers to a request, or None if its client disconnects before.

    Args:
        pending_answers: Coroutine that returns the answers; cancelled if the client disconnects.
        request: The request; its body must have been read.
        name: Name of the back end for the log.
    """
    answer_task = asyncio.ensure_future(pending_answers)
    disconnect = asyncio.create_task(_wait_for_disconnect(request))
    await asyncio.wait([answer_task, disconnect], return_when=asyncio.FIRST_COMPLETED)
    disconnect.cancel()
    if answer_task.done():
        return answer_task.result()
    answer_task.cancel()
    _log.info(
        "%s: the client disconnected before the response was complete", name or "model server"
    )
    return None


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the client of a request has disconnected; its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _respond_to_request_error(request: Request, error: Exception) -> Response:
    """Return the response to a request that the server or a route has rejected."""
    if isinstance(error, HTTPException):
        # Starlette's own errors, such as an unknown path, get OpenAI's format too
        error = RequestError(
            error.status_code, f"{request.method} {request.url.path}: {error.detail}"
        )
    assert isinstance(error, RequestError)
    if error.status == 401:
        await _discard_body(request)
    return _build_error_response(request, error)


async def _discard_body(request: Request) -> None:
    """Receive the rest of a request's body, up to a maximum size.

    If the connection were closed before the client has sent the body, the client would get a reset
    instead of the response (RFC 9112, section 9.6).
    """

    async def discard() -> None:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > _MAX_DISCARDED_BYTES:
                return

    with contextlib.suppress(asyncio.TimeoutError, ClientDisconnect):
        await asyncio.wait_for(discard(), _DISCARD_TIMEOUT_S)


async def _respond_to_unexpected_error(request: Request, error: Exception) -> Response:
    """Return the response to a request whose handler raised an unexpected exception."""
    server_error = RequestError(500, f"{type(error).__name__}: {error}")
    return _build_error_response(request, server_error)


def _build_error_response(request: Request, error: RequestError) -> Response:
    """Return the response that reports an error in the format of the request's path."""
    is_anthropic = "/v1/messages" in request.url.path
    format_error = format_anthropic_error if is_anthropic else format_openai_error
    headers: dict[str, str] = {}
    if error.status == 429:
        headers = {"Retry-After": str(_RETRY_AFTER_S)}
    elif error.status == 401:
        # Otherwise, a client without a key could keep its connection.
        headers = {"Connection": "close"}
    return JSONResponse(format_error(error), error.status, headers)
