"""Tests of complete runs with reward functions that abstain, are async, or deadlock."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import pytest

from aligner.observability.sample_files import read_samples
from benchmarks.runs import Launch, run_to_end
from tests.system.scorers import BAD_PROMPT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCORERS = "tests.system.scorers"
PLAIN = ("logging.tensorboard=false", "rollout.prompts_per_step=8")


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "copg", "online_dpo"])
def test_run_trains_without_abstained_samples(tmp_path: Path, algorithm: str) -> None:
    function = f"reward.function={SCORERS}:abstaining"
    run = run_to_end(tmp_path / "run", f"algorithm={algorithm}", "run.steps=3", function, *PLAIN)
    rows = read_samples(run.paths.root).to_pylist()
    for step, metrics in enumerate(run.metrics):
        own = [row for row in rows if row["step"] == metrics["step"]]
        abstained = [row for row in own if row["score"] is None or math.isnan(row["score"])]
        assert metrics["reward/abstained"] == len(abstained) > 0, step
        assert metrics["reward/abstained_prompts"] >= 1, "all samples of one prompt"
        assert metrics["rollout/skipped"] == 0
        assert all(math.isfinite(value) for value in metrics.values())
        scores = [row["score"] for row in own if row not in abstained]
        assert metrics["reward/mean"] == pytest.approx(sum(scores) / len(scores))
    assert any(row["prompt"] == BAD_PROMPT for row in rows)
    for row in rows:
        if row["prompt"] == BAD_PROMPT:
            assert row.get("advantage") is None or math.isnan(row["advantage"])


@pytest.mark.promise("deadlocked-reward-is-named")
def test_deadlocked_function_ends_run_with_stack(tmp_path: Path) -> None:
    with Launch(
        tmp_path / "run",
        f"reward.function={SCORERS}:deadlocked",
        "reward.function_timeout_s=3",
        "run.steps=100",
        *PLAIN,
    ) as launch:
        began = time.monotonic()
        run = launch.finish(120)
    assert run.code == 1, run.report()
    assert re.search(
        rf"error: .*ScorerDeadlocked.*\(reward\.function={SCORERS}:deadlocked\)", run.error
    )
    stack = r"scorers\.py\", line \d+ in _acquire_twice\n.*scorers\.py\", line \d+ in deadlocked"
    assert re.search(stack, run.error), run.error
    assert time.monotonic() - began < 60
    assert run.metrics == []


def test_prompt_with_deadlocked_scorer_is_skipped(tmp_path: Path) -> None:
    run = run_to_end(
        tmp_path / "run",
        f"reward.function={SCORERS}:deadlocked_for_one_prompt",
        "reward.function_timeout_s=2",
        "run.steps=2",
        *PLAIN,
    )
    assert [metrics["rollout/skipped"] for metrics in run.metrics] == [1.0, 1.0]
    rows = read_samples(run.paths.root).to_pylist()
    skipped = {row["prompt"] for row in rows if row["score"] is None or math.isnan(row["score"])}
    assert skipped == {BAD_PROMPT}
