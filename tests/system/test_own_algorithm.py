"""Tests of the custom estimator, loss and selection that docs/algorithms.md shows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.runs import REPOSITORY, Launch, checkpoint_differences, repeatable, run_to_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

MODULE = "own_algorithm"
SETTINGS = (
    *(
        "algorithm=grpo",
        f"algorithm.advantage={MODULE}:rare_successes",
        f"algorithm.loss={MODULE}:soft_clip",
    ),
    *(f"algorithm.train_on={MODULE}:undecided", "run.steps=4", "run.name=own"),
    *(
        "actor.optimizer.warmup_steps=2",
        "checkpoint.every=2",
        "checkpoint.keep=4",
        "logging.tensorboard=false",
    ),
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The working directory of the runs, which contains the module of the example."""
    page = (REPOSITORY / "docs" / "algorithms.md").read_text()
    (tmp_path / f"{MODULE}.py").write_text(page.split("```python\n")[1].split("```")[0])
    return tmp_path


@pytest.mark.promise("user-algorithm-trains-and-resumes")
def test_resumed_user_algorithm_equals_undisturbed(
    place: Path,
) -> None:
    whole = run_to_end(place / "whole", *SETTINGS)
    assert [step["step"] for step in whole.metrics] == [1, 2, 3, 4]
    for step in whole.metrics:
        assert step["policy/grad_norm"] > 0 and 0 <= step["policy/far_fraction"] <= 1
    shutil.copytree(
        whole.paths.root, place / "parts", ignore=shutil.ignore_patterns("step_4", "logs")
    )
    resumed = run_to_end(place / "parts", *SETTINGS, "run.resume=true")
    # Repeated steps differ in their times.
    done_again = [got != before for got, before in zip(resumed.metrics, whole.metrics, strict=True)]
    assert done_again == [False, False, True, True]
    assert repeatable(resumed.metrics) == repeatable(whole.metrics)
    assert checkpoint_differences(whole.paths, resumed.paths, 4) == []


def test_missing_loss_function_is_refused_at_launch(place: Path) -> None:
    with Launch(
        place / "run",
        "algorithm=grpo",
        f"algorithm.loss={MODULE}:hard_clip",
        "rollout.samples_per_prompt=4",
    ) as launch:
        finished = launch.finish(60)
    assert finished.code == 2
    assert (
        f"algorithm.loss={MODULE}:hard_clip" in finished.error and "or PYTHONPATH" in finished.error
    )
    assert not (finished.paths.root / "logs" / "trainer-0.log").exists()


def test_failing_loss_function_is_named_in_error(place: Path) -> None:
    (place / "broken.py").write_text(
        "def loss(logprobs, rows, context):\n    raise RuntimeError('no such luck')\n"
    )
    with Launch(
        place / "run",
        "algorithm=grpo",
        "algorithm.loss=broken:loss",
        "rollout.samples_per_prompt=4",
    ) as launch:
        finished = launch.finish(120)
    assert finished.code == 1
    assert (
        "algorithm.loss=broken:loss: the function raised RuntimeError: no such luck"
        in finished.error
    )
    assert 'broken.py", line 2' in (finished.paths.root / "logs" / "trainer-0.log").read_text()
