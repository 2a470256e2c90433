"""Checks of `evaluation` and of `checkpoint.best_metric`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aligner.checks import checkpoint, evaluation
from aligner.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EnvironmentConfig,
    EvaluationConfig,
    RolloutConfig,
    RunConfig,
)
from aligner.schema.derived import is_greedy

ASYNCHRONOUS = {"rollout": RolloutConfig(max_staleness=1)}
BESIDE = EvaluationConfig(every=3, prompts=["a"], asynchronous=True)
JUDGE = {"judge_url": "http://localhost:8000/v1", "judge_model": "tester"}


def problems(trainer: str, **sections: Any) -> list[str]:
    config = Config(algorithm=AlgorithmConfig(trainer=trainer), **sections)
    return [
        *evaluation.find_problems(config, None, {}),
        *checkpoint.find_problems(config, None, {}),
    ]


@pytest.mark.parametrize(
    ("trainer", "sections"),
    [
        ("online", {}),
        ("online", {"evaluation": EvaluationConfig(every=3, prompts=["a"], samples=4)}),
        (
            "online",
            {
                "evaluation": EvaluationConfig(every=3, prompts=["a"]),
                "checkpoint": CheckpointConfig(best_metric="eval/score"),
            },
        ),
        ("online", {"checkpoint": CheckpointConfig(best_metric="reward/mean")}),
        ("online", {"evaluation": EvaluationConfig(every=3, prompts=["a"], judge=JUDGE)}),
        (
            "online",
            {
                "evaluation": EvaluationConfig(
                    every=3, suites={"one": {"prompts": ["a"], "judge": JUDGE}}
                )
            },
        ),
        ("online", ASYNCHRONOUS | {"evaluation": BESIDE}),
        ("online", ASYNCHRONOUS | {"evaluation": BESIDE, "run": RunConfig(end_kl=1)}),
        (
            "sft",
            {
                "data": DataConfig(held_out=2),
                "checkpoint": CheckpointConfig(best_metric="eval/loss"),
            },
        ),
    ],
)
def test_valid_evaluation_settings_are_accepted(trainer: str, sections: dict[str, Any]) -> None:
    assert problems(trainer, **sections) == []


@pytest.mark.parametrize(
    ("trainer", "sections", "message"),
    [
        (
            "online",
            {"evaluation": EvaluationConfig(every=2)},
            "evaluation.every=2: requires evaluation prompts; set",
        ),
        (
            "online",
            {
                "evaluation": EvaluationConfig(
                    every=2, prompts=["a"], suites={"one": {"samples": 2}}
                )
            },
            (
                "evaluation.every=2: requires evaluation prompts; set"
                " evaluation.suites.one.path=FILE"
            ),
        ),
        (
            "online",
            {"evaluation": EvaluationConfig(suites={"one": {"path": "a.jsonl"}})},
            "suites.one.path=a.jsonl: no such file",
        ),
        (
            "online",
            {"evaluation": EvaluationConfig(suites={"one": {"function": "nope"}})},
            "suites.one.function=nope: must be",
        ),
        (
            "online",
            {
                "evaluation": EvaluationConfig(
                    suites={"one": {"judge": {"judge_url": "http://a/v1"}}}
                )
            },
            "evaluation.suites.one.judge.judge_model: missing",
        ),
        (
            "online",
            {"evaluation": EvaluationConfig(every=2, prompts=["a", " "])},
            "evaluation.prompts: must not contain an empty prompt",
        ),
        (
            "online",
            {"evaluation": EvaluationConfig(path="a.tsv")},
            "evaluation.path=a.tsv: must be a .jsonl, .json, .jsonl.gz, .json.gz, .csv, .parquet or .txt file",
        ),
        (
            "online",
            {"evaluation": EvaluationConfig(path="a.jsonl")},
            "evaluation.path=a.jsonl: no such file",
        ),
        (
            "online",
            {"evaluation": EvaluationConfig(fields={"prompt": 1})},
            "evaluation.fields.prompt=1: expected the name",
        ),
        (
            "online",
            {"evaluation": EvaluationConfig(function="nope")},
            "evaluation.function=nope: must be one of digit_fraction, ",
        ),
        (
            "online",
            {"evaluation": EvaluationConfig(judge={"judge_url": "http://a/v1"})},
            "evaluation.judge.judge_model: missing",
        ),
        (
            "online",
            {"evaluation": EvaluationConfig(judge=JUDGE | {"judge_asks": "score"})},
            "judge_asks=score: must be pairwise in an evaluation",
        ),
        (
            "online",
            {"evaluation": EvaluationConfig(judge=JUDGE | {"judge_lowest": 1})},
            "judge.judge_lowest: is not supported in an evaluation",
        ),
        (
            "online",
            {"evaluation": EvaluationConfig(judge=JUDGE | {"judge_cash": "a"})},
            "mean evaluation.judge.judge_cache",
        ),
        (
            "online",
            {"evaluation": EvaluationConfig(judge=JUDGE | {"judge_template": "{response}"})},
            "evaluation.judge.judge_template: must contain {response_a} and {response_b}",
        ),
        (
            "online",
            {"evaluation": EvaluationConfig(judge=JUDGE | {"judge_key_variable": "TEST_NO_KEY"})},
            "evaluation.judge.judge_key_variable=TEST_NO_KEY: the environment variable is not set",
        ),
        (
            "online",
            {
                "evaluation": EvaluationConfig(judge=JUDGE),
                "environment": EnvironmentConfig(target="a:B"),
            },
            (
                "evaluation.judge: compares responses to one prompt, which is not supported with"
                " multi-turn episodes"
            ),
        ),
        (
            "online",
            {"evaluation": BESIDE},
            "evaluation.asynchronous=true: requires a generator that generates while the policy trains",
        ),
        (
            "online",
            ASYNCHRONOUS | {"evaluation": BESIDE, "run": RunConfig(end_at="eval/score:1")},
            "asynchronous=true: is not supported with run.end_at=eval/sc",
        ),
        (
            "online",
            ASYNCHRONOUS | {"evaluation": BESIDE, "run": RunConfig(end_without_gain=2)},
            "true: is not supported with run.end_without_gain=2",
        ),
        (
            "online",
            {"evaluation": EvaluationConfig(samples=2, greedy=True)},
            "evaluation.samples=2: must be 1 with greedy decoding",
        ),
        (
            "online",
            {"checkpoint": CheckpointConfig(best_metric="eval/score")},
            "the run is not evaluated; set evaluation.every=STEPS",
        ),
        (
            "dpo",
            {"checkpoint": CheckpointConfig(best_metric="eval/loss")},
            "the run is not evaluated; set data.held_out=ROWS",
        ),
        (
            "preferences",
            {"evaluation": EvaluationConfig(every=1)},
            "evaluation.every=1: algorithm.trainer=preferences trains no model",
        ),
    ],
)
def test_invalid_evaluation_settings_are_refused(
    trainer: str, sections: dict[str, Any], message: str
) -> None:
    (problem,) = problems(trainer, **sections)
    assert message in problem


def test_path_and_prompts_exclude_each_other(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a\n")
    (problem,) = problems("online", evaluation=EvaluationConfig(path=str(file), prompts=["a"]))
    assert (
        problem == "evaluation.prompts: evaluation.path is also set; set only one of the two keys"
    )


def test_single_sample_is_greedy_by_default() -> None:
    assert is_greedy(EvaluationConfig())
    assert not is_greedy(EvaluationConfig(samples=2))
    assert not is_greedy(EvaluationConfig(greedy=False))
