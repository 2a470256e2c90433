"""The pages of runs served on this machine's loopback, read only, to who has the key in the
link."""

import hmac
import socket
from collections.abc import Sequence
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aligner.errors import AlignerError
from aligner.view.pages import Pages, problem
from aligner.view.run_index import RunIndex

HOST = "127.0.0.1"
_TOLD = (HTTPException, AlignerError, OSError, Exception)
"""Errors for which there is a page; Starlette looks for the nearest class."""
_HEADERS = {
    # Plotly sets styles of elements. Scripts are the server's files alone.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self'"
        " data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def serve(directories: Sequence[Path], key: str, listening: socket.socket) -> None:
    """Answer requests at a socket of `HOST` until the process is told to end."""
    gate = Middleware(_Gate, key=key, port=listening.getsockname()[1])
    # A page of another site may have its name lead here (DNS rebinding): it asks for that name.
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False)
    middleware = [hosts, gate, Middleware(GZipMiddleware, compresslevel=1)]
    app = Starlette(
        routes=Pages(RunIndex(directories)).routes(),
        middleware=middleware,
        exception_handlers=dict.fromkeys(_TOLD, problem),
    )
    config = uvicorn.Config(
        app,
        log_level="critical",  # a page tells its reader of its error
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listening])


class _Gate:
    """Lets requests in that have the key, in the link or then in a cookie; says what browsers may
    do with answers."""

    def __init__(self, app: ASGIApp, key: str, port: int) -> None:
        self._app, self._key = app, key.encode()
        self._cookie = f"aligner-view-{port}"  # cookies are the same for all ports of a host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        if scope["type"] == "http":
            answer = self._refusal(Request(scope)) or self._app
            await answer(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """What is answered instead of the page; None where it may be seen."""
        if (given := request.query_params.get("key")) is not None and self._fits(given):
            answer = RedirectResponse(
                str(request.url.remove_query_params("key").replace(scheme="", netloc="")) or "/",
                303,
            )
            answer.set_cookie(self._cookie, given, httponly=True, samesite="lax")
            return answer
        if self._fits(request.cookies.get(self._cookie, "")):
            return None
        return PlainTextResponse(
            "The access key is missing or wrong. Open the complete link that `aligner view`"
            " printed.\n",
            403,
        )

    def _fits(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._key)
