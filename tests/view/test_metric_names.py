"""Plain names of metrics."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aligner.observability.metrics import read_metrics
from aligner.view.metric_descriptions import _METRICS, describe_metric, name_metric
from tests.view.served import REPOSITORY


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
        ("eval/metrics/score", "Evaluation: metric of the agent: score"),
        ("eval/math/metrics/a/b_low", "Evaluation: metric of the agent: a/b_low, math"),
        ("odd/metric", "odd/metric"),
        ("eval/math/odd", "eval/math/odd"),
    ],
)
def test_metric_has_plain_name(metric: str, name: str) -> None:
    assert name_metric(metric) == name


def test_descriptions_say_more_than_names() -> None:
    repeated = [
        pattern
        for pattern, (name, description) in _METRICS.items()
        if description.rstrip(".").lower() == name.lower()
    ]
    assert repeated == []


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "dpo"])
def test_every_metric_of_a_run_has_name_and_description(tmp_path: Path, algorithm: str) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "ab", "chosen": "12", "rejected": "xy"}\n' * 8)
    options = {
        "ppo": ["evaluation.every=1", "evaluation.prompts=[abc,xyz]"],
        "dpo": ["algorithm=dpo", f"data.path={pairs}", "data.max_response_tokens=8"],
    }
    command = ["launch", "experiment=tiny_ppo", f"run.dir={tmp_path / 'run'}", "run.steps=2"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    launched = subprocess.run(
        [sys.executable, "-m", "aligner", *command, *options[algorithm]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert launched.returncode == 0, launched.stderr
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    names = {name for record in records for name in record} - {"step"}
    assert len(names) > 8
    assert {
        name for name in names if not describe_metric(name) or name_metric(name) == name
    } == set()


def test_bound_has_description_of_its_metric() -> None:
    assert describe_metric("eval/score_low") == describe_metric("eval/score") != ""
