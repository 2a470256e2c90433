"""Connections of HTTP servers, which notice that a client did not receive a response, and are
closed if the client presents no key."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any, cast

from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from aligner.open_files import StrangerConnections


class ClientConnection(H11Protocol):
    """A connection whose end is reported if its last response was cut."""

    def __init__(self, *arguments: Any, strangers: StrangerConnections, **settings: Any) -> None:
        """Create a connection of uvicorn.

        Args:
            *arguments: Arguments of the base class.
            strangers: The connections of the server whose clients have presented no key.
            **settings: Settings of the base class.
        """
        super().__init__(*arguments, **settings)
        self._strangers = strangers
        # All requests of the connection get a copy of this state.
        self.app_state = {**self.app_state, "admit": self._admit}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol.connection_made`."""
        super().connection_made(transport)
        self._strangers.add(self, self._close_if_idle)

    def _close_if_idle(self) -> None:
        """Close the connection of a client without a key, unless its request is being answered.

        A busy server may need long until it reads the keys of thousands of requests.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self._strangers.keep(self, self._close_if_idle)
        else:
            self.transport.abort()

    def _admit(self) -> None:
        """Note that the client has presented its key."""
        self._strangers.remove(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol.connection_lost`."""
        self._strangers.remove(self)
        cycle = self.cycle
        # The operating system resets the connection of a client that closes it with unread data.
        is_reset = exc is not None
        super().connection_lost(exc)
        if cycle is None or (cycle.response_complete and not is_reset):
            return
        # the handler of the request has the same state
        state = cycle.scope["state"]
        state["is_cut"] = True
        if (on_cut := state.get("on_cut")) is not None:
            on_cut()


def call_if_cut(request: Request, function: Callable[[], None]) -> None:
    """Call a function once if the client disconnects before it has received the whole response.

    A client that reads the whole response from its connection has received it. If the client asks
    for `Connection: close`, a short response counts as received as soon as it has been sent.
    """
    if getattr(request.state, "is_cut", False):
        function()
    else:
        request.state.on_cut = function


def make_connection_class(strangers: StrangerConnections) -> type[asyncio.Protocol]:
    """Return the value of uvicorn's setting `http` for a server with these strangers."""
    return cast(type[asyncio.Protocol], functools.partial(ClientConnection, strangers=strangers))


def admit_client(request: Request) -> None:
    """Keep the connection of a request open, because the client has presented its key."""
    admit: Callable[[], None] | None = getattr(request.state, "admit", None)
    if admit is not None:
        admit()
