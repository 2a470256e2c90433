"""The `aligner` command: parse the command line, run the command, and report errors.

Modules with slow imports are imported only by the commands that need them.
"""

import argparse
import atexit
import logging
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from aligner.cli.command_table import COMMANDS, parse_arguments
from aligner.errors import AlignerError, Interrupted, Stopped, get_exit_code
from aligner.files import describe_full_disk
from aligner.launcher.exhausted_resources import exhausted_resources, full_shared_memory
from aligner.launcher.rank_heartbeat import start_heartbeat
from aligner.masking import mask_secrets
from aligner.observability.logs import ERROR_PREFIX, log_failure
from aligner.paths import redirect_library_caches
from aligner.terminal import TerminalFormatter, escape_controls, print_text


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, and exit with its exit code.

    Args:
        arguments: Arguments after `aligner`; None uses the arguments of this process.
    """
    start_heartbeat()
    redirect_library_caches()
    parsed = parse_arguments(arguments)
    error_at_end = None
    # Commands print the warnings of all modules with this handler. Ranks have their own.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(TerminalFormatter())
    # Find the user's modules in the working directory. In the ranks, `python -m` has already added
    # it.
    if "" not in sys.path:
        sys.path.append("")
    try:
        COMMANDS[parsed.command].run(parsed)
    except (Exception, KeyboardInterrupt) as error:
        _report_error(error, parsed)
        error_at_end = error
    code = get_exit_code(error_at_end)
    if "RANK" in os.environ and (code or parsed.command == "serve"):
        # Skip the interpreter shutdown. It can wait forever for a peer or for threads of a server,
        # and the launcher would not detect the failure. A server has already drained its requests
        # here, so a clean-up of its objects is unnecessary.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # the log's disk may be full
                stream.flush()
        os._exit(code)
    sys.exit(code)


def run() -> NoReturn:
    """Run `main` as the only task of this process, and skip most of the interpreter's shutdown.

    The shutdown destroys all imported modules, which takes most of a second with torch. This
    function itself waits for threads and runs the exit handlers, like the interpreter before it
    destroys the modules.
    """
    try:
        main()
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        # If a stream cannot be flushed, the regular shutdown reports this with its own exit code.
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
        raise


def _report_error(error: BaseException, parsed: argparse.Namespace) -> None:
    """Report the error of a failed command in a rank's log or on standard error."""
    if isinstance(error, Interrupted | Stopped):  # the launcher has reported it
        return
    if isinstance(error, KeyboardInterrupt):
        output = getattr(parsed, "output", None)
        _print_error("interrupted" if output is None else f"interrupted; {output} was not written")
        return
    message = str(error) if isinstance(error, AlignerError) else _describe_exhausted_resource(error)
    if log_failure(error, message):
        return
    if message is None:
        text = "".join(traceback.format_exception(error))
        print(escape_controls(mask_secrets(text)), end="", file=sys.stderr)
    else:
        _print_error(message)


def _describe_exhausted_resource(error: BaseException) -> str | None:
    """Return the message for an error caused by an exhausted resource of the machine.

    The result is None for any other error.
    """
    if (message := full_shared_memory(error) or describe_full_disk(error)) is not None:
        return message
    # In a rank, the traceback is more useful, and the launcher names the resource.
    if "RANK" in os.environ or not isinstance(error, OSError | MemoryError):
        return None
    cause = "a Python object" if isinstance(error, MemoryError) else str(error)
    sentences = exhausted_resources([f"{type(error).__name__}: {error}"])
    return "; ".join([cause, *sentences]) if sentences else None


def _print_error(message: str) -> None:
    """Print an error on standard error, in red on a terminal or with FORCE_COLOR."""
    # The launcher finds the error in a rank's log by its prefix, so a rank never colors it.
    is_forced = bool(os.environ.get("FORCE_COLOR")) and "RANK" not in os.environ
    colored = (sys.stderr.isatty() or is_forced) and not os.environ.get("NO_COLOR")
    with suppress(OSError):  # the log's disk may be full; the exit code still reports the error
        print_text(f"{ERROR_PREFIX} {message}", sys.stderr, style="\033[31m" if colored else "")
