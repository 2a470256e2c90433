"""Test of complete runs with `engine.publish=changes`, which sends only changed elements."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults import BESIDE
from benchmarks.runs import Launch, repeatable, run_to_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OVERRIDES = (
    *BESIDE,
    "engine.precision=bf16",
    "actor.optimizer.learning_rate=1e-4",
    "run.steps=8",
    "logging.tensorboard=false",
)


def without_publish(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {key: value for key, value in step.items() if not key.startswith("publish/")}
        for step in repeatable(metrics)
    ]


@pytest.mark.promise("delta-publish-is-lossless")
def test_delta_weight_sync_equals_full_weight_sync(
    tmp_path: Path,
) -> None:
    whole = run_to_end(tmp_path / "whole", *OVERRIDES)
    assert whole.code == 0, whole.report()
    with Launch(tmp_path / "changes", *OVERRIDES, "engine.publish=changes") as launch:
        launch.wait_for_step(3, timeout_s=300)
        launch.rank("generator", 0).kill()
        run = launch.finish(300)
    assert run.code == 0, run.report()
    assert without_publish(run.metrics) == without_publish(whole.metrics)
    shares = [
        (step["publish/share"], step.get("publish/changed"))
        for step in run.metrics
        if "publish/share" in step
    ]
    assert any(changed is not None and changed < 0.5 and share < 1 for share, changed in shares), (
        shares
    )
    assert any(changed is None and share == 1 for share, changed in shares), (
        "to a generator that has started"
    )
