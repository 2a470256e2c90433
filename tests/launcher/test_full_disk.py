"""Tests of the launcher's error when the disk is too full for the log of a rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.test_launch import finish, start
from tests.small_disk import small_disk


@pytest.mark.slow
def test_full_disk_is_named_and_run_can_resume(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        run = disk.directory / "run"
        code, _, error = finish(start(run, {"trainer": "fill_disk"}), run)
        assert code == 1
        assert error.startswith("trainer rank 0 exited with code 1")
        full = f"the disk is full: no space left on device for {run}: 0 bytes of 1048576 are free"
        assert full in error.splitlines()[0]
        assert "Traceback" not in error
        (run / "large").unlink()
        code, _, error = finish(start(run, None, "run.resume=auto"), run)
        assert code == 0, error
