"""What the tests of the launcher share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run directory to be; what was started for it, and is left, is killed."""
    from tests.launcher.test_launch import processes_of

    directory = tmp_path / "run"
    yield directory
    for process in processes_of(directory):
        process.kill()
