"""Web server of `aligner view`.

It serves the pages on this machine's loopback address to clients that have the access key of the
printed link. The pages change nothing except the notes of a run.
"""

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

from aligner.agents.client_connection import admit_client, make_connection_class
from aligner.errors import AlignerError
from aligner.open_files import StrangerConnections
from aligner.view.pages import Pages, render_error
from aligner.view.run_index import RunIndex

HOST = "127.0.0.1"
# Errors for which an error page is rendered; Starlette selects the handler of the nearest base
# class.
_HANDLED_ERRORS = (HTTPException, AlignerError, OSError, Exception)
_HEADERS = {
    # Plotly sets inline styles. Scripts may come only from the server's files.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self'"
        " data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    # With no-referrer, browsers would send forms with the origin "null".
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def serve(directories: Sequence[Path], key: str, listening: socket.socket) -> None:
    """Serve the pages until the process receives a signal to stop.

    Args:
        directories: Directories in and below which runs are shown.
        key: The access key.
        listening: A listening socket on `HOST`.
    """
    access = Middleware(_AccessControl, key=key, port=listening.getsockname()[1])
    # Protection against DNS rebinding: a site whose name resolves to this machine sends its own
    # name as the host.
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False)
    middleware = [hosts, access, Middleware(GZipMiddleware, compresslevel=1)]
    app = Starlette(
        routes=Pages(RunIndex(directories)).routes(),
        middleware=middleware,
        exception_handlers=dict.fromkeys(_HANDLED_ERRORS, render_error),
    )
    config = uvicorn.Config(
        app,
        http=make_connection_class(StrangerConnections()),
        log_level="critical",  # errors are shown on the pages
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listening])


class _AccessControl:
    """Middleware that accepts requests with the access key, in the link or later in a cookie, and
    adds the security headers to all responses."""

    def __init__(self, app: ASGIApp, key: str, port: int) -> None:
        self._app = app
        self._key = key.encode()
        # The name contains the port, because browsers share cookies between all ports of a host.
        self._cookie = f"aligner-view-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        if scope["type"] == "http":
            response = self._check_access(Request(scope)) or self._app
            await response(scope, receive, send_with_headers)

    def _check_access(self, request: Request) -> Response | None:
        """Return a redirect that sets the cookie if the request contains the key, None if the
        request has the cookie, and an error response otherwise."""
        if (key := request.query_params.get("key")) is not None and self._is_key(key):
            # Redirect to the address without the key, so that the address bar does not show it.
            target = request.url.remove_query_params("key").replace(scheme="", netloc="")
            # Browsers read an address that begins with two slashes or backslashes as another site.
            redirect = RedirectResponse("/" + str(target).lstrip("/\\"), 303)
            redirect.set_cookie(self._cookie, key, httponly=True, samesite="lax")
            return redirect
        if self._is_key(request.cookies.get(self._cookie, "")):
            admit_client(request)
            return self._check_origin(request)
        return PlainTextResponse(
            "The access key is missing or wrong. Open the complete link that `aligner view`"
            " printed.\n",
            403,
            # Otherwise, a client without a key could keep its connection.
            {"connection": "close"},
        )

    def _check_origin(self, request: Request) -> Response | None:
        """Return an error response to a form or script of another site, otherwise None.

        A browser sends the cookie also with the requests of other servers on this machine, because
        ports do not separate sites.
        """
        origin = f"http://{request.headers.get('host', '')}"
        if request.method in ("GET", "HEAD") or request.headers.get("origin") == origin:
            return None
        return PlainTextResponse("This request comes from another site.\n", 403)

    def _is_key(self, text: str) -> bool:
        # compare_digest takes the same time for all wrong keys, which prevents timing attacks.
        return hmac.compare_digest(text.encode(errors="replace"), self._key)
