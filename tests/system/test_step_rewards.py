"""Tests of complete runs with step rewards and a curriculum of prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.cli import main
from aligner.observability.sample_files import read_samples
from benchmarks.faults import BESIDE
from benchmarks.runs import checkpoint_differences, repeatable, run_to_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4
RETURNS = (
    "algorithm=reinforce",
    "algorithm.kl_coefficient=0",
    "algorithm.whiten_advantages=false",
    "algorithm.gamma=1",
    "algorithm.uncorrected_staleness=true",
)
GIVEN = (
    *(
        *BESIDE,
        *RETURNS,
        "actor.parallel.data=2",
        f"run.steps={STEPS}",
        "logging.tensorboard=false",
    ),
    *("reward.function=tests.system.scorers:digit_steps", "reward.step_rewards=true"),
    *("data.pass_threshold=3", "data.curriculum.between=[0.1,0.9]", "rollout.prompts_per_step=4"),
)


def test_step_rewards_give_returns_and_resumed_run_is_equal(
    tmp_path: Path,
):
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()  # both runs need the same name, which checkpoints contain
    run = run_to_end(tmp_path / "whole" / "run", *GIVEN)
    rows = read_samples(run.paths.root, tokens=True).to_pylist()
    assert len(rows) == STEPS * 16
    for row in rows:
        digits = [float(text.isdigit()) for text in row["text"]]
        assert row["advantage"] == [sum(digits[place:]) for place in range(len(digits))]
    scores = read_samples(run.paths.root)["score"].to_pylist()
    assert scores == [sum(map(str.isdigit, row["text"])) for row in rows]
    assert run.metrics[-1]["data/repetitions"] > 0 and run.metrics[-1]["data/sampled_fraction"] <= 1

    stopped = run_to_end(tmp_path / "stopped" / "run", *GIVEN, "run.stop_after=2")
    resumed = run_to_end(stopped.paths.root, *GIVEN, "run.resume=true")
    assert repeatable(resumed.metrics) == repeatable(run.metrics)
    assert checkpoint_differences(run.paths, resumed.paths, STEPS) == []


def test_trained_process_reward_model_scores_steps(tmp_path: Path):
    records = [
        {"prompt": "abc", "steps": ["12.", "ab."], "labels": [1, 0]},
        {"prompt": "x", "steps": ["3."], "labels": [1]},
    ] * 8
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    offline = (
        "algorithm=reward_model",
        f"data.path={tmp_path / 'steps.jsonl'}",
        "run.steps=3",
        "data.batch_size=8",
    )
    trained = run_to_end(tmp_path / "judge", *offline)
    judge = tmp_path / "judge_model"
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["convert", str(trained.paths.root), str(judge)])
    run = run_to_end(
        tmp_path / "run",
        "reward.kind=model",
        f"reward.path={judge}",
        "reward.step_separator=.",
        "run.steps=2",
        "algorithm=grpo",
        "algorithm.advantage=grpo_steps",
    )
    texts = [row["response"] for row in read_samples(run.paths.root).to_pylist()]
    scores = read_samples(run.paths.root)["score"].to_pylist()
    counts = [max(1, text.count(".") + bool(text[text.rfind(".") + 1 :].strip())) for text in texts]
    assert max(counts) > 1
    assert all(0 < score < count for score, count in zip(scores, counts, strict=True))
