"""Test KL, length and missing-token penalties, and the normalization of rewards."""

from __future__ import annotations

import pytest
import torch
from torch import tensor

from aligner.algorithms.score_shaping import (
    length_penalty,
    missing_token_penalty,
    overlong_penalty,
    penalized_rewards,
)
from aligner.rewards.sources import RewardNormalizer


def test_kl_penalty_equals_published_values():
    rewards = penalized_rewards(
        torch.tensor([0.4]),
        torch.tensor([[-0.3315, -0.0426, 0.6351]]),
        0.15,
        torch.ones(1, 3).bool(),
    )
    torch.testing.assert_close(rewards, torch.tensor([[0.049725, 0.00639, 0.304735]]))


def test_score_is_added_to_last_response_token():
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]]).bool()
    kl = torch.tensor([[float("nan"), 1.0, 2.0, float("inf")], [3.0, float("nan"), 9.0, 9.0]])
    rewards = penalized_rewards(torch.tensor([10.0, 20.0]), kl, 0.5, mask)
    assert rewards.tolist() == [[0.0, -0.5, 9.0, 0.0], [18.5, 0.0, 0.0, 0.0]]


def test_sequence_without_response_is_refused():
    with pytest.raises(ValueError, match="every sequence must have at least one response token"):
        penalized_rewards(torch.zeros(1), torch.zeros(1, 2), 0.1, torch.zeros(1, 2).bool())


def test_overlong_penalty_equals_published_values():
    lengths = tensor([1, 80, 85, 90, 100, 130])
    expected = tensor([0.0, 0.0, -0.25, -0.5, -1.0, -1.0])
    torch.testing.assert_close(overlong_penalty(lengths, max_length=100, buffer=20), expected)


@pytest.mark.parametrize("buffer", [0, 101])
def test_invalid_overlong_buffer_is_refused(buffer):
    with pytest.raises(ValueError, match=rf"buffer={buffer}: must be in \[1, max_length=100\]"):
        overlong_penalty(tensor([5]), max_length=100, buffer=buffer)


def test_length_penalty_equals_loop_over_responses():
    lengths = tensor([1, 7, 50, 64])
    for coefficient, target in ((0.0003, 0), (0.5, 7), (0.02, 100)):
        expected = [
            -coefficient * max(length - target, target - length) for length in lengths.tolist()
        ]
        assert length_penalty(lengths, coefficient, target).tolist() == pytest.approx(expected)


def test_missing_token_gives_a_fixed_score():
    scores, found = tensor([0.5, float("nan"), 2.0]), tensor([True, False, True])
    assert missing_token_penalty(scores, found).tolist() == [0.5, -1.0, 2.0]
    assert missing_token_penalty(scores, found, penalty=-3.0).tolist() == [0.5, -3.0, 2.0]


def test_reward_normalization_equals_published_values():
    rewards = tensor([2.0, 4.0, 6.0, 8.0])
    normalizer = RewardNormalizer.fit(rewards)
    assert (normalizer.gain, normalizer.bias) == (
        pytest.approx(0.44721, abs=1e-5),
        pytest.approx(-2.23607, abs=1e-5),
    )
    normalized = normalizer(rewards)
    assert normalized.mean().item() == pytest.approx(0, abs=1e-6)
    assert normalized.std(correction=0).item() == pytest.approx(1)


def test_chained_normalizations_equal_a_single_one():
    before = RewardNormalizer.fit(tensor([1.0, 2.0, 6.0]))
    trained = tensor([0.3, -1.0, 5.0, 2.0])
    after = RewardNormalizer.fit(before(trained), mean=1.5, std=2.0)
    combined = RewardNormalizer(after.gain * before.gain, after.gain * before.bias + after.bias)
    torch.testing.assert_close(combined(trained), after(before(trained)))
    assert combined(trained).mean().item() == pytest.approx(1.5)
    assert combined(trained).std(correction=0).item() == pytest.approx(2.0)


@pytest.mark.parametrize("scores", [[], [0.1, 0.1, 0.1], [1.0, float("nan")], [1.0, float("inf")]])
def test_reward_normalizer_refuses_equal_or_nonfinite_scores(scores):
    with pytest.raises(ValueError, match=r"scores are equal|must be finite"):
        RewardNormalizer.fit(tensor(scores))
