"""Test the algorithms against values that their sources publish."""

from __future__ import annotations

import math

import pytest
import torch
from torch import tensor

from aligner.algorithms.advantages import dr_grpo, gae, grpo, masked_mean, masked_whiten, rloo
from aligner.algorithms.kl import KLController, approximate_kl
from aligner.algorithms.policy_losses import policy_loss, value_loss
from aligner.algorithms.preference_losses import dpo_loss, pairwise_reward_loss

DIFFERENCES = tensor([-0.3315, -0.0426, 0.6351])


@pytest.mark.promise("published-numbers")
@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [-0.3315, -0.0426, 0.6351]),
        ("k2", [0.054946, 0.000907, 0.201676]),
        ("k3", [0.061556, 0.000920, 0.164982]),
    ],
)
def test_kl_estimators_give_the_published_values(estimator, expected):
    torch.testing.assert_close(
        approximate_kl(DIFFERENCES, torch.zeros(3), estimator), tensor(expected), atol=1e-6, rtol=0
    )


def test_adaptive_kl_coefficient_follows_the_published_steps():
    controller = KLController(coefficient=0.15, target=6, horizon=10000)
    controller.update(12, 512)
    assert controller.coefficient == pytest.approx(0.151536, abs=1e-9)
    controller.update(3, 512)
    assert controller.coefficient == pytest.approx(0.14998427, abs=1e-8)


def test_resume_restores_adaptive_kl_coefficient():
    for configured, expected in (
        (KLController(0.15, target=6, horizon=100), 0.3),
        (KLController(0.15), 0.15),
        (KLController(0.0), 0.0),
        (KLController(0.0, target=6, horizon=100), 0.0),
    ):
        configured.resume(0.3)
        assert configured.coefficient == expected


def test_fixed_kl_coefficient_does_not_change():
    controller = KLController(0.15)
    controller.update(12, 512)
    assert controller.coefficient == 0.15


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 10000), (6.0, 0)])
def test_adaptive_kl_without_target_is_refused(target, horizon):
    with pytest.raises(ValueError, match=f"target={target} and horizon={horizon}: must be > 0"):
        KLController(0.15, target, horizon)


def test_unknown_kl_estimator_is_refused():
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; allowed: k1, k2, k3"):
        approximate_kl(DIFFERENCES, DIFFERENCES, "k4")


@pytest.mark.promise("published-numbers")
@pytest.mark.parametrize(("estimator", "size"), [(rloo, 0.66667), (grpo, 0.865875), (dr_grpo, 0.5)])
def test_grouped_advantages_give_the_published_values(estimator, size):
    expected = tensor([size, -size, -size, size])
    torch.testing.assert_close(
        estimator(tensor([1.0, 0.0, 0.0, 1.0]), 4), expected, atol=1e-5, rtol=0
    )


def test_dual_clip_bounds_loss_of_a_large_ratio():
    one, ratio = torch.ones(1, 1), tensor([[2.0]], requires_grad=True)
    plain, _ = policy_loss(ratio, torch.zeros(1, 1), -one, one)
    assert plain.item() == pytest.approx(math.e**2)
    bounded, stats = policy_loss(ratio, torch.zeros(1, 1), -one, one, dual_clip=3.0)
    assert bounded.item() == 3.0 and stats["dual_clip_fraction"] == 1
    assert torch.autograd.grad(bounded, ratio)[0] == 0


@pytest.mark.promise("published-numbers")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.620957),
        ({"label_smoothing": 0.1}, 0.9 * 0.620957 + 0.1 * 0.770957),
        ({"kind": "ipo"}, (1.5 - 5.0) ** 2),
    ],
)
def test_preference_loss_gives_the_published_value(options, expected):
    loss = dpo_loss(
        tensor([-10.0]), tensor([-11.0]), tensor([-12.0]), tensor([-11.5]), beta=0.1, **options
    )
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("margin", "expected"), [(None, 0.313262), (0.5, 0.474077)])
def test_reward_loss_is_logistic_loss_of_difference(margin, expected):
    assert pairwise_reward_loss(tensor([2.0]), tensor([1.0]), margin).item() == pytest.approx(
        expected, abs=1e-6
    )


def test_whitening_without_mean_shift_gives_the_published_values():
    values = torch.arange(1.2, 2.05, 0.1).view(3, 3)
    expected = tensor([[0.0508, 0.4381, 0.8254], [1.2127, 1.6, 1.9873], [2.3746, 2.7619, 3.1492]])
    whitened = masked_whiten(values, torch.ones(3, 3, dtype=torch.bool), shift_mean=False)
    torch.testing.assert_close(whitened, expected, atol=1e-4, rtol=0)


def test_whitening_uses_only_masked_values():
    values = tensor([[1.0, 2.0, 3.0, math.nan]])
    mask = tensor([[True, True, True, False]])
    whitened = masked_whiten(values, mask)
    assert whitened[0, 3] == 0
    assert masked_mean(whitened, mask).abs() < 1e-6
    assert masked_mean(whitened.square(), mask) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.promise("published-numbers")
def test_gae_gives_the_published_values():
    advantages, returns = gae(
        tensor([[-0.01, 0.02, 1.0]]), tensor([[0.5, 0.4, 0.3]]), torch.ones(1, 3), 1.0, 0.95
    )
    torch.testing.assert_close(advantages, tensor([[0.44575, 0.585, 0.7]]))
    torch.testing.assert_close(returns, tensor([[0.94575, 0.985, 1.0]]))


def test_gae_limits_are_td_error_and_full_return():
    rewards, values = torch.rand(2, 5), torch.rand(2, 5)
    mask = torch.ones(2, 5)
    following = torch.cat([values[:, 1:], torch.zeros(2, 1)], 1)
    torch.testing.assert_close(
        gae(rewards, values, mask, 0.9, 0.0)[0], rewards + 0.9 * following - values
    )
    full = torch.stack(
        [sum(rewards[:, k] * 0.9 ** (k - t) for k in range(t, 5)) for t in range(5)], 1
    )
    torch.testing.assert_close(gae(rewards, values, mask, 0.9, 1.0)[1], full)


def test_gae_ignores_values_outside_the_mask():
    rewards, values = torch.rand(1, 3), torch.rand(1, 3)
    alone = gae(rewards, values, torch.ones(1, 3), 0.97, 0.9)
    wide_rewards, wide_values = torch.full((1, 7), math.nan), torch.full((1, 7), math.inf)
    wide_rewards[:, 2:5], wide_values[:, 2:5] = rewards, values
    mask = torch.zeros(1, 7)
    mask[:, 2:5] = 1
    for narrow, wide in zip(alone, gae(wide_rewards, wide_values, mask, 0.97, 0.9), strict=True):
        torch.testing.assert_close(wide[:, 2:5], narrow)
        assert wide[:, [0, 1, 5, 6]].abs().sum() == 0


def test_policy_loss_clips_only_loss_lowering_ratios():
    ratio = tensor([[1.5, 1.5, 0.5, 0.5]])
    advantages = tensor([[1.0, -1.0, 1.0, -1.0]])
    mask = torch.ones(1, 4)
    loss, stats = policy_loss(
        ratio.log(), torch.zeros(1, 4), advantages, mask, clip_low=0.2, clip_high=0.28
    )
    assert loss == pytest.approx(-(1.28 - 1.5 + 0.5 - 0.8) / 4)
    assert stats["clip_fraction"] == 0.5
    assert stats["ratio_max"] == pytest.approx(1.5)


def test_losses_of_parts_sum_to_batch_loss():
    generator = torch.Generator().manual_seed(0)
    old, advantages, returns, values = (torch.randn(6, 9, generator=generator) for _ in range(4))
    mask = torch.rand(6, 9, generator=generator) > 0.4
    new = (old + 0.3 * torch.randn(6, 9, generator=generator)).requires_grad_()
    whole, _ = policy_loss(new, old, advantages, mask)
    (expected,) = torch.autograd.grad(whole, new)
    count = float(mask.sum())
    parts = [
        policy_loss(
            new[i : i + 2],
            old[i : i + 2],
            advantages[i : i + 2],
            mask[i : i + 2],
            denominator=count,
        )
        for i in (0, 2, 4)
    ]
    (gradient,) = torch.autograd.grad(sum(loss for loss, _ in parts), new)
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    torch.testing.assert_close(gradient, expected)
    critic_parts = [
        value_loss(
            values[i : i + 2], old[i : i + 2], returns[i : i + 2], mask[i : i + 2], 0.2, count
        )[0]
        for i in (0, 2, 4)
    ]
    torch.testing.assert_close(sum(critic_parts), value_loss(values, old, returns, mask, 0.2)[0])


@pytest.mark.promise("masked-tokens-never-leak")
def test_values_outside_mask_change_no_loss_or_gradient():
    new = tensor([[0.1, math.nan]], requires_grad=True)
    mask = tensor([[True, False]])
    loss, _ = policy_loss(new, tensor([[0.0, math.inf]]), tensor([[1.0, math.nan]]), mask)
    (gradient,) = torch.autograd.grad(loss, new)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all() and gradient[0, 1] == 0
    values = tensor([[0.1, math.nan]], requires_grad=True)
    loss, _ = value_loss(values, tensor([[0.0, 0.0]]), tensor([[1.0, math.nan]]), mask, 0.2)
    (gradient,) = torch.autograd.grad(loss, values)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all() and gradient[0, 1] == 0


def test_value_loss_takes_the_larger_of_plain_and_clipped_error():
    loss, stats = value_loss(
        tensor([[1.0, 0.0]]), tensor([[0.0, 0.0]]), tensor([[1.0, 0.1]]), torch.ones(1, 2), 0.2
    )
    assert loss == pytest.approx(0.5 * (0.8**2 + 0.1**2) / 2)
    assert stats["clip_fraction"] == 0.5
