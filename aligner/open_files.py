"""The limit of open files of this process, and the connections of clients without a key."""

import asyncio
import itertools
import logging
import resource
from collections.abc import Callable, Hashable

_log = logging.getLogger(__name__)

OTHER_FILES = 256
"""Number of open files that are reserved for everything except the connections of clients."""
KEY_TIMEOUT_S = 15.0
"""Maximum time in seconds until the client of a connection presents a key."""
MAX_STRANGERS = 1024
"""Maximum number of connections without a key, however high the limit of open files is."""
# Connections that are closed for a new one if there are too many: two, so that the number falls
# after it exceeded the limit, and an addition takes constant time.
_MAX_CLOSED = 2


def raise_open_file_limit() -> int:
    """Raise the limit of open files to the maximum that the system permits; return it.

    Processes that are started afterwards inherit the limit.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit != hard_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    return hard_limit


def warn_if_too_few_files(connections: int, reason: str) -> None:
    """Log a warning if the limit of open files is too low for some connections.

    Args:
        connections: Number of connections at the same time.
        reason: The settings that cause this number, for the message.
    """
    limit = raise_open_file_limit()
    needed = connections + OTHER_FILES
    if limit != resource.RLIM_INFINITY and limit < needed:
        _log.warning(
            "%s may need %d open files, but the hard limit of this process is %d; requests may"
            " wait or fail; raise the limit (ulimit -Hn, in Docker --ulimit nofile=%d)",
            reason,
            needed,
            limit,
            needed,
        )


class StrangerConnections:
    """Open connections of a server whose clients have not presented a key yet.

    Other users can open any number of connections. Without a limit, they would take all open files
    of the process, so that it could not accept the connections of its own clients. A connection is
    closed if its client presents no key in time. If there are too many, the oldest one is closed.

    The object belongs to the asyncio loop of the server.
    """

    def __init__(self, limit: int | None = None, timeout_s: float = KEY_TIMEOUT_S) -> None:
        """Create the object without any connection.

        Args:
            limit: Maximum number of connections; None means an eighth of the limit of open files.
            timeout_s: Maximum time in seconds until a client presents a key.
        """
        self._limit = share_open_files(8) if limit is None else limit
        self._timeout_s = timeout_s
        # Functions that close the connections, and their timers, in the order of their arrival.
        self._connections: dict[Hashable, tuple[Callable[[], None], asyncio.TimerHandle]] = {}

    def add(self, connection: Hashable, close: Callable[[], None]) -> None:
        """Add a new connection.

        Args:
            connection: The connection, as in the other methods.
            close: Closes the connection, or calls `keep`. It may call `remove`.
        """
        excess = max(0, len(self._connections) + 1 - self._limit)
        # The list is complete before `keep` moves connections to the end.
        for oldest in list(itertools.islice(self._connections, min(excess, _MAX_CLOSED))):
            self._close(oldest)
        self.keep(connection, close)

    def keep(self, connection: Hashable, close: Callable[[], None]) -> None:
        """Give a connection the whole time again, whatever the number of connections is.

        Args:
            connection: See `add`.
            close: See `add`.
        """
        self.remove(connection)
        timer = asyncio.get_running_loop().call_later(self._timeout_s, self._close, connection)
        self._connections[connection] = (close, timer)

    def remove(self, connection: Hashable) -> None:
        """Remove a connection whose client has presented a key, or which has been closed."""
        _, timer = self._connections.pop(connection, (None, None))
        if timer is not None:
            timer.cancel()

    def _close(self, connection: Hashable) -> None:
        close, timer = self._connections.pop(connection)
        timer.cancel()
        close()


def share_open_files(divisor: int, maximum: int = MAX_STRANGERS) -> int:
    """Raise the limit of open files, and return a part of it for one kind of connections.

    Args:
        divisor: The limit without the reserved files is divided by this number.
        maximum: Maximum of the result, however high the limit is.
    """
    limit = raise_open_file_limit()
    if limit == resource.RLIM_INFINITY:
        return maximum
    reserved = min(OTHER_FILES, limit // 2)
    return max(1, min(maximum, (limit - reserved) // divisor))
