"""Steps whose prompts are chosen by what earlier ones have scored."""

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
    "data.curriculum.memory=0.5",
]


def told(steps) -> list[dict[str, float]]:
    """What hangs on which prompts were drawn."""
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
    """A run's steps, with a checkpoint in the middle, and its directory."""
    directory = tmp_path_factory.mktemp("curriculum") / "run"
    (steps,) = pool.run(step_jobs.critic_warmup, 1, [*RUN, f"run.dir={directory}"], 0, SAVED)
    return steps, directory


def test_prompts_rest_come_again_and_their_repetitions_are_told(whole):
    found = told(whole[0])
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
    assert [step["data/drawn_fraction"] for step in found] == [
        4 * done / (8 * epochs[done - 1]) for done in range(1, STEPS + 1)
    ]
    assert all(0 < step["data/pass_rate"] < 1 for step in found)


def test_a_run_that_goes_on_from_a_checkpoint_draws_the_same_prompts(pool, tmp_path, whole):
    steps, directory = whole
    shutil.copytree(directory, tmp_path / "run")
    (resumed,) = pool.run(step_jobs.critic_warmup, 1, [*RUN, f"run.dir={tmp_path / 'run'}"], SAVED)
    assert told(resumed) == told(steps[SAVED:])
    weights = resumed[-1]["weights"]
    assert all(torch.equal(weight, weights[name]) for name, weight in steps[-1]["weights"].items())
    shutil.rmtree(next((tmp_path / "run" / "checkpoints").rglob("pass_rates")))
    (forgot,) = pool.run(step_jobs.critic_warmup, 1, [*RUN, f"run.dir={tmp_path / 'run'}"], SAVED)
    assert told(forgot) != told(steps[SAVED:]), (
        "without what earlier steps have scored others are drawn"
    )


def test_data_parallel_ranks_draw_the_same_prompts_as_one(pool, tmp_path, whole):
    ranks = pool.run(
        step_jobs.critic_warmup,
        2,
        [*RUN, "actor.parallel.data=2", f"run.dir={tmp_path / 'run'}"],
        0,
    )
    for steps in ranks:
        for here, there in zip(told(steps), told(whole[0]), strict=True):
            assert here == pytest.approx(there, rel=1e-6)
