"""How the command tells a person that it did not do what was asked."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from aligner.observability.logs import REPORTED


def print_error(message: str) -> None:
    """Tell of an error on standard error, in red on a terminal."""
    colored = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    before, after = ("\033[31m", "\033[0m") if colored else ("", "")
    with suppress(OSError):  # the log's disk may be full; the exit code says the rest
        print(f"{before}{REPORTED} {message}{after}", file=sys.stderr, flush=True)
