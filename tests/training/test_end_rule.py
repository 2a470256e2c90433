"""Test the criteria that end a run before its last step, with and without resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from aligner.errors import AlignerError
from aligner.observability.metrics import read_metrics
from aligner.paths import RunPaths, read_early_end
from aligner.schema import CheckpointConfig, Config, RunConfig
from aligner.training.end_rule import EndRule
from tests.training import loop_jobs
from tests.worker_pool import WorkerPool

KL = "kl/reference"


def test_run_without_end_keys_has_no_end_rule() -> None:
    assert (
        EndRule.from_config(Config(checkpoint=CheckpointConfig(best_metric="eval/score"))) is None
    )


def test_end_rule_is_built_from_the_keys() -> None:
    run, kept = (
        RunConfig(end_at="eval/score/a:b:-0.5", end_without_gain=2),
        CheckpointConfig(best_metric="eval/loss"),
    )
    assert EndRule.from_config(Config(run=run, checkpoint=kept)) == EndRule(
        None, ("eval/score/a:b", -0.5), 2, "eval/loss"
    )
    assert EndRule.from_config(Config(run=RunConfig(end_kl=0.5))) == EndRule(max_kl=0.5)


@pytest.mark.parametrize(
    ("found", "ends"), [({KL: 0.5}, False), ({KL: 0.51}, True), ({KL: -9.0}, False), ({}, False)]
)
def test_kl_above_the_bound_ends_the_run(found: dict[str, float], ends: bool) -> None:
    reason = EndRule(max_kl=0.5).find_end_reason(found, [])
    assert reason == ("kl/reference 0.51 is above run.end_kl=0.5" if ends else None)


@pytest.mark.parametrize(
    ("metric", "value", "ends"),
    [
        ("eval/score", 0.89, False),
        ("eval/score", 0.9, True),
        ("eval/score", 7.0, True),
        ("eval/loss", 0.91, False),
        ("eval/loss", 0.9, True),
        ("eval/loss", 0.1, True),
    ],
)
def test_reached_score_or_loss_target_ends_the_run(metric: str, value: float, ends: bool) -> None:
    reason = EndRule(target=(metric, 0.9)).find_end_reason({metric: value}, [])
    assert reason == (f"{metric} {value:g} has reached run.end_at={metric}:0.9" if ends else None)


def test_missing_target_is_ignored_and_unknown_one_refused() -> None:
    rule = EndRule(target=("eval/score", 0.9))
    assert rule.find_end_reason({"reward/mean": 1.0}, []) is None
    with pytest.raises(
        AlignerError,
        match=r"run\.end_at=eval/score:0\.9: unknown metric; metrics of this step: eval/loss, kl/coef",
    ):
        rule.find_end_reason({"kl/coef": 0.0, "eval/loss": 1.0}, [])


@pytest.mark.parametrize(
    ("metric", "values", "ends"),
    [
        ("eval/score", [0.5], False),
        ("eval/score", [0.5, 0.4], False),
        ("eval/score", [0.5, 0.4, 0.3], True),
        ("eval/score", [0.5, 0.4, 0.6], False),
        ("eval/score", [0.5, 0.4, 0.6, 0.6], False),
        ("eval/score", [0.5, 0.4, 0.6, 0.6, 0.1], True),  # a value equal to the best is no gain
        ("eval/score", [0.1, 0.2, 0.3, 0.4, 0.5], False),
        ("eval/loss", [0.5, 0.6, 0.7], True),
        ("eval/loss", [0.7, 0.6, 0.5], False),
    ],
)
def test_evaluations_without_gain_end_the_run(metric: str, values: list[float], ends: bool) -> None:
    rule = EndRule(patience=2, metric=metric)
    assert (rule.find_end_reason({metric: values[-1]}, values) is not None) == ends
    assert rule.find_end_reason({KL: 0.0}, values) is None, (
        "a step that is not evaluated ends nothing by that"
    )


def test_end_reason_contains_best_value() -> None:
    reason = EndRule(patience=1, metric="eval/score").find_end_reason(
        {"eval/score": 0.25}, [0.5, 0.25]
    )
    assert reason == "eval/score has not improved since the value 0.5 (run.end_without_gain=1)"


# The loop runs on two ranks; only rank 0 has the right metrics. It evaluates at steps 0, 3, 6, 9
# and 10, and at a stop. The score at other steps is 0.9, which would be a gain.
SCORES = [0.1, 0.9, 0.9, 0.5, 0.9, 0.9, 0.4, 0.9, 0.9, 0.5, 0.9]
KLS = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
WITHOUT_GAIN = {"end_without_gain": 2}


def scripted(
    pool: WorkerPool, root: Path, told_after: int | None = None, **run: object
) -> list[int]:
    """Run on two ranks; return the steps that both ranks ran."""
    one, other = pool.run(loop_jobs.scripted, 2, str(root), KLS, SCORES, told_after, run)
    assert one == other
    return one


def evaluated(root: Path) -> list[int]:
    return [
        int(step["step"]) for step in read_metrics(RunPaths(root).metrics) if "eval/score" in step
    ]


def test_ended_run_evaluates_and_saves_last_step(pool: WorkerPool, tmp_path: Path) -> None:
    assert scripted(pool, tmp_path, end_kl=0.45) == [1, 2, 3, 4, 5, 6]
    assert (
        read_early_end(RunPaths(tmp_path))
        == "ended after step 6: kl/reference 0.5 is above run.end_kl=0.45"
    )
    assert (
        evaluated(tmp_path) == [0, 3, 6]
        and (tmp_path / "checkpoints" / "step_6" / "manifest.json").is_file()
    )
    assert scripted(pool, tmp_path / "between", end_kl=0.35) == [1, 2, 3, 4, 5]
    assert evaluated(tmp_path / "between") == [0, 3, 5]


def test_run_below_its_bounds_completes_all_steps(pool: WorkerPool, tmp_path: Path) -> None:
    assert scripted(pool, tmp_path, end_kl=5.0, end_at="eval/score:0.95") == list(range(1, 11))
    assert read_early_end(RunPaths(tmp_path)) is None


def test_initial_policy_sets_baseline_but_ends_no_run(pool: WorkerPool, tmp_path: Path) -> None:
    assert scripted(pool, tmp_path / "at", end_at="eval/score:0.1") == [1, 2, 3]
    assert scripted(pool, tmp_path / "gain", end_without_gain=1) == [1, 2, 3, 4, 5, 6]


@pytest.mark.promise("stop-criterion-is-independent-of-resumes")
@pytest.mark.parametrize("stops", [(2,), (3,), (3, 5), (6,), (7, 8)])
@pytest.mark.parametrize("told", [True, False], ids=["told-to-stop", "stop_after"])
def test_stopped_run_ends_at_the_same_step(
    pool: WorkerPool, tmp_path: Path, stops: tuple[int, ...], told: bool
) -> None:
    steps = []
    for stop in stops:
        given = {"resume": "auto"} if told else {"resume": "auto", "stop_after": stop}
        steps += scripted(pool, tmp_path, stop if told else None, **given, **WITHOUT_GAIN)
        assert read_early_end(RunPaths(tmp_path)) is None
    steps += scripted(pool, tmp_path, resume="auto", **WITHOUT_GAIN)
    assert steps == list(range(1, 10))
    reason = "eval/score has not improved since the value 0.5 (run.end_without_gain=2)"
    assert read_early_end(RunPaths(tmp_path)) == f"ended after step 9: {reason}"


def test_run_stopped_before_evaluation_ends_on_resume(pool: WorkerPool, tmp_path: Path) -> None:
    assert scripted(pool, tmp_path, 9, **WITHOUT_GAIN) == list(range(1, 10))
    assert evaluated(tmp_path) == [0, 3, 6] and read_early_end(RunPaths(tmp_path)) is None
    assert scripted(pool, tmp_path, resume="true", **WITHOUT_GAIN) == []
    assert evaluated(tmp_path) == [0, 3, 6, 9] and read_early_end(RunPaths(tmp_path)) is not None


def test_ended_run_resumes_only_with_another_key(pool: WorkerPool, tmp_path: Path) -> None:
    assert scripted(pool, tmp_path, end_at="eval/score:0.5") == [1, 2, 3]
    why = read_early_end(RunPaths(tmp_path))
    assert why == "ended after step 3: eval/score 0.5 has reached run.end_at=eval/score:0.5"
    assert scripted(pool, tmp_path, resume="true", end_at="eval/score:0.5") == []
    assert read_early_end(RunPaths(tmp_path)) == why
    assert scripted(pool, tmp_path, resume="true") == list(range(4, 11))
    assert read_early_end(RunPaths(tmp_path)) is None
