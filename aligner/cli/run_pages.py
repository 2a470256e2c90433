"""`aligner view` and `aligner report`: web pages of runs."""

import argparse
import contextlib
import secrets
import socket
from pathlib import Path

from aligner.errors import ConfigError
from aligner.view.rendering import require_packages
from aligner.view.saved_page import write_report

_RUNS = Path("runs")


def view(parsed: argparse.Namespace) -> None:
    """Print the address, and serve the pages of the runs in the given directories until Ctrl-C.

    Raises:
        ConfigError: A directory does not exist, or the port is not available.
    """
    require_packages("aligner view")
    if missing := [directory for directory in parsed.directories if not directory.is_dir()]:
        raise ConfigError(
            f"{missing[0]}: no such directory; give run directories or directories that contain"
            f" runs (default: ./{_RUNS})"
        )
    from aligner.view.web_server import HOST, serve

    try:
        listening = socket.create_server((HOST, parsed.port))
    except OSError as error:
        raise ConfigError(
            f"--port {parsed.port}: {error.strerror}; give another port, or omit --port to use a"
            " free port"
        ) from error
    access_key = secrets.token_urlsafe(24)
    with contextlib.suppress(KeyboardInterrupt), listening:
        print(f"http://{HOST}:{listening.getsockname()[1]}/?key={access_key}", flush=True)
        serve(parsed.directories or [_RUNS], access_key, listening)


def report(parsed: argparse.Namespace) -> None:
    """Write the page of a run to a file, and print the path of the file."""
    print(write_report(parsed.run_directory, parsed.output))
