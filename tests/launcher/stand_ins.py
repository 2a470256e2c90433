"""Stand-ins for Slurm's commands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def stand_in(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """A command of Slurm's that answers as the real one does when its controller, or a queue, has
    had enough."""
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
