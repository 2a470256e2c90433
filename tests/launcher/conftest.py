"""Fixtures of the launcher's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A path for a run directory; processes of the run that outlive the test are killed."""
    from tests.launcher.test_launch import processes_of

    directory = tmp_path / "run"
    yield directory
    for process in processes_of(directory):
        process.kill()
