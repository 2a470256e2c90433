"""What the launcher says when the disk is too full for a rank's own last words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.test_launch import finish, start
from tests.small_disk import small_disk


@pytest.mark.slow
def test_a_rank_that_could_not_write_why_it_ended_is_told_with_the_full_disk(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        run = disk.directory / "run"
        code, _, error = finish(start(run, {"trainer": "fill_disk"}), run)
        assert code == 1
        assert error.startswith("trainer rank 0 exited with code 1")
        assert f"no space left on device for {run}: 0 bytes of 1048576 are free" in error
        assert "Traceback" not in error
        (run / "large").unlink()
        code, _, error = finish(start(run, None, "run.resume=auto"), run)
        assert code == 0, error
