"""Serve a stored model with `aligner serve-model` during a test."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def served(model: Path, *options: str) -> Iterator[str]:
    """Yield the base URL for OpenAI clients, which need no key.

    Afterwards, SIGTERM must stop the command with exit code 0, and its log must contain only notes.
    """
    command = [sys.executable, "-m", "aligner", "serve-model", str(model), "--precision", "fp32"]
    command += ["--no-key", *options]
    with (
        tempfile.TemporaryFile("w+") as error,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=error, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url, "it has not begun to serve"
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            ended = process.wait(30)
        error.seek(0)
        assert [line for line in error if not line.startswith("aligner: note: ")] == []
        assert ended == 0
