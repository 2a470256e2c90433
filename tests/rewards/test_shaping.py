from __future__ import annotations

import pytest
import torch

from aligner.rewards.shaping import penalized_rewards


def test_published_numbers_of_the_kl_penalty():
    rewards = penalized_rewards(torch.tensor([0.4]), torch.tensor([[-0.3315, -0.0426, 0.6351]]), 0.15, torch.ones(1, 3).bool())
    torch.testing.assert_close(rewards, torch.tensor([[0.049725, 0.00639, 0.304735]]))


def test_score_lands_on_the_last_response_token_and_nothing_leaks_through_the_mask():
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]]).bool()
    kl = torch.tensor([[float("nan"), 1.0, 2.0, float("inf")], [3.0, float("nan"), 9.0, 9.0]])
    rewards = penalized_rewards(torch.tensor([10.0, 20.0]), kl, 0.5, mask)
    assert rewards.tolist() == [[0.0, -0.5, 9.0, 0.0], [18.5, 0.0, 0.0, 0.0]]


def test_a_sequence_without_a_response_is_refused():
    with pytest.raises(ValueError, match="no response token"):
        penalized_rewards(torch.zeros(1), torch.zeros(1, 2), 0.1, torch.zeros(1, 2).bool())
