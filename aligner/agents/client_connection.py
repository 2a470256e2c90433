"""Connections of the model server, which notice that a client did not receive a response."""

from collections.abc import Callable

from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol


class ClientConnection(H11Protocol):
    """A connection whose end is reported if its last response was cut."""

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol.connection_lost`."""
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
