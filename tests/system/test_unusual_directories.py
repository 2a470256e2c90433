"""Test of a complete run below directories whose names have spaces and unusual characters."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.runs import run_to_end

pytestmark = pytest.mark.slow


@pytest.mark.promise("unusual-directories")
def test_run_works_below_unusual_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "ho me's ü"
    working = tmp_path / "a b'c\"d#e%f,g:h=ü$x{y}[z]&;~(1) é"
    home.mkdir()
    working.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("PYTRITON_HOME", raising=False)
    run = run_to_end(working / "run 1, #2", "run.steps=2", "checkpoint.every=1")
    assert len(run.metrics) == 2
    assert "restarting" not in run.out
    again = run_to_end(
        working / "run 1, #2", "run.steps=3", "checkpoint.every=1", "run.resume=auto"
    )
    assert [step["step"] for step in again.metrics] == [1, 2, 3]
