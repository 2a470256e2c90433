"""Checks of `run`: conditions that end a run early must use metrics of the run."""

from __future__ import annotations

from typing import Any

import pytest

from aligner.checks import run
from aligner.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    RunConfig,
)

EVALUATED = {"evaluation": EvaluationConfig(every=3, prompts=["a"])}
HELD_OUT = {"data": DataConfig(held_out=2)}
BEST = {"checkpoint": CheckpointConfig(best_metric="eval/score")}


def problems(trainer: str, ends: dict[str, Any], **sections: Any) -> list[str]:
    config = Config(
        algorithm=AlgorithmConfig(trainer=trainer), run=RunConfig(steps=9, **ends), **sections
    )
    return [*run.find_problems(config, None, {})]


@pytest.mark.parametrize(
    ("trainer", "ends", "sections"),
    [
        ("online", {"end_kl": 0.1}, {}),
        ("online", {"end_at": "reward/mean:0.9"}, {}),
        ("online", {"end_at": "eval/pass@1:5e-1"}, EVALUATED),
        ("online", {"end_without_gain": 2}, {**EVALUATED, **BEST}),
        ("sft", {"end_at": "sft/loss:-1"}, {}),
        ("sft", {"end_at": "eval/loss:0.2"}, {**HELD_OUT, "evaluation": EvaluationConfig(every=2)}),
        (
            "dpo",
            {"end_without_gain": 2},
            {**HELD_OUT, "checkpoint": CheckpointConfig(every=2, best_metric="eval/accuracy")},
        ),
    ],
)
def test_measurable_end_conditions_are_accepted(
    trainer: str, ends: dict[str, Any], sections: dict[str, Any]
) -> None:
    assert problems(trainer, ends, **sections) == []


@pytest.mark.parametrize(
    "text",
    ["0.9", "eval/score", "eval/score:", ":0.9", "eval/score:high", "eval/score:nan", "a:inf"],
)
def test_malformed_end_at_is_refused(text: str) -> None:
    (problem,) = problems("online", {"end_at": text})
    assert problem == f"run.end_at={text}: must be METRIC:NUMBER, such as eval/score:0.9"


@pytest.mark.parametrize(
    ("trainer", "ends", "sections", "found"),
    [
        (
            "online",
            {"end_at": "score:1"},
            {},
            (
                "run.end_at=score:1: the run does not have this metric; the metrics of this run"
                " begin with eval/, policy/, reward"
            ),
        ),
        (
            "online",
            {"end_at": "throughput/tokens_per_s:1"},
            {},
            "the metrics of this run begin with eval/",
        ),
        (
            "sft",
            {"end_at": "reward/mean:1"},
            {},
            (
                "run.end_at=reward/mean:1: the run does not have this metric; the metrics of this"
                " run begin with eval/, "
            ),
        ),
        (
            "online",
            {"end_at": "eval/score:1"},
            {},
            "run.end_at=eval/score:1: the run is not evaluated; set evaluation",
        ),
        (
            "sft",
            {"end_at": "eval/loss:1"},
            {},
            "run.end_at=eval/loss:1: the run is not evaluated; set data.held_out=ROWS",
        ),
        (
            "sft",
            {"end_at": "eval/loss:1"},
            HELD_OUT,
            "requires evaluations before the last step of the run; set evaluation.every=STEPS",
        ),
        (
            "online",
            {"end_without_gain": 2},
            BEST,
            "run.end_without_gain=2: the run is not evaluated; set evaluation",
        ),
        (
            "online",
            {"end_without_gain": 2},
            EVALUATED,
            "run.end_without_gain=2: requires checkpoint.best_metric to be a metric",
        ),
        (
            "online",
            {"end_without_gain": 2},
            {**EVALUATED, "checkpoint": CheckpointConfig(best_metric="reward/mean")},
            (
                "to be a metric of evaluations, such as eval/score, got"
                " checkpoint.best_metric=reward/mean"
            ),
        ),
        (
            "dpo",
            {"end_without_gain": 2},
            {**HELD_OUT, "checkpoint": CheckpointConfig(best_metric="eval/loss")},
            "run.end_without_gain=2: requires evaluations before the last step of the run",
        ),
    ],
)
def test_unmeasurable_end_condition_is_refused(
    trainer: str, ends: dict[str, Any], sections: dict[str, Any], found: str
) -> None:
    (problem,) = problems(trainer, ends, **sections)
    assert found in problem
