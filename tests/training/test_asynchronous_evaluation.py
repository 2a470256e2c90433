"""Test that asynchronous evaluations write the same scores and checkpoints as synchronous ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aligner.observability.metrics import read_metrics
from aligner.paths import RunPaths
from tests.training import loop_jobs
from tests.worker_pool import WorkerPool

KLS = [0.0] * 10
SCORES = [0.1, 0.2, 0.3, 0.8, 0.4, 0.9, 0.5, 0.6, 0.7, 0.6, 0.3]
"""Scores by step; the loop evaluates steps 0, 3, 6, 9 and 10, and each step with a checkpoint."""


def scripted(
    pool: WorkerPool, root: Path, told_after: int | None = None, *, beside: bool, **more: Any
) -> None:
    run = {"resume": "auto"}
    one, other = pool.run(
        loop_jobs.scripted, 2, str(root), KLS, SCORES, told_after, run, beside=beside, **more
    )
    assert one == other


def scores(root: Path) -> dict[int, float]:
    """Return the scores in the metrics, by step."""
    return {
        int(step["step"]): step["eval/score"]
        for step in read_metrics(RunPaths(root).metrics)
        if "eval/score" in step
    }


def checkpoints(root: Path) -> dict[int, tuple[float | None, bool]]:
    """Return the metric of each checkpoint, and whether its evaluation is missing, by step."""
    manifests = [
        json.loads(file.read_text()) for file in (root / "checkpoints").glob("step_*/manifest.json")
    ]
    return {
        manifest["state"]["step"]: (
            None if manifest["metric"] is None else manifest["metric"]["value"],
            manifest["state"]["owes_evaluation"],
        )
        for manifest in manifests
    }


@pytest.mark.parametrize("asynchronous", [True, False], ids=["written-beside", "written-at-once"])
@pytest.mark.parametrize("stop", [None, 3, 4])
def test_asynchronous_run_equals_synchronous_run(
    pool: WorkerPool, tmp_path: Path, stop: int | None, asynchronous: bool
) -> None:
    settings = {"every": 3, "keep": 1, "asynchronous": asynchronous}
    for name in ("beside", "waiting"):
        if stop is not None:
            scripted(pool, tmp_path / name, stop, beside=name == "beside", **settings)
        scripted(pool, tmp_path / name, beside=name == "beside", **settings)
    assert scores(tmp_path / "beside") == scores(tmp_path / "waiting")
    assert {0: 0.1, 3: 0.8, 6: 0.5, 9: 0.6, 10: 0.3}.items() <= scores(tmp_path / "beside").items()
    assert (
        checkpoints(tmp_path / "beside")
        == checkpoints(tmp_path / "waiting")
        == {
            3: (0.8, False),
            10: (0.3, False),
        }
    )


def test_resume_runs_missing_evaluation(pool: WorkerPool, tmp_path: Path) -> None:
    settings = {"every": 3, "keep": 5, "asynchronous": False}
    # The run crashes in step 4, which has no scripted KL.
    with pytest.raises(Exception, match="list index out of range"):
        pool.run(
            loop_jobs.scripted,
            2,
            str(tmp_path),
            KLS[:3],
            SCORES,
            None,
            {"steps": 10},
            beside=True,
            **settings,
        )
    assert scores(tmp_path) == {0: 0.1} and checkpoints(tmp_path) == {3: (None, True)}
    scripted(pool, tmp_path, beside=True, **settings)
    assert scores(tmp_path) == {0: 0.1, 3: 0.8, 6: 0.5, 9: 0.6, 10: 0.3}
    assert checkpoints(tmp_path) == {
        3: (0.8, False),
        6: (0.5, False),
        9: (0.6, False),
        10: (0.3, False),
    }
