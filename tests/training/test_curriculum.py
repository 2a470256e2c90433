"""Test steps whose prompts are selected by the scores of earlier steps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.training import step_jobs

STEPS, SAVED = 8, 3
RUN = [
    "experiment=tiny_ppo",
    "algorithm=grpo",
    f"run.steps={STEPS}",
    "rollout.prompts_per_step=4",
    "data.pass_threshold=0.5",
    "data.curriculum.between=[0.2,0.8]",
    "data.curriculum.target=0.5",
    "data.curriculum.decay=0.5",
]


def sampling_metrics(steps) -> list[dict[str, float]]:
    """Return the metrics that depend on the sampled prompts."""
    return [
        {
            name: value
            for name, value in step["metrics"].items()
            if name.startswith(("data/", "reward/"))
        }
        for step in steps
    ]


@pytest.fixture(scope="module")
def whole(pool, tmp_path_factory) -> tuple[list, Path]:
    """The steps of a run with a checkpoint after step SAVED, and the run's directory."""
    directory = tmp_path_factory.mktemp("curriculum") / "run"
    (steps,) = pool.run(step_jobs.critic_warmup, 1, [*RUN, f"run.dir={directory}"], 0, SAVED)
    return steps, directory


def test_curriculum_skips_and_repeats_prompts(whole):
    found = sampling_metrics(whole[0])
    epochs, repetitions = (
        [step["data/epoch"] for step in found],
        [step["data/repetitions"] for step in found],
    )
    assert epochs[:2] == [0.5, 1.0] and repetitions[:2] == [
        0.0,
        0.0,
    ], "eight prompts, each new in the first pass"
    assert epochs == sorted(epochs) and epochs[-1] > STEPS * 4 / 8, "prompts are passed over"
    assert repetitions[2] >= 1 and repetitions[-1] > 1
    assert [step["data/sampled_fraction"] for step in found] == [
        4 * done / (8 * epochs[done - 1]) for done in range(1, STEPS + 1)
    ]
    assert all(0 < step["data/pass_rate"] < 1 for step in found)


def test_resumed_curriculum_equals_undisturbed_run(pool, tmp_path, whole):
    steps, directory = whole
    shutil.copytree(directory, tmp_path / "run")
    (resumed,) = pool.run(step_jobs.critic_warmup, 1, [*RUN, f"run.dir={tmp_path / 'run'}"], SAVED)
    assert sampling_metrics(resumed) == sampling_metrics(steps[SAVED:])
    weights = resumed[-1]["weights"]
    assert all(torch.equal(weight, weights[name]) for name, weight in steps[-1]["weights"].items())
    shutil.rmtree(next((tmp_path / "run" / "checkpoints").rglob("pass_rates")))
    (forgot,) = pool.run(step_jobs.critic_warmup, 1, [*RUN, f"run.dir={tmp_path / 'run'}"], SAVED)
    assert sampling_metrics(forgot) != sampling_metrics(steps[SAVED:]), (
        "without what earlier steps have scored others are drawn"
    )


def test_sampled_prompts_do_not_depend_on_data_ranks(pool, tmp_path, whole):
    ranks = pool.run(
        step_jobs.critic_warmup,
        2,
        [*RUN, "actor.parallel.data=2", f"run.dir={tmp_path / 'run'}"],
        0,
    )
    for steps in ranks:
        for here, there in zip(sampling_metrics(steps), sampling_metrics(whole[0]), strict=True):
            assert here == pytest.approx(there, rel=1e-6)
