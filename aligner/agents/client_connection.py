"""Connections of the model server, which notice that a client did not receive a response."""

from collections.abc import Callable

from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

# Entries of the ASGI scope of a request, which the connection and the request handler share.
_IS_CUT = "aligner.is_cut"
_ON_CUT = "aligner.on_cut"


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
        cycle.scope[_IS_CUT] = True  # type: ignore[typeddict-unknown-key]
        on_cut = cycle.scope.get(_ON_CUT)
        if callable(on_cut):
            on_cut()


def call_if_cut(request: Request, function: Callable[[], None]) -> None:
    """Call a function once if the client disconnects before it has received the whole response.

    A client that reads the whole response from its connection has received it. If the client asks
    for `Connection: close`, a short response counts as received as soon as it has been sent.
    """
    if request.scope.get(_IS_CUT):
        function()
    else:
        request.scope[_ON_CUT] = function
