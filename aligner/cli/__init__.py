"""The `aligner` command. Nothing heavy is imported before it is known to be needed."""

import argparse
import atexit
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from aligner.cli.command_table import COMMANDS, parse_arguments
from aligner.errors import AlignerError, Interrupted, Stopped, exit_code
from aligner.files import full_disk
from aligner.launcher.exhausted_resources import exhausted_resources, full_shared_memory
from aligner.launcher.rank_heartbeat import start_heartbeat
from aligner.observability.logs import REPORTED, log_failure


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    start_heartbeat()
    parsed, ended_by = parse_arguments(arguments), None
    # A user's modules are looked for in the working directory too, as the ranks' `python -m` does
    # by itself.
    if "" not in sys.path:
        sys.path.append("")
    try:
        COMMANDS[parsed.command].run(parsed)
    except (Exception, KeyboardInterrupt) as error:
        _report(error, parsed)
        ended_by = error
    code = exit_code(ended_by)
    if "RANK" in os.environ and (code or parsed.command == "serve"):
        # A failed rank must be seen to fail: interpreter shutdown can wait forever for a peer or a
        # server's threads. And a server has ended in order by now: what is left of it is a second's
        # work for nobody.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # the log's disk may be full
                stream.flush()
        os._exit(code)
    sys.exit(code)


def run() -> NoReturn:
    """`main`, as all that this process is for.

    Python's own end would then take apart all that was imported, which takes most of a second of
    torch: what it does before that for threads and handlers is done here.
    """
    try:
        main()
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        with suppress(OSError, ValueError):  # Python's own end has words and a code for it
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
        raise


def _report(error: BaseException, parsed: argparse.Namespace) -> None:
    """Tell why the command ends: in a rank's log in its format, elsewhere on standard error."""
    if isinstance(error, Interrupted | Stopped):  # told by the launcher
        return
    if isinstance(error, KeyboardInterrupt):
        output = getattr(parsed, "output", None)
        _print_error("interrupted" if output is None else f"interrupted; {output} was not written")
        return
    message = str(error) if isinstance(error, AlignerError) else _exhausted(error)
    if log_failure(error, message):
        return
    if message is None:
        traceback.print_exception(error)
    else:
        _print_error(message)


def _exhausted(error: BaseException) -> str | None:
    """Return the message of an error that says that a resource of the machine is exhausted, None
    for any other error."""
    if (message := full_shared_memory(error) or full_disk(error)) is not None:
        return message
    # In a rank the traceback is worth more, and the launcher names the resource.
    if "RANK" in os.environ or not isinstance(error, OSError | MemoryError):
        return None
    what = "a Python object" if isinstance(error, MemoryError) else str(error)
    sentences = exhausted_resources([f"{type(error).__name__}: {error}"])
    return "; ".join([what, *sentences]) if sentences else None


def _print_error(message: str) -> None:
    """In red on a terminal."""
    colored = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    before, after = ("\033[31m", "\033[0m") if colored else ("", "")
    with suppress(OSError):  # the log's disk may be full; the exit code says the rest
        print(f"{before}{REPORTED} {message}{after}", file=sys.stderr, flush=True)
