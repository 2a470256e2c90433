"""Distillation: the teacher's contribution to advantages, and divergences from the teacher."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from aligner.data.types import Rows, Stats
from aligner.schema import TeacherConfig


def reverse_kl(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return log π(x_t) - log π_T(x_t) for the tokens x_t that the policy π generated.

    The value is a single-sample estimate of KL(π ‖ π_T) at each token and may be negative (k1 of
    `kl.approximate_kl`).

    Args:
        logprobs: Log-probs `[B, T]` of the policy.
        teacher_logprobs: Log-probs `[B, T]` of the teacher.
        mask: bool `[B, T]`, true at the generated tokens.

    Returns:
        `[B, T]`, 0 outside the mask.
    """
    return torch.where(mask, logprobs - teacher_logprobs, 0.0)


def distillation_advantages(
    logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, weight: float
) -> Tensor:
    """Return the advantages weight · (log π_T(x_t) - log π(x_t)) of the generated tokens.

    The advantage of a token contains only the token's own reverse KL, not the reverse KL of later
    tokens. The policy gradient of these advantages is the gradient of -weight · KL(π ‖ π_T), summed
    over the prefixes that the policy generated (Lu et al. 2025, "On-Policy Distillation", Thinking
    Machines Lab; Agarwal et al. 2024, "On-Policy Distillation of Language Models", with the reverse
    KL).

    Args:
        logprobs: Log-probs `[B, T]` of the policy.
        teacher_logprobs: Log-probs `[B, T]` of the teacher.
        mask: bool `[B, T]`, true at the generated tokens.
        weight: Factor of the advantages.

    Returns:
        `[B, T]`, 0 outside the mask.
    """
    # The policy gradient of A = -log(π / π_T) at a sampled token estimates -∇ KL(π ‖ π_T).
    return -weight * reverse_kl(logprobs, teacher_logprobs, mask)


def divergence(kind: str, teacher: Tensor, policy: Tensor, beta: float = 0.5) -> Tensor:
    """Return the divergence between a policy and its teacher, at least 0, in nats.

    Args:
        kind: `forward_kl` for KL(teacher ‖ policy); `reverse_kl` for KL(policy ‖ teacher);
            `jensen_shannon` for beta KL(teacher ‖ M) + (1 - beta) KL(policy ‖ M) with
            M = beta teacher + (1 - beta) policy, the generalized Jensen-Shannon divergence (Agarwal
            et al. 2024, section 2). Divided by beta, this divergence tends to the forward KL for
            beta → 0; divided by 1 - beta, it tends to the reverse KL for beta → 1.
        teacher: Log-probs `[..., K]` of K outcomes.
        policy: Log-probs `[..., K]` of the same outcomes.
        beta: Weight of the teacher in `jensen_shannon`, between 0 and 1.

    Returns:
        `[...]`.

    Raises:
        ValueError: `kind` is unknown.
    """
    if kind == "forward_kl":
        return _kl_divergence(teacher, policy)
    if kind == "reverse_kl":
        return _kl_divergence(policy, teacher)
    if kind != "jensen_shannon":
        raise ValueError(
            f"unknown divergence {kind!r}; allowed: forward_kl, reverse_kl, jensen_shannon"
        )
    # log M = log(beta · teacher + (1 - beta) · policy)
    mixture = torch.logaddexp(teacher + math.log(beta), policy + math.log1p(-beta))
    return beta * _kl_divergence(teacher, mixture) + (1 - beta) * _kl_divergence(policy, mixture)


def distillation_loss(
    rows: Rows, teacher: TeacherConfig, reduce: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Stats]:
    """Return `teacher.weight` times the divergence `teacher.loss` from the teacher.

    The divergence at each prefix of the rows is over the teacher's candidate tokens and one more
    outcome, which stands for all other tokens.

    Args:
        rows: Rows with `candidate_targets` and `candidate_logprobs`.
        teacher: Section `teacher` of the configuration.
        reduce: Function from terms `[B, S-1]` to the contribution of these rows to the minibatch's
            mean over the mask.

    Returns:
        The loss, a scalar, and the statistic `teacher_divergence`, the divergence without the
        weight.
    """
    # [B, S-1, k+1]: k candidates and the remaining probability mass
    assert rows.candidate_targets is not None and rows.candidate_logprobs is not None
    mean_divergence = reduce(
        divergence(teacher.loss, rows.candidate_targets, rows.candidate_logprobs, teacher.beta)
    )
    return teacher.weight * mean_divergence, {"teacher_divergence": mean_divergence.detach()}


def _kl_divergence(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """Return KL(p ‖ q) over the last dimension."""
    return (p_logprobs.exp() * (p_logprobs - q_logprobs)).sum(-1)
