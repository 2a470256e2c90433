"""Plain names of metrics."""

from __future__ import annotations

import pytest

from aligner.view.metric_descriptions import describe_metric, name_metric


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("policy/ratio_max", "Largest policy ratio"),
        ("reward/p10", "Reward, 10th percentile"),
        ("reward/mean/judge/clarity", "Mean reward of judge/clarity"),
        ("eval/pass@4", "Evaluation: pass@4"),
        ("eval/math/pass@4", "Evaluation: pass@4, math"),
        ("eval/score_low", "Evaluation: score, lower bound"),
        ("eval/math/score_high", "Evaluation: score, upper bound, math"),
        ("odd/metric", "odd/metric"),
        ("eval/math/odd", "eval/math/odd"),
    ],
)
def test_metric_has_plain_name(metric: str, name: str) -> None:
    assert name_metric(metric) == name


def test_bound_has_description_of_its_metric() -> None:
    assert describe_metric("eval/score_low") == describe_metric("eval/score") != ""
