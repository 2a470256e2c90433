"""The command `serve-sandboxes`."""

import argparse
import contextlib
import os
import signal

from aligner.errors import ConfigError
from aligner.extras import describe_missing_modules


def serve_sandboxes(parsed: argparse.Namespace) -> None:
    """Print the address of a server of sandboxes, and serve there until Ctrl-C."""
    if lack := describe_missing_modules("agents"):
        raise ConfigError(f"aligner serve-sandboxes: {lack}")
    # these modules require the extra `agents`
    from aligner.agents.sandboxes.remote_sandbox import API_KEY_VARIABLE
    from aligner.agents.sandboxes.sandbox_server import SandboxServer

    api_key = os.environ.get(API_KEY_VARIABLE)
    if not api_key:
        raise ConfigError(
            f"{API_KEY_VARIABLE}: not set; set this environment variable to a secret key, here and"
            " for the run"
        )
    server = SandboxServer(parsed.host, parsed.port, api_key, parsed.max_sandboxes)
    print(server.url, flush=True)
    # handle SIGTERM like Ctrl-C, which ends the server and its sandboxes
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
