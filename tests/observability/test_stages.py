"""Messages about long stages at the start of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from aligner.config.compose import compose_config
from aligner.observability.timeline import StageWatch, delete_stages, report_phase, report_stage
from aligner.paths import get_run_paths


def test_long_stage_is_reported_once_with_its_duration(tmp_path: Path) -> None:
    config = compose_config(["experiment=tiny_ppo", f"run.dir={tmp_path}"])
    messages: list[str] = []
    now = [0.0]
    watch = StageWatch(get_run_paths(config), messages.append, lambda: now[0])
    report_stage(config, "critic", "starting Triton")
    report_stage(config, "trainer", "reading the data")
    watch.poll()
    now[0] = 1.0
    report_phase(config, "generate")  # the stage before was too short to be reported
    watch.poll()
    assert messages == []
    now[0] = 3.5
    watch.poll()
    watch.poll()
    assert messages == ["critic: starting Triton …", "trainer: generating the first samples …"]
    now[0] = 9.0
    report_stage(config, "critic", None)
    watch.poll()
    assert messages[2:] == ["critic: starting Triton took 9 s"]
    delete_stages(get_run_paths(config))
    watch.poll()
    assert messages[3:] == ["trainer: generating the first samples took 8 s"]


def test_rank_1_reports_no_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    report_stage(
        compose_config(["experiment=tiny_ppo", f"run.dir={tmp_path}"]),
        "trainer",
        "reading the data",
    )
    assert not list(tmp_path.iterdir())
