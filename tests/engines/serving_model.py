"""A stored model that `aligner serve-model` serves meanwhile."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def served(model: Path) -> Iterator[str]:
    """Its address, as OpenAI clients have it; the command is told to end, and must end well."""
    command = [sys.executable, "-m", "aligner", "serve-model", str(model), "--precision", "fp32"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url, "it has not begun to serve"
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            ended = process.wait(30)
    assert ended == 0
