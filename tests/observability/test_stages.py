from __future__ import annotations

from pathlib import Path

import pytest

from aligner.config.compose import compose_config
from aligner.observability.stages import StageWatch, forget_stages, tell_phase, tell_stage
from aligner.paths import run_paths


def test_what_takes_long_is_told_once_and_then_how_long_it_took(tmp_path: Path) -> None:
    config = compose_config(["experiment=tiny_ppo", f"run.dir={tmp_path}"])
    told: list[str] = []
    now = [0.0]
    watch = StageWatch(run_paths(config), told.append, lambda: now[0])
    tell_stage(config, "critic", "starting Triton")
    tell_stage(config, "trainer", "reading the data")
    watch.poll()
    now[0] = 1.0
    tell_phase(config, "generate")  # so soon that the data need no word
    watch.poll()
    assert told == []
    now[0] = 3.5
    watch.poll()
    watch.poll()
    assert told == ["critic: starting Triton …", "trainer: generating the first samples …"]
    now[0] = 9.0
    tell_stage(config, "critic", None)
    watch.poll()
    assert told[2:] == ["critic: starting Triton took 9 s"]
    forget_stages(run_paths(config))
    watch.poll()
    assert told[3:] == ["trainer: generating the first samples took 8 s"]


def test_only_the_first_rank_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    tell_stage(
        compose_config(["experiment=tiny_ppo", f"run.dir={tmp_path}"]),
        "trainer",
        "reading the data",
    )
    assert not list(tmp_path.iterdir())
