"""Checks of `algorithm`: incompatible keys, custom parts, stale samples."""

from __future__ import annotations

import pytest

from aligner.checks import algorithm
from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.placement.placement_table import build_placements
from aligner.placement.roles import count_server_ranks
from aligner.schema.derived import get_rows_per_group
from aligner.schema.keys import with_values


def compose(*overrides):
    return compose_config(["experiment=tiny_ppo", *overrides])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["algorithm=grpo", "rollout.samples_per_prompt=1"],
            "algorithm.advantage=grpo compares samples of one prompt",
        ),
        (
            ["algorithm=dapo", "algorithm.advantage=gae", "rollout.samples_per_prompt=1"],
            "dynamic_sampling_rounds=10 compares",
        ),
        (
            ["algorithm=best_of_n", "rollout.samples_per_prompt=1"],
            "algorithm.train_on=best compares samples of one prompt",
        ),
        (
            ["algorithm=preferences", "rollout.samples_per_prompt=1"],
            (
                "must be at least 2, because algorithm.pairs=best_and_worst forms pairs from the"
                " samples of one prompt"
            ),
        ),
        (
            ["algorithm.advantage=none"],
            "algorithm.advantage=none: algorithm.loss=clip requires advantages",
        ),
        (
            ["algorithm.loss=copg"],
            "algorithm.advantage=gae: algorithm.loss=copg does not use advantages",
        ),
        (
            ["algorithm.loss=dpo", "algorithm.advantage=none"],
            "algorithm.loss=dpo and algorithm.train_on=best_and_worst require each other",
        ),
        (
            ["algorithm=rloo", "algorithm.train_on=best"],
            (
                "algorithm.train_on=best: must be `all` with algorithm.advantage=rloo, which"
                " compares all"
            ),
        ),
        (
            ["algorithm=online_dpo", "algorithm.kl_coefficient=0.1"],
            "algorithm.kl_coefficient=0.1: is not supported with algorithm.loss=dpo",
        ),
        (
            ["algorithm=online_dpo", "algorithm.preference.label_smoothing=0.7"],
            "label_smoothing=0.7: must be at most 0.5",
        ),
        (
            [
                "algorithm=online_dpo",
                "algorithm.preference.kind=ipo",
                "algorithm.preference.label_smoothing=0.1",
            ],
            "label_smoothing=0.1: has no effect with algorithm.preference.kind=ipo",
        ),
        (
            ["algorithm=best_of_n", "algorithm.kl_coefficient=0.1"],
            "algorithm.kl_coefficient=0.1: a KL penalty in the reward is not supported",
        ),
        (
            ["algorithm=grpo", "algorithm.kl_estimator=k1"],
            "algorithm.kl_estimator=k1: has a gradient of zero on average",
        ),
        (
            ["algorithm=copg", "algorithm.truncated_importance=token"],
            "token: must be none or sequence with algorithm.loss=copg",
        ),
        (
            ["algorithm=copg", "algorithm.kl_estimator=k3"],
            "algorithm.kl_estimator=k3: must be k1 with algorithm.loss=copg",
        ),
        (
            ["algorithm=rloo", "algorithm.early_stop_kl=0.1"],
            "algorithm.early_stop_kl=0.1: has no effect with algorithm.loss=",
        ),
        (
            ["algorithm=rloo", "algorithm.whiten_rewards=true"],
            "algorithm.whiten_rewards=true: is not supported with algorithm.advantage=rloo|",
        ),
        (["algorithm.kl_target=0"], "algorithm.kl_target=0.0: must be above 0"),
        (
            ["algorithm.kl_target=1", "algorithm.kl_coefficient=0"],
            "kl_target=1: has no effect with algorithm.kl_coefficient=0",
        ),
        (
            ["algorithm.kl_target=1", "algorithm.kl_horizon=64"],
            "algorithm.kl_horizon=64: must be above 64, the number of samples in a step",
        ),
        (
            ["algorithm.critic_warmup_steps=40"],
            "algorithm.critic_warmup_steps=40: must be below run.steps=40",
        ),
        (
            ["algorithm=grpo", "algorithm.critic_warmup_steps=1"],
            "algorithm.critic_warmup_steps=1: has no effect with algorithm.advantage=grpo",
        ),
        (
            ["algorithm.critic_warmup_steps=39", "actor.optimizer.warmup_steps=2"],
            "must be below 2, the number of optimizer steps",
        ),
        (
            ["reward.missing_end_score=-1"],
            "reward.missing_end_score=-1: with rollout.stop_at_eos=false no response",
        ),
        (
            ["algorithm=preferences", "reward.missing_end_score=-1"],
            "reward.missing_end_score=-1: with rollout.stop_at_eos=false no response",
        ),
        (
            [
                "algorithm=preferences",
                "rollout.samples_per_prompt=2",
                "algorithm.kept_fields=[question,reward]",
            ],
            "algorithm.kept_fields: `reward` is already a field of the stored responses",
        ),
        (
            ["algorithm.routing_replay=true"],
            (
                "algorithm.routing_replay=true: requires a mixture-of-experts model, but the model"
                " has no experts; set"
            ),
        ),
        (
            ["algorithm.routing_replay=true", "engine=tensorrt_llm"],
            (
                "algorithm.routing_replay=true: is not supported with engine.kind=tensorrt_llm,"
                " which does not return expert routing; set algorithm.routing_replay=false, or use"
            ),
        ),
        (
            ["rollout.truncate_token=.", "rollout.truncate_after=16"],
            "rollout.truncate_after=16: must be below rollout.max_response_tokens=16",
        ),
        (["algorithm.overlong_fraction=1.5"], "algorithm.overlong_fraction=1.5: must be at most 1"),
        (["algorithm.length_penalty=-1"], "algorithm.length_penalty=-1.0: must be at least 0"),
        (
            ["algorithm.length_penalty=0.1", "algorithm.target_length=17"],
            ("algorithm.target_length=17: must be at most rollout.max_response_tokens=16"),
        ),
        (
            ["algorithm=rloo", "algorithm.epochs=4"],
            (
                "algorithm.epochs=4: must be 1 with algorithm.loss=reinforce, which treats"
                " samples as on-policy"
            ),
        ),
        (
            ["algorithm.overlong_filter=true"],
            (
                "algorithm.overlong_filter=true: with rollout.stop_at_eos=false every response"
                " counts as truncated"
            ),
        ),
        (
            ["algorithm=online_dpo", "algorithm.overlong_filter=true"],
            "algorithm.overlong_filter=true: has no effect with algorithm.loss=dpo",
        ),
        (
            ["algorithm=grpo", "algorithm.bootstrap_cut=true"],
            "algorithm.bootstrap_cut=true: has no effect with algorithm.advantage=grpo",
        ),
        (
            ["algorithm.overlong_filter=true", "algorithm.bootstrap_cut=true"],
            "algorithm.bootstrap_cut=true: has no effect with algorithm.overlong_filter=true",
        ),
        (
            ["algorithm=rloo", "algorithm.dual_clip=3"],
            "algorithm.dual_clip=3: has no effect with algorithm.loss=reinforce",
        ),
        (
            ["algorithm=grpo", "critic.with_reward=true"],
            "critic.with_reward=true: has no effect with algorithm.advantage=grpo",
        ),
        (["algorithm=copg", "algorithm.minibatches=5"], "must divide the 16 prompts of a step"),
        (
            ["algorithm=online_dpo", "actor.micro_batch_tokens=40"],
            "actor.micro_batch_tokens=40: must be at least 64 to hold 2 of the longest sequences",
        ),
        (["algorithm.loss=ppo"], "algorithm.loss=ppo: allowed: clip, cispo"),
        (["algorithm.advantage=gea"], "algorithm.advantage=gea: allowed: gae, reinforce"),
    ],
)
def test_incompatible_algorithm_keys_are_refused(overrides, expected, tmp_path):
    with pytest.raises(ConfigError) as caught:
        check(compose(f"run.dir={tmp_path / 'run'}", *overrides))
    assert expected in str(caught.value)


OWN = [f"algorithm.{key}=some.module:own" for key in ("advantage", "loss", "train_on")]


@pytest.mark.parametrize("key", ["advantage", "loss", "train_on"])
@pytest.mark.parametrize("unknown", ["gpro", ":gpro", "module:"])
def test_unknown_algorithm_choice_is_refused(key, unknown, tmp_path):
    with pytest.raises(
        ConfigError, match=rf"algorithm\.{key}={unknown}: allowed: .*, module:callable"
    ):
        check(compose(f"run.dir={tmp_path / 'run'}", f"algorithm.{key}={unknown}"))


@pytest.mark.parametrize("critic", [False, True])
def test_custom_parts_use_critic_only_on_request(critic, tmp_path):
    config = compose(
        f"run.dir={tmp_path / 'run'}", *OWN, *(["algorithm.with_critic=true"] if critic else [])
    )
    check(config)
    assert config.algorithm.has_critic == critic


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["algorithm=rloo", OWN[2]],
            "must be `all` with algorithm.advantage=rloo, which compares all samples of a prompt",
        ),
        (
            ["algorithm=copg", OWN[2]],
            "must be `all` with algorithm.loss=copg, which compares all samples of a prompt",
        ),
        (
            ["algorithm=online_dpo", OWN[2]],
            "algorithm.loss=dpo and algorithm.train_on=best_and_worst require each other",
        ),
        (["algorithm=rloo", "algorithm.with_critic=true"], "algorithm.with_critic=true"),
    ],
)
def test_incompatible_custom_selection_is_refused(overrides, expected, tmp_path):
    with pytest.raises(ConfigError) as caught:
        check(compose(f"run.dir={tmp_path / 'run'}", "rollout.samples_per_prompt=4", *overrides))
    assert expected in str(caught.value)


def test_only_an_algorithm_with_values_has_a_critic():
    assert list(count_server_ranks(compose())) == ["critic", "reward"]
    assert list(count_server_ranks(compose("algorithm=grpo"))) == ["reward"]
    assert [place.role for place in build_placements(compose("algorithm=rloo"))] == [
        "trainer",
        "reward",
    ]
    assert count_server_ranks(compose("algorithm=sft")) == {}


def test_keys_of_absent_critic_are_not_checked():
    assert not list(algorithm.find_problems(compose("algorithm=rloo"), None, {}))
    check(
        with_values(
            compose("algorithm=grpo"), {"critic.num_layers": 99, "critic.micro_batch_tokens": 1}
        )
    )


def test_rows_compared_by_loss_depend_on_algorithm():
    assert [
        get_rows_per_group(compose(f"algorithm={name}"))
        for name in ("ppo", "online_dpo", "copg", "dpo", "sft")
    ] == [
        1,
        2,
        4,
        2,
        1,
    ]


ASYNCHRONOUS = ("engine.placement=server", "rollout.max_staleness=2")


@pytest.mark.promise("stale-samples-need-a-correction")
@pytest.mark.parametrize(
    ("overrides", "ways"),
    [
        (
            ["algorithm=ppo"],
            (
                "set algorithm.truncated_importance=token or sequence, or"
                " algorithm.ratio_against=sampler, or"
            ),
        ),
        (
            ["algorithm=cispo"],
            (
                "set algorithm.truncated_importance=token or sequence, or"
                " algorithm.ratio_against=sampler, or"
            ),
        ),
        (
            ["algorithm=rloo"],
            (
                "set algorithm.truncated_importance=token or sequence, or accept the bias with"
                " algorithm.uncorrected_staleness=true"
            ),
        ),
        (
            ["algorithm=best_of_n"],
            (
                "truncated_importance=token or sequence, or accept the bias with"
                " algorithm.uncorrected_staleness=true"
            ),
        ),
        (
            ["algorithm=online_dpo", "algorithm.truncated_importance=none"],
            (
                "set algorithm.truncated_importance=sequence, or accept the bias with"
                " algorithm.uncorrected_staleness=true"
            ),
        ),
        (
            ["algorithm=copg", "algorithm.truncated_importance=none"],
            (
                "set algorithm.truncated_importance=sequence, or accept the bias with"
                " algorithm.uncorrected_staleness=true"
            ),
        ),
        (
            ["algorithm.loss=some.module:own"],
            "truncated_importance=token or sequence, or algorithm.ratio_against=sampler, or",
        ),
    ],
)
def test_uncorrected_stale_samples_are_refused(overrides, ways, tmp_path):
    run_overrides = [f"run.dir={tmp_path / 'run'}", "rollout.samples_per_prompt=4", *overrides]
    with pytest.raises(ConfigError) as caught:
        check(compose(*run_overrides, *ASYNCHRONOUS))
    (problem,) = str(caught.value).splitlines()
    assert problem.startswith("rollout.max_staleness=2: algorithm.loss=") and ways in problem
    check(compose(*run_overrides, *ASYNCHRONOUS, "algorithm.uncorrected_staleness=true"))
    check(compose(*run_overrides))


@pytest.mark.promise("stale-samples-need-a-correction")
@pytest.mark.parametrize(
    "overrides",
    [
        *([f"algorithm={name}"] for name in ("ppo_decoupled", "dapo", "online_dpo", "copg")),
        *(
            [f"algorithm={name}", "algorithm.ratio_against=sampler"]
            for name in ("ppo", "proximal_rloo", "gspo", "cispo")
        ),
        *(
            [f"algorithm={name}", "algorithm.truncated_importance=token"]
            for name in ("grpo", "reinforce", "rloo", "best_of_n")
        ),
    ],
)
def test_corrected_stale_samples_are_accepted(overrides, tmp_path):
    check(
        compose(
            f"run.dir={tmp_path / 'run'}", "rollout.samples_per_prompt=4", *overrides, *ASYNCHRONOUS
        )
    )


def test_double_sampler_correction_is_refused(tmp_path):
    with pytest.raises(
        ConfigError,
        match=(
            r"algorithm\.ratio_against=sampler: with algorithm\.truncated_importance=token the"
            " difference between the trainer and the sampler would be corrected"
        ),
    ):
        check(
            compose(
                f"run.dir={tmp_path / 'run'}", "algorithm=dapo", "algorithm.ratio_against=sampler"
            )
        )
