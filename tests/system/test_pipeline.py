"""The engine as a role of its own, which draws samples while steps train."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.runs import checkpoint_differences, repeatable, run_to_end

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


def test_a_run_with_samples_ahead_is_resumed_with_the_same_ones(tmp_path: Path) -> None:
    """Samples one version old, of two ranks that train and one that generates."""
    overrides = ("algorithm=ppo_decoupled", "engine.placement=server", "rollout.max_staleness=1", "run.stop_after=4")
    overrides += ("actor.parallel.data=2", "engine.parallel.data=1", "checkpoint.every=2")
    whole = run_to_end(tmp_path / "whole", *overrides)
    assert [step["staleness/max"] for step in whole.metrics] == [0, 1, 1, 1]
    assert [step["staleness/mean"] for step in whole.metrics] == [0, 1, 1, 1]
    killed = tmp_path / "killed" / "whole"  # the same run.name: checkpoints hold it
    shutil.copytree(whole.paths.root, killed, ignore=shutil.ignore_patterns("step_4", "logs"))
    resumed = run_to_end(killed, *overrides, "run.resume=true")
    assert repeatable(resumed.metrics) == repeatable(whole.metrics)
    assert checkpoint_differences(whole.paths, resumed.paths, 4) == []
