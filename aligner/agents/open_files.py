"""The limit of open files of this process, which limits its network connections."""

import logging
import resource

_log = logging.getLogger(__name__)

OTHER_FILES = 256
"""Number of open files that are reserved for everything except the connections of clients."""


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
