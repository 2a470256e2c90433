"""Stand-ins for Slurm's commands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def stand_in(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """Put a script in place of a Slurm command, for example one that fails like a busy controller.

    Args:
        directory: Directory of the script, which is added to PATH.
        monkeypatch: Restores PATH after the test.
        name: Name of the Slurm command.
        script: Shell code that the command runs.
    """
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
