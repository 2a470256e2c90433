"""On-policy distillation: what a teacher's log-probs of the policy's own tokens add to their advantages."""

import torch
from torch import Tensor


def reverse_kl(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log π(x_t) - log π_T(x_t) of tokens that the policy π drew; [B, T] each, to [B, T], 0 outside the mask.

    A single sample's estimate of KL(π ‖ π_T) at each token, which may be negative (k1 of `kl.approximate_kl`).
    """
    return torch.where(mask, logprobs - teacher_logprobs, 0.0)


def distillation_advantages(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, weight: float) -> Tensor:
    """weight · (log π_T(x_t) - log π(x_t)): each token's own reverse KL, of no later one; [B, T], 0 outside the mask.

    Their policy gradient is that of -weight · KL(π ‖ π_T) at each prefix that the policy has come to, summed over these
    (Lu et al. 2025, "On-Policy Distillation", Thinking Machines Lab; Agarwal et al. 2024, "On-Policy Distillation of
    Language Models", with the reverse KL).
    """
    return -weight * reverse_kl(logprobs, teacher_logprobs, mask)
