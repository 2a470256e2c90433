"""Test whole training steps with routing replay and with distillation."""

from __future__ import annotations

import pytest

from tests.training import step_jobs

MIXTURE = [
    "experiment=tiny_ppo",
    "model.config.architectures=[MixtralForCausalLM]",
    "+model.config.num_local_experts=8",
    "+model.config.num_experts_per_tok=2",
    "model.initializer_std=0.3",
    "rollout.prompts_per_step=8",
    "engine.precision=bf16",
    "checkpoint.every=0",
    "actor.optimizer.learning_rate=1e-9",
]


@pytest.mark.parametrize("minibatches", [1, 2])
def test_routing_replay_reduces_mismatch(pool, tmp_path, minibatches):
    """Checks a single update, which computes its own old log-probs, and two updates."""
    overrides = [
        *MIXTURE,
        "algorithm=grpo",
        "algorithm.kl_coefficient=0.1",
        f"algorithm.minibatches={minibatches}",
    ]
    runs = {}
    for replayed in (False, True):
        more = [
            f"run.dir={tmp_path / str(replayed)}",
            *(["algorithm.routing_replay=true"] if replayed else []),
        ]
        (runs[replayed],) = pool.run(step_jobs.steps, 1, [*overrides, *more], 2)
    for without, replayed in zip(runs[False], runs[True], strict=True):
        assert "mismatch/expert_routing" not in without
        assert 0 < replayed["mismatch/expert_routing"] < 0.2
        assert replayed["mismatch/logprob_abs"] < without["mismatch/logprob_abs"]
        # The learning rate is tiny, so an update or a reference model with other expert routing
        # would be visible here.
        assert abs(replayed["kl/reference"]) < 1e-4
        assert replayed["policy/ratio_max"] < 1 + 1e-4


def test_distilled_policy_approaches_its_teacher(pool, tmp_path):
    """The teacher prefers even token ids. It scores both parts of a step separately."""
    overrides = [
        "experiment=tiny_ppo",
        "algorithm=on_policy_distillation",
        "teacher.path=somewhere",
        "checkpoint.every=0",
    ]
    (metrics,) = pool.run(
        step_jobs.steps,
        1,
        [*overrides, "rollout.micro_batches=2", f"run.dir={tmp_path / 'run'}"],
        8,
    )
    first, last = metrics[0], metrics[-1]
    assert last["reward/mean"] > first["reward/mean"] + 0.1, (
        "the share of even tokens, which is not learned from"
    )
    assert last["distill/reverse_kl"] < first["distill/reverse_kl"]
    assert first["distill/response_reverse_kl"] == pytest.approx(
        16 * first["distill/reverse_kl"], rel=1e-4
    )
