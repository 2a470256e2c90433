"""Test the study of benchmarks/rlhf.py: the configurations of its runs, and its figures."""

from __future__ import annotations

import pytest

from aligner.config.compose import compose_config
from aligner.config.prerequisites import plan_run
from aligner.models.model_source import absent_inputs
from benchmarks.rlhf import ALGORITHMS, EXPERIMENT, PLACES, curve, overrides_of, ranged, win_rate_at


@pytest.mark.parametrize("place", [max(PLACES), (1, max(age for _, age in PLACES))], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_run_of_the_study_passes_the_checks(algorithm: str, place: tuple[int, int]) -> None:
    overrides = overrides_of(algorithm, *place, seed=1, updates=48)
    plan = plan_run(
        compose_config(
            [f"experiment={EXPERIMENT}", f"algorithm={algorithm}", "run.dir=run", *overrides]
        )
    )
    plan.check(absent_inputs(plan.config))
    config = plan.config
    assert config.run.steps * config.algorithm.minibatches == 48
    assert config.rollout.prompts_per_step == 64 * config.algorithm.minibatches
    assert config.run.steps % config.evaluation.every == 0
    assert config.rollout.max_staleness == place[1]


def test_curve_contains_only_evaluated_steps() -> None:
    evaluated = {
        "eval/win_rate": 0.5,
        "eval/reference_kl": 0.0,
        "eval/reference_perplexity": 1.4,
        "eval/score": 0.4,
    }
    metrics = [
        {"step": 0, **evaluated},
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 0.3, **evaluated},
    ]
    points = curve(metrics, minibatches=4)
    same = {"win_rate": 0.5, "kl": 0.0, "perplexity": 1.4, "score": 0.4}
    assert points == [{"update": 0, **same}, {"update": 8, **same, "reward": 0.3}]


def test_win_rate_is_interpolated_at_first_crossing() -> None:
    points = [
        {"kl": kl, "win_rate": rate}
        for kl, rate in ((0.0, 0.5), (0.2, 0.7), (0.1, 0.9), (0.4, 0.6))
    ]
    assert win_rate_at(points, 0.1) == pytest.approx(0.6)
    assert win_rate_at(points, 0.3) == pytest.approx(0.7)
    assert win_rate_at(points, 0.5) is None


def test_missing_seed_suppresses_mean_and_range() -> None:
    assert ranged([0.25, 0.5, 0.75]) == "0.500 (0.250 to 0.750)"
    assert ranged([0.25, None]) == "-"
