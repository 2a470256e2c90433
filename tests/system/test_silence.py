"""Processes that are stopped in the middle of a run: noticed, replaced, and of no consequence."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.runs import Launch, checkpoint_differences, repeatable, run_to_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 10


def test_a_stopped_replica_and_a_stopped_critic_are_replaced_and_the_run_ends_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    common = (
        *(f"run.stop_after={STEPS}", f"checkpoint.every={STEPS}", "logging.tensorboard=false", "run.name=run"),
        *("reward.replicas=2", "critic.parallel.data=2", "server.health_timeout_s=10"),
    )
    expected = run_to_end(tmp_path / "undisturbed", *common)
    with Launch(tmp_path / "run", *common) as launch:
        launch.wait_for_step(2)
        launch.rank("reward", 0).suspend()
        launch.wait_for_step(4)
        launch.rank("critic", 0).suspend()
        run = launch.finish(300)
    assert run.code == 0, run.report()
    for group in ("reward", "critic"):
        silent = f"{group} rank 0 showed no life for 10 s (server.health_timeout_s) and was killed"
        assert f"{silent}; starting {group} again (1 of 3)" in run.out, run.out
    assert repeatable(run.metrics) == repeatable(expected.metrics)
    assert not checkpoint_differences(expected.paths, run.paths, STEPS)
