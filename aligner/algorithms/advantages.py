"""Advantage estimators."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation; [B, T] each, to advantages and returns [B, T], 0 outside the mask.

    A_t = Σ_k (γλ)^k δ_{t+k} with δ_t = r_t + γ V_{t+1} - V_t, the value after a row's last masked token being 0, and
    returns = A + V (Schulman et al. 2016, equation 16). `mask` is true on one contiguous stretch a row.
    """
    inside = mask.bool()
    values = torch.where(inside, values, 0.0)
    rewards = torch.where(inside, rewards, 0.0)
    advantages = torch.zeros_like(values)
    following = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(values[:, 0])
    for step in reversed(range(values.shape[1])):
        delta = rewards[:, step] + gamma * next_value - values[:, step]
        following = torch.where(inside[:, step], delta + gamma * lam * following, 0.0)
        next_value = values[:, step]
        advantages[:, step] = following
    return advantages, torch.where(inside, advantages + values, 0.0)
