"""Test of a complete run in a container whose root is read-only, which is Pyxis' default."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.read_only_root import run_with_read_only_root

pytestmark = pytest.mark.slow


def test_run_works_with_read_only_root(tmp_path: Path) -> None:
    run = tmp_path / "run"
    launch = [sys.executable, "-m", "aligner", "launch", "experiment=tiny_ppo", f"run.dir={run}"]
    settings = ["run.steps=2", "logging.wandb.enabled=true", "logging.mlflow.enabled=true"]
    result = run_with_read_only_root(
        [*launch, *settings], tmp_path, {"ALIGNER_CACHE": str(tmp_path / "cache")}, timeout_s=250
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    logs = {file.name: file.read_text() for file in (run / "logs").iterdir()}
    assert "reward-0.log" in logs and "critic-0.log" in logs
    assert not [name for name, text in logs.items() if "read-only file system" in text.lower()]
    assert "restarting" not in result.stdout + result.stderr
