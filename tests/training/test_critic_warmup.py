"""Test runs that train only the critic in their first steps."""

from __future__ import annotations

import pytest
import torch

from aligner.config.compose import compose_config
from aligner.schema.derived import count_policy_updates, get_weights_version
from aligner.schema.keys import with_values
from benchmarks.runs import repeatable
from tests.training import step_jobs

STEPS, WAITS = 5, 3
RUN = [
    "experiment=tiny_ppo",
    f"run.steps={STEPS}",
    f"algorithm.critic_warmup_steps={WAITS}",
    "algorithm.epochs=2",
    "algorithm.kl_target=1.0",
    "algorithm.kl_coefficient=0.1",
    "rollout.prompts_per_step=4",
    "actor.optimizer.warmup_steps=1",
    "actor.optimizer.learning_rate=1e-2",
]


def same(one, other) -> bool:
    return all(
        torch.equal(weight, other["weights"][name]) for name, weight in one["weights"].items()
    )


def test_policy_training_starts_after_critic_warmup(pool, tmp_path):
    (steps,) = pool.run(step_jobs.critic_warmup, 1, [*RUN, f"run.dir={tmp_path / 'run'}"], 0)
    waiting, learning = steps[:WAITS], steps[WAITS:]
    each = compose_config(RUN).algorithm.epochs * compose_config(RUN).algorithm.minibatches
    assert [step["critic"] for step in steps] == [each * done for done in range(1, STEPS + 1)]
    assert [step["metrics"]["policy/updates"] for step in steps] == [0] * WAITS + [each] * (
        STEPS - WAITS
    )
    assert all(step["metrics"]["value/loss"] > 0 for step in steps)
    assert all(same(step, steps[0]) for step in waiting) and not same(learning[0], steps[0])
    assert [step["published"] for step in steps] == [[0], [], [], [WAITS + 1], [WAITS + 2]]
    for step in waiting:
        assert not any(
            name in step["metrics"] for name in ("policy/lr", "policy/loss", "policy/grad_norm")
        )
        assert step["metrics"]["kl/coef"] == 0.1, "there is nothing that it could hold back"
        assert abs(step["metrics"]["kl/reference"]) < 1e-3
    for step in steps:
        assert step["metrics"]["staleness/max"] == 0, (
            "the newest weights are those that the engine has"
        )
        assert step["metrics"]["mismatch/logprob_abs"] < 1e-3
    assert learning[0]["metrics"]["kl/coef"] == 0.1 != learning[1]["metrics"]["kl/coef"]
    # The learning-rate schedule counts only the policy's updates, so it starts after the warmup.
    peak, updates = 1e-2, count_policy_updates(compose_config(RUN))
    assert updates == each * (STEPS - WAITS)
    rates = [0.0, *(peak * (updates - count) / (updates - 1) for count in range(1, each))]
    assert learning[0]["metrics"]["policy/lr"] == pytest.approx(sum(rates) / each, rel=1e-6)


@pytest.mark.parametrize("after", [1, WAITS, WAITS + 1])
def test_resume_around_warmup_equals_undisturbed_run(pool, tmp_path, after):
    run = [*RUN, f"run.dir={tmp_path / 'run'}"]
    (through,) = pool.run(step_jobs.critic_warmup, 1, run, 0, after)
    (resumed,) = pool.run(step_jobs.critic_warmup, 1, [*run, "run.resume=true"], after)
    assert resumed[0]["published"][0] == (0 if after <= WAITS else after)
    for again, once in zip(resumed, through[after:], strict=True):
        assert repeatable([again["metrics"]]) == repeatable([once["metrics"]])
        assert again["critic"] == once["critic"] and same(again, once)


def test_weights_version_is_constant_in_warmup_if_allowed():
    config = compose_config(RUN)
    assert [get_weights_version(config, step) for step in range(STEPS + 1)] == [0, 0, 0, 0, 4, 5]
    for values in (
        {"engine.sleep": True},
        {"rollout.max_staleness": 1},
        {"algorithm.critic_warmup_steps": 0},
    ):
        assert [get_weights_version(with_values(config, values), step) for step in range(3)] == [
            0,
            1,
            2,
        ]
