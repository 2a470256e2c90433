"""Servers killed in the middle of a run, which ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults import GROUPS, random_faults, run_disturbed
from benchmarks.runs import Finished, checkpoint_differences, repeatable
from tests.system.conftest import ADAPTIVE

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

STEPS = 12
SEED = 0


def test_a_run_whose_critic_and_reward_replicas_are_killed_ends_with_the_same_weights(
    undisturbed: Finished, tmp_path: Path
) -> None:
    faults = random_faults(SEED, GROUPS["all"], STEPS, step_s=0.4)
    overrides = (f"run.stop_after={STEPS}", "checkpoint.every=6", "reward.replicas=2", "logging.tensorboard=false", *ADAPTIVE)
    disturbed = run_disturbed(tmp_path / "run", faults, *overrides)
    run = disturbed.run
    assert run.code == 0, run.report()
    assert disturbed.restarts == len(faults), run.report()
    assert repeatable(run.metrics) == repeatable(undisturbed.metrics[:STEPS])
    assert checkpoint_differences(undisturbed.paths, run.paths, STEPS) == []
