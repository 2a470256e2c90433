"""A control group with little memory for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aligner.launcher import exhausted_resources


@contextmanager
def small_group(memory_bytes: int) -> Iterator[Path]:
    """Create a control group with a limit of memory; skip the test if that is not possible."""
    parent = next(exhausted_resources._memory_groups(), Path("/nowhere"))
    group = parent / f"aligner-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be created here: {error}")
    try:
        is_version_2 = (group / "memory.max").exists()
        limit = group / ("memory.max" if is_version_2 else "memory.limit_in_bytes")
        try:
            limit.write_text(str(memory_bytes))
        except OSError as error:
            pytest.skip(f"a control group cannot be limited here: {error}")
        yield group
    finally:
        group.rmdir()
