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


def test_published_numbers_of_the_kl_penalty():
    rewards = penalized_rewards(
        torch.tensor([0.4]),
        torch.tensor([[-0.3315, -0.0426, 0.6351]]),
        0.15,
        torch.ones(1, 3).bool(),
    )
    torch.testing.assert_close(rewards, torch.tensor([[0.049725, 0.00639, 0.304735]]))


def test_score_lands_on_the_last_response_token_and_nothing_leaks_through_the_mask():
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]]).bool()
    kl = torch.tensor([[float("nan"), 1.0, 2.0, float("inf")], [3.0, float("nan"), 9.0, 9.0]])
    rewards = penalized_rewards(torch.tensor([10.0, 20.0]), kl, 0.5, mask)
    assert rewards.tolist() == [[0.0, -0.5, 9.0, 0.0], [18.5, 0.0, 0.0, 0.0]]


def test_a_sequence_without_a_response_is_refused():
    with pytest.raises(ValueError, match="every sequence must have at least one response token"):
        penalized_rewards(torch.zeros(1), torch.zeros(1, 2), 0.1, torch.zeros(1, 2).bool())


def test_published_numbers_of_the_overlong_penalty():
    lengths = tensor([1, 80, 85, 90, 100, 130])
    expected = tensor([0.0, 0.0, -0.25, -0.5, -1.0, -1.0])
    torch.testing.assert_close(overlong_penalty(lengths, max_length=100, buffer=20), expected)


@pytest.mark.parametrize("buffer", [0, 101])
def test_an_overlong_buffer_that_is_none_is_refused(buffer):
    with pytest.raises(ValueError, match=rf"buffer={buffer}: must be in \[1, max_length=100\]"):
        overlong_penalty(tensor([5]), max_length=100, buffer=buffer)


def test_the_length_penalty_is_that_of_a_loop_over_the_responses():
    lengths = tensor([1, 7, 50, 64])
    for coefficient, target in ((0.0003, 0), (0.5, 7), (0.02, 100)):
        expected = [
            -coefficient * max(length - target, target - length) for length in lengths.tolist()
        ]
        assert length_penalty(lengths, coefficient, target).tolist() == pytest.approx(expected)


def test_a_response_without_the_token_gets_a_fixed_score():
    scores, found = tensor([0.5, float("nan"), 2.0]), tensor([True, False, True])
    assert missing_token_penalty(scores, found).tolist() == [0.5, -1.0, 2.0]
    assert missing_token_penalty(scores, found, penalty=-3.0).tolist() == [0.5, -3.0, 2.0]


def test_published_numbers_of_reward_normalization():
    rewards = tensor([2.0, 4.0, 6.0, 8.0])
    normalizer = RewardNormalizer.fit(rewards)
    assert (normalizer.gain, normalizer.bias) == (
        pytest.approx(0.44721, abs=1e-5),
        pytest.approx(-2.23607, abs=1e-5),
    )
    normalized = normalizer(rewards)
    assert normalized.mean().item() == pytest.approx(0, abs=1e-6)
    assert normalized.std(correction=0).item() == pytest.approx(1)


def test_normalizations_before_and_after_training_are_one():
    before = RewardNormalizer.fit(tensor([1.0, 2.0, 6.0]))
    trained = tensor([0.3, -1.0, 5.0, 2.0])
    after = RewardNormalizer.fit(before(trained), mean=1.5, std=2.0)
    together = RewardNormalizer(after.gain * before.gain, after.gain * before.bias + after.bias)
    torch.testing.assert_close(together(trained), after(before(trained)))
    assert together(trained).mean().item() == pytest.approx(1.5)
    assert together(trained).std(correction=0).item() == pytest.approx(2.0)


@pytest.mark.parametrize("scores", [[], [0.1, 0.1, 0.1], [1.0, float("nan")], [1.0, float("inf")]])
def test_scores_without_a_deviation_are_refused(scores):
    with pytest.raises(ValueError, match=r"scores are equal|must be finite"):
        RewardNormalizer.fit(tensor(scores))
