"""Test custom estimators, losses and selections: results and error messages."""

from __future__ import annotations

import math

import pytest
import torch

from aligner.algorithms import advantages, extension, policy_losses
from aligner.algorithms.advantages import masked_whiten
from aligner.data.types import FINISH_REASONS, Sample, collate
from aligner.errors import AlignerError, ConfigError
from aligner.schema import AlgorithmConfig
from tests.algorithms.test_online_algorithm import EACH, compose, gradient, step

HERE = "tests.algorithms.test_extension"


def own_grpo(samples, settings):
    return advantages.grpo(samples.scores, samples.samples_per_prompt)


def own_gae(samples, settings):
    return advantages.gae(
        samples.rewards, samples.values, samples.mask, settings.gamma, settings.lam
    )


def own_clip(logprobs, rows, context):
    """Compute PPO's clipped surrogate from its formula."""
    difference = torch.where(rows.mask, logprobs - rows.old_logprobs, 0.0)
    ratio = difference.exp()
    surrogate = ratio * rows.advantages
    clipped = (
        ratio.clamp(1 - context.settings.clip_low, 1 + context.settings.clip_high) * rows.advantages
    )
    stats = {
        "clip_fraction": context.total(clipped < surrogate, rows.mask),
        "ratio_max": ratio.amax(),
    }
    return context.total(-torch.minimum(surrogate, clipped), rows.mask), stats


def own_best(samples):
    order = (-samples.scores.view(-1, EACH)).argsort(1)
    return torch.stack([row[0] for row in order]) + torch.arange(0, len(samples.scores), EACH)


def near_the_reference(samples):
    """Select the five rows whose old log-probs are lowest relative to the reference."""
    assert samples.values is not None and samples.rewards.shape == samples.mask.shape
    difference = torch.where(samples.mask, samples.old_logprobs - samples.reference_logprobs, 0.0)
    return difference.sum(1).argsort()[:5]


@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo"])
def test_user_functions_equal_built_in_bit_for_bit(name):
    own = "own_gae" if name == "ppo" else "own_grpo"
    settings = ("algorithm.truncated_importance=none", "algorithm.kl_coefficient=0")
    functions = (f"algorithm.advantage={HERE}:{own}", f"algorithm.loss={HERE}:own_clip")
    critic = ("algorithm.with_critic=true",) if name == "ppo" else ()
    found = []
    for overrides in (settings, (*settings, *functions, *critic)):
        algorithm, experience, _, after = step(compose(name, *overrides))
        found.append(
            (experience, *gradient(algorithm, experience, after, [torch.arange(len(after))]))
        )
    (built_in, loss, stats, slope), (own_experience, own_loss, own_stats, own_slope) = found
    assert torch.equal(own_experience.advantages, built_in.advantages)
    assert (own_experience.returns is None) == (built_in.returns is None) == (name != "ppo")
    assert torch.equal(own_loss, loss) and torch.equal(own_slope, slope)
    assert (
        torch.equal(own_stats["clip_fraction"], stats["clip_fraction"])
        and own_stats["ratio_max"] == stats["ratio_max"]
    )


def test_user_selection_chooses_the_rows():
    config = compose("best_of_n", f"algorithm.train_on={HERE}:own_best")
    chosen, expected = step(config)[1], step(compose("best_of_n"))[1]
    assert torch.equal(chosen.tokens, expected.tokens) and torch.equal(
        chosen.groups, expected.groups
    )


def test_user_selection_precedes_reward_whitening():
    all_of_them = step(compose("ppo"))[1]
    config = compose(
        "ppo", f"algorithm.train_on={HERE}:near_the_reference", "algorithm.whiten_rewards=true"
    )
    chosen = step(config)[1]
    rows = near_the_reference(all_of_them)
    assert torch.equal(chosen.tokens, all_of_them.tokens[rows]) and torch.equal(
        chosen.scores, all_of_them.scores[rows]
    )
    expected = masked_whiten(all_of_them.rewards[rows], chosen.mask, shift_mean=False)
    assert torch.equal(chosen.rewards, expected)


def test_batch_fields_for_user_functions_are_set():
    def sample(prompt, index, length, reason):
        tokens = torch.arange(2 + length)
        return Sample(
            prompt, index, tokens, 2, -torch.ones(length), torch.full((length,), 7), reason
        )

    batch = collate(
        [
            sample(40, 0, 3, "stop"),
            sample(40, 1, 1, "length"),
            sample(9, 0, 2, "stop"),
            sample(9, 1, 2, "stop"),
        ],
        0,
    )
    assert batch.groups.tolist() == [0, 0, 1, 1] and batch.samples_per_prompt == 2
    assert [FINISH_REASONS[place] for place in batch.finish_reasons] == [
        "stop",
        "length",
        "stop",
        "stop",
    ]
    assert batch.weight_versions[batch.mask].unique().tolist() == [7]
    assert batch.select(torch.tensor([2, 3])).groups.tolist() == [1, 1]
    with pytest.raises(ValueError, match="prompts have 1 or 2 samples, must all have"):
        batch.select(torch.tensor([0, 1, 3])).samples_per_prompt  # noqa: B018
    _, experience, _, _ = step(compose("ppo"))
    seen = (
        "tokens",
        "mask",
        "scores",
        "rewards",
        "values",
        "old_logprobs",
        "reference_logprobs",
        "engine_logprobs",
    )
    for name in (*seen, "weight_versions", "finish_reasons", "groups"):
        assert getattr(experience, name) is not None, name


def raising(*arguments):
    raise ValueError("no such luck")


def of_wrong_shape(*arguments):
    return torch.zeros(3, 2)


def not_finite(samples, settings):
    return torch.full(samples.mask.shape, math.nan)


def loss_that_is_not_finite(logprobs, rows, context):
    return logprobs.sum() * math.inf, {}


def loss_alone(logprobs, rows, context):
    return logprobs.sum()


def loss_without_gradient(logprobs, rows, context):
    return context.total(logprobs.detach(), rows.mask), {}


def rows_twice(samples):
    return torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("key", "function", "told"),
    [
        ("advantage", "raising", "the function raised ValueError: no such luck"),
        (
            "advantage",
            "of_wrong_shape",
            (
                r"the function returned torch.float32 \[3, 2\], must be the advantages as a tensor of"
                r" shape \[12\] or \[12, "
            ),
        ),
        ("advantage", "not_finite", "the advantages must be finite, got nan"),
        ("loss", "raising", "the function raised ValueError: no such luck"),
        ("loss", "loss_alone", "must be a tuple of the loss and a dict of statistics"),
        ("loss", "loss_that_is_not_finite", "the loss must be finite, got "),
        ("loss", "loss_without_gradient", "must be a differentiable loss"),
        ("loss", "of_wrong_shape", r"returned torch.float32 \[3, 2\], must be a tuple of the loss"),
        ("train_on", "of_wrong_shape", r"must be an integer tensor \[N\] of row indices"),
        ("train_on", "rows_twice", r"returned \[0, 0\], must be distinct row indices from 0 to 11"),
    ],
)
def test_user_function_error_names_its_key(key, function, told):
    plain = ("algorithm.train_on=all", "algorithm.loss=clip") if key == "advantage" else ()
    config = compose("grpo", *plain, f"algorithm.{key}={HERE}:{function}")
    with pytest.raises(AlignerError, match=rf"algorithm\.{key}={HERE}:{function}: .*{told}"):
        algorithm, experience, _, after = step(config)
        gradient(algorithm, experience, after, [torch.arange(len(after))])


def test_user_advantage_must_include_returns_for_critic():
    config = compose("ppo", f"algorithm.advantage={HERE}:not_finite", "algorithm.with_critic=true")
    with pytest.raises(
        AlignerError, match="must be a tuple of advantages and returns, because a critic is trained"
    ):
        step(config)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "no_such_module:loss",
            (
                "No module named 'no_such_module'; the module must be importable from the working"
                " directory or PYTHONPATH, and must define 'loss'"
            ),
        ),
        (f"{HERE}:nothing", "has no attribute 'nothing'"),
        (f"{HERE}:EACH", "'EACH' must be callable, got int"),
    ],
)
def test_missing_or_uncallable_function_is_refused(name, told):
    with pytest.raises(ConfigError, match=f"algorithm.loss={name}: .*{told}"):
        extension.require_functions(AlgorithmConfig(loss=name))


def test_total_is_masked_sum_over_denominator():
    terms, mask = torch.tensor([[1.0, 2.0, math.nan]]), torch.tensor([[True, True, False]])
    context = extension.LossContext(
        AlgorithmConfig(), kl_coefficient=0.0, denominator=4.0, weights=None
    )
    assert float(context.total(terms, mask)) == 0.75
    assert policy_losses.build_reduction(mask, None, None)(terms) == 1.5
