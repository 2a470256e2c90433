"""Choice of experts by a router, which the trainer and the embedded engine share."""

import torch
from torch import Tensor

from aligner.models.shape import Experts

# transformers adds this to the sum by which it divides sigmoid scores.
_EPSILON = 1e-20


def compute_scores(logits: Tensor, experts: Experts) -> Tensor:
    """Return the scores of all experts, float32 [T, experts], from the router's logits.

    The choice of experts is sensitive to rounding, so everything runs in float32.

    Args:
        logits: Output of the router's matmul, [T, experts].
        experts: The mixture of experts.
    """
    logits = logits.float()
    return logits.softmax(-1) if experts.score_function == "softmax" else logits.sigmoid()


def choose_experts(scores: Tensor, experts: Experts, bias: Tensor | None) -> Tensor:
    """Return the ids of each token's experts, int64 [T, K].

    With groups, only the experts of the groups with the best scores can be chosen (DeepSeek-V3,
    section 2.1.2).

    Args:
        scores: Scores of the experts, float32 [T, experts].
        experts: The mixture of experts.
        bias: Correction bias of the scores, [experts]; None if the router has none. It affects the
            choice only.
    """
    scores = scores.detach()
    if bias is not None:
        scores = scores + bias.float()
    if experts.groups > 1:
        grouped = scores.unflatten(-1, (experts.groups, -1))
        # [T, groups]
        group_scores = grouped.topk(experts.scores_per_group, -1).values.sum(-1)
        groups = group_scores.topk(experts.groups_per_token, -1).indices
        is_open = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, groups, True)
        scores = grouped.masked_fill(~is_open[..., None], float("-inf")).flatten(-2)
    return scores.topk(experts.per_token, -1).indices


def compute_weights(scores: Tensor, expert_ids: Tensor, experts: Experts) -> Tensor:
    """Return the weights of each token's experts, float32 [T, K].

    They are differentiable with respect to the scores.

    Args:
        scores: Scores of the experts, float32 [T, experts].
        expert_ids: Ids of each token's experts, int64 [T, K].
        experts: The mixture of experts.
    """
    weights = scores.gather(-1, expert_ids)
    if experts.normalizes_weights:
        weights = weights / (weights.sum(-1, keepdim=True) + _EPSILON)
    return weights if experts.weight_scale == 1 else weights * experts.weight_scale
