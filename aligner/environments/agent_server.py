"""The endpoint of agents: OpenAI's API over HTTP, an address and a key for each episode, in a thread of a rank's."""

import asyncio
import hmac
import itertools
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from aligner.environments.agent_session import AgentSession
from aligner.environments.openai_protocol import (
    MODEL,
    ChatBody,
    CompletionBody,
    Refused,
    RewardBody,
    TextBody,
    answered,
    parsed,
    streamed,
)
from aligner.errors import AlignerError
from aligner.schema.options import is_finite_number

_log = logging.getLogger(__name__)
_START_S = 30.0
_BYTES_PER_CHARACTER, _MORE_BYTES = 12, 1 << 16
"""The most that a character takes in JSON, and what there is beside messages."""
_T = TypeVar("_T")
_Handler = Callable[[AgentSession, Request], Awaitable[Response]]


class AgentServer:
    """Serves sessions that are open, under `/episodes/NAME/v1`; what has no key of its own gets 401."""

    def __init__(self, host: str, most_characters: int) -> None:
        """`host` is this machine's name or address, as agents reach it; bodies of more than `most_characters` are refused."""
        self._host, self._most_bytes = host, _BYTES_PER_CHARACTER * most_characters + _MORE_BYTES
        self._sessions: dict[str, AgentSession] = {}
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
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)

    def start(self) -> None:
        """Listen, at a port that is free. Raises AlignerError where the host is not this machine's."""
        try:
            self._socket = socket.create_server((self._host, 0), backlog=2048)
        except OSError as error:
            raise AlignerError(
                f"environment.endpoint_host={self._host}: must be an address of this machine: {error}"
            ) from error
        self._thread.start()
        end = time.monotonic() + _START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise AlignerError(f"environment.endpoint_host={self._host}: the endpoint of agents did not start")
            time.sleep(0.01)

    def url(self, session: AgentSession) -> str:
        """Where a session is served; its agent's `base_url` is this and `/v1`."""
        if self._socket is None:
            raise AssertionError  # it has been started
        return f"http://{self._host}:{self._socket.getsockname()[1]}/episodes/{session.name}"

    def open(self, session: AgentSession) -> None:
        """Serve a session."""
        self._on_loop(self._opened(session))

    def close_session(self, session: AgentSession) -> None:
        """Serve it no more; when this returns it has all the turns that it will have. May be repeated."""
        self._on_loop(self._closed(session))

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have a function called on the loop that sessions live on."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """End the thread and hang up. May be repeated."""
        if self._thread.is_alive():
            self._server.should_exit = True
            self._thread.join()
            self._loop.close()
        if self._socket is not None:
            self._socket.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._server.serve([self._socket] if self._socket else None))

    def _on_loop(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _opened(self, session: AgentSession) -> None:
        self._sessions[session.name] = session

    async def _closed(self, session: AgentSession) -> None:
        self._sessions.pop(session.name, None)
        session.close()

    def _app(self) -> Starlette:
        root = "/episodes/{episode}"
        routes = {
            "attempts": ("POST", self._begun),
            "v1/reward": ("POST", self._rewarded),
            "v1/models": ("GET", self._models),
            "v1/chat/completions": ("POST", self._completed),
            "v1/completions": ("POST", self._completed),
        }
        return Starlette(
            routes=[Route(f"{root}/{path}", self._served(each), methods=[method]) for path, (method, each) in routes.items()],
            exception_handlers={Refused: _refused, HTTPException: _refused, Exception: _failed},
        )

    def _served(self, handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        """A handler for requests with the session's key."""

        async def serve(request: Request) -> Response:
            session = self._sessions.get(request.path_params["episode"])
            key = request.headers.get("authorization", "").removeprefix("Bearer ")
            expected = None
            if session is not None:
                expected = session.key if handler == self._begun else session.agent_key
            if session is None or expected is None or not hmac.compare_digest(key.encode(), expected.encode()):
                raise Refused(401, "no episode under way has this address and key", "invalid_api_key")
            return await handler(session, request)

        return serve

    async def _begun(self, session: AgentSession, request: Request) -> Response:
        return JSONResponse({"api_key": session.begin()})

    async def _models(self, session: AgentSession, request: Request) -> Response:
        return JSONResponse(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "aligner"}]}
        )

    async def _rewarded(self, session: AgentSession, request: Request) -> Response:
        body = parsed(RewardBody, await self._body(request))
        if not is_finite_number(body.reward):
            raise Refused(400, f"reward: must be a finite number, got {body.reward}")
        session.reward += body.reward
        return JSONResponse({"reward": session.reward})

    async def _completed(self, session: AgentSession, request: Request) -> Response:
        kind: type[CompletionBody] = ChatBody if request.url.path.endswith("/chat/completions") else TextBody
        body = parsed(kind, await self._body(request))
        work = asyncio.create_task(session.answer(body))
        gone = asyncio.create_task(_gone(request))
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not work.done():
            work.cancel()
            _log.info("episode %s: a client has gone before it was answered", session.name)
            return Response(status_code=499)
        answers = work.result()
        name = f"{'chatcmpl' if kind is ChatBody else 'cmpl'}-{session.name}-{next(self._names)}"
        if body.stream:
            return StreamingResponse(_each(streamed(name, body, answers)), media_type="text/event-stream")
        return JSONResponse(answered(name, body, answers))

    async def _body(self, request: Request) -> bytes:
        """All of it. Raises Refused for too much."""
        content = bytearray()
        try:
            async for part in request.stream():
                content += part
                if len(content) > self._most_bytes:
                    raise Refused(413, f"the body has more than {self._most_bytes} bytes", "request_too_large")
        except ClientDisconnect:
            raise Refused(400, "the client has gone") from None
        return bytes(content)


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
