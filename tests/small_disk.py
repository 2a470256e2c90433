"""A small disk for tests: a tmpfs that can be enlarged while it is in use."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted tmpfs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def enlarge(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.directory)], check=True)


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[SmallDisk]:
    """Mount a tmpfs at a new directory; skip the test if mounting is not permitted."""
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(directory)
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
