"""Distillation: what a teacher's log-probs of the policy's tokens add to their advantages, and
divergences from it."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from aligner.data.types import Rows, Stats
from aligner.schema import TeacherConfig


def reverse_kl(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log π(x_t) - log π_T(x_t) of tokens that the policy π drew; [B, T] each, to [B, T], 0 outside
    the mask.

    A single sample's estimate of KL(π ‖ π_T) at each token, which may be negative (k1 of
    `kl.approximate_kl`).
    """
    return torch.where(mask, logprobs - teacher_logprobs, 0.0)


def distillation_advantages(
    logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, weight: float
) -> Tensor:
    """weight · (log π_T(x_t) - log π(x_t)): each token's own reverse KL, of no later one; [B, T], 0
    outside the mask.

    Their policy gradient is that of -weight · KL(π ‖ π_T) at each prefix that the policy has come
    to, summed over these (Lu et al. 2025, "On-Policy Distillation", Thinking Machines Lab; Agarwal
    et al. 2024, "On-Policy Distillation of Language Models", with the reverse KL).
    """
    return -weight * reverse_kl(logprobs, teacher_logprobs, mask)


def divergence(kind: str, teacher: Tensor, policy: Tensor, beta: float = 0.5) -> Tensor:
    """How far a policy is from its teacher, both log-probs [..., K] of the same K outcomes; [...],
    0 or more, in nats.

    `forward_kl` is KL(teacher ‖ policy), `reverse_kl` KL(policy ‖ teacher), and `jensen_shannon`
    the generalized one, beta KL(teacher ‖ M) + (1 - beta) KL(policy ‖ M) with M = beta teacher + (1
    - beta) policy (Agarwal et al. 2024, section 2). Over beta it tends to the forward KL as beta
    tends to 0, over 1 - beta to the reverse KL as it tends to 1. Raises ValueError for another
    name.
    """
    if kind == "forward_kl":
        return _kl(teacher, policy)
    if kind == "reverse_kl":
        return _kl(policy, teacher)
    if kind != "jensen_shannon":
        raise ValueError(
            f"unknown divergence {kind!r}; allowed: forward_kl, reverse_kl, jensen_shannon"
        )
    mixture = torch.logaddexp(teacher + math.log(beta), policy + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(policy, mixture)


def distillation_loss(
    rows: Rows, teacher: TeacherConfig, total: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Stats]:
    """`teacher.weight` times `teacher.loss` of the policy at each prefix of the rows, and what it
    is without the weight.

    Over the teacher's candidates, and all other tokens as one outcome more; `total` makes of terms
    [B, S-1] the rows' part of the minibatch's mean over the mask.
    """
    assert rows.candidate_targets is not None and rows.candidate_logprobs is not None
    apart = total(
        divergence(teacher.loss, rows.candidate_targets, rows.candidate_logprobs, teacher.beta)
    )
    return teacher.weight * apart, {"teacher_divergence": apart.detach()}


def _kl(of: Tensor, to: Tensor) -> Tensor:
    return (of.exp() * (of - to)).sum(-1)
