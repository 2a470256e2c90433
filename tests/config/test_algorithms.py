from __future__ import annotations

import pytest

from aligner.config.algorithms import algorithm_problems, rows_together
from aligner.config.checks import check
from aligner.config.compose import compose_config
from aligner.config.placement import placements, server_ranks
from aligner.errors import ConfigError


def composed(*overrides):
    return compose_config(["experiment=tiny_ppo", *overrides])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm=grpo", "rollout.samples_per_prompt=1"], "algorithm.advantage=grpo compares samples of one prompt"),
        (["algorithm=dapo", "algorithm.advantage=gae", "rollout.samples_per_prompt=1"], "dynamic_sampling_rounds=10 compares"),
        (["algorithm=best_of_n", "rollout.samples_per_prompt=1"], "algorithm.train_on=best compares samples of one prompt"),
        (["algorithm.advantage=none"], "algorithm.advantage=none: loss=clip needs an estimator"),
        (["algorithm.loss=copg"], "algorithm.advantage=gae: loss=copg takes no advantages"),
        (["algorithm.loss=dpo", "algorithm.advantage=none"], "loss=dpo and train_on=best_and_worst need each other"),
        (["algorithm=rloo", "algorithm.train_on=best"], "algorithm.train_on=best: advantage=rloo compares all"),
        (["algorithm=online_dpo"], "algorithm.kl_coefficient=0.01: loss=dpo reads no rewards"),
        (["algorithm=rloo", "algorithm.dual_clip=3"], "algorithm.dual_clip=3.0: read with loss=clip only"),
        (["algorithm=grpo", "critic.with_reward=true"], "critic.with_reward=true: algorithm.advantage=grpo has no critic"),
        (["algorithm=copg", "algorithm.minibatches=5"], "a step's 16 prompts do not divide by 5"),
        (
            ["algorithm=online_dpo", "algorithm.kl_coefficient=0", "actor.micro_batch_tokens=40"],
            "actor.micro_batch_tokens=40: must hold 2 of the longest sequence together, 64 tokens",
        ),
        (["reward.overlong_buffer=17"], "reward.overlong_buffer=17: must be at most rollout.max_response_tokens=16"),
        (["algorithm.loss=ppo"], "algorithm.loss=ppo: allowed: clip, cispo"),
        (["algorithm.advantage=gea"], "algorithm.advantage=gea: allowed: gae, reinforce"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(overrides, expected, tmp_path):
    with pytest.raises(ConfigError) as caught:
        check(composed(f"run.dir={tmp_path / 'run'}", *overrides))
    assert expected in str(caught.value)


def test_only_an_algorithm_with_values_has_a_critic():
    assert list(server_ranks(composed())) == ["critic", "reward"]
    assert list(server_ranks(composed("algorithm=grpo"))) == ["reward"]
    assert [place.role for place in placements(composed("algorithm=rloo"))] == ["trainer", "reward"]
    assert server_ranks(composed("algorithm=sft")) == {}


def test_a_critic_that_is_not_there_is_not_checked():
    assert not list(algorithm_problems(composed("algorithm=rloo")))
    check(composed("algorithm=grpo", "critic.num_layers=99", "critic.micro_batch_tokens=1"))


def test_the_loss_sees_pairs_and_prompts_whole():
    assert [rows_together(composed(f"algorithm={name}")) for name in ("ppo", "online_dpo", "copg", "dpo", "sft")] == [
        1,
        2,
        4,
        2,
        1,
    ]
