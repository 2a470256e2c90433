"""Commands that run as another user of the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

UID = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def succeeds(*command: str) -> bool:
    """Whether a command of the other user succeeds."""
    done = subprocess.run(
        command,
        user=UID,
        group=UID,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        timeout=30,
        check=False,
    )
    return done.returncode == 0


def connects(address: str, port: int) -> bool:
    """Whether the other user can connect to a port."""
    return succeeds("timeout", "2", "bash", "-c", f"exec 3<>/dev/tcp/{address}/{port}")


@contextmanager
def open_directory() -> Iterator[Path]:
    """Create a directory that all users may read, unlike those of pytest."""
    directory = Path(tempfile.mkdtemp())
    try:
        directory.chmod(0o755)
        yield directory
    finally:
        shutil.rmtree(directory)
