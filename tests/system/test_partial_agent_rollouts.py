"""A complete run that carries slow agents over to later steps, also across a crash."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from benchmarks.runs import Finished, Launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6
PROMPTS = 8
SAMPLES = 4
OVERRIDES = (
    "algorithm=grpo",
    "algorithm.minibatches=1",
    "algorithm.truncated_importance=token",
    "model.source=random",
    "environment.target=null",
    "environment.agent=tests.agents.openai_agents:calculates_with_stragglers",
    "reward.function=digit_fraction",
    "engine.placement=server",
    "server.request_timeout_s=900",
    f"rollout.prompts_per_step={PROMPTS}",
    f"rollout.samples_per_prompt={SAMPLES}",
    "rollout.spare_prompts=4",
    "rollout.max_staleness=2",
    "run.max_restarts=9",
    "evaluation.every=0",
    "actor.optimizer.warmup_steps=0",
    "checkpoint.every=2",
    "logging.tensorboard=false",
    f"run.steps={STEPS}",
)


def read_samples(run: Finished) -> list[dict[str, Any]]:
    """Return the stored samples of all steps."""
    files = sorted((run.paths.root / "samples").glob("step_*.parquet"))
    return [sample for file in files for sample in pq.read_table(file).to_pylist()]


def test_each_sample_of_slow_agents_is_trained_once(tmp_path: Path) -> None:
    with Launch(tmp_path / "run", *OVERRIDES, experiment="calculator") as launch:
        launch.wait_for_step(3, timeout_s=250)
        launch.rank("trainer", 0).kill()
        run = launch.finish(300)
    assert run.code == 0, run.report()
    assert "; restarting trainer" in run.out

    samples = read_samples(run)
    counts = Counter(
        (sample["prompt_index"], sample["sample"], sample["branch"]) for sample in samples
    )
    assert set(counts.values()) == {1}
    sample_counts = Counter(prompt for prompt, _, branch in counts if branch == 0)
    assert len(sample_counts) == STEPS * PROMPTS and set(sample_counts.values()) == {SAMPLES}
    # the answer of a straggler is a multiple of 4
    stragglers = [
        sample for sample in samples if int(json.loads(sample["metadata"])["answer"]) % 4 == 0
    ]
    assert stragglers

    assert len(run.metrics) == STEPS
    for step in run.metrics:
        assert (step["rollout/deferred"], step["rollout/skipped"]) == (4, 0)
        assert step["staleness/max"] <= 2
    # all tokens of the first step come from the weights that the step trains
    assert run.metrics[0]["mismatch/logprob_abs"] < 1e-4
    # a prompt that is carried over is older than the step's newest prompts
    assert max(step["staleness/max"] for step in run.metrics) == 2
    # the end of a carried-over agent is no error of the user's code
    assert "CancelledError" not in run.out + run.error
