"""Advantage estimators, as functions of tensors and by name (`algorithm.advantage`).

In a grouped estimator the `group_size` responses to one prompt are next to each other, and have
advantages of exactly 0 where their scores are equal. If the reward function abstained on some
responses, prompts have groups of different sizes: each size is then computed separately.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from aligner.data.types import ScoredSamples
from aligner.schema import AlgorithmConfig


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the values where `mask` is true; over everything, or along `dim`. 0 where nothing is
    chosen."""
    chosen = torch.where(mask.bool(), values, 0.0)
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    total = chosen.sum() if dim is None else chosen.sum(dim)
    return total / count.clamp(min=1)


def masked_whiten(
    values: Tensor, mask: Tensor, shift_mean: bool = True, dim: int | None = None
) -> Tensor:
    """Values scaled to variance 1 over the mask, and to mean 0 unless `shift_mean` is false; 0
    outside the mask.

    Over everything, or along `dim`. Population variance, 1/√(variance + 1e-8) (Huang et al. 2023,
    "The N Implementation Details of RLHF with PPO", detail 11). Values that are all equal have
    exactly no deviation from their mean.
    """

    def mean_of(tensor: Tensor) -> Tensor:
        mean = masked_mean(tensor, mask, dim)
        return mean if dim is None else mean.unsqueeze(dim)

    def largest_of(tensor: Tensor) -> Tensor:
        inside = torch.where(mask.bool(), tensor, -torch.inf)
        return inside.max() if dim is None else inside.amax(dim, keepdim=True)

    mean = mean_of(values)
    # The mean of equal values is rounded, and what is left of them would be blown up.
    centered = torch.where(largest_of(values) == -largest_of(-values), 0.0, values - mean)
    variance = mean_of(centered.square())
    whitened = centered * torch.rsqrt(variance + 1e-8)
    return torch.where(mask.bool(), whitened if shift_mean else whitened + mean, 0.0)


Estimate = Callable[[ScoredSamples, AlgorithmConfig], Tensor | tuple[Tensor, Tensor]]
"""From a step's samples and the configuration's `algorithm` to advantages, one a response [B] or
one a token [B, S-1]; with a critic also to returns, [B, S-1], which the critic learns."""

_GRPO_EPSILON = 1e-4
"""Added to a group's standard deviation, which is 0 where all its scores are equal."""


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation; [B, T] each, to advantages and returns [B, T], 0 outside
    the mask.

    A_t = Σ_k (γλ)^k δ_{t+k} with δ_t = r_t + γ V_{t+1} - V_t, and returns = A + V (Schulman et al.
    2016, equation 16). The value after a row's last masked token is its `last_values` [B], 0 where
    None: a response that was cut would have gone on (Pardo et al. 2018, "Time Limits in
    Reinforcement Learning", section 3). The masked tokens are the steps: a token outside the mask,
    between two of them or around them, is none.
    """
    inside = mask.bool()
    values = torch.where(inside, values, 0.0)
    rewards = torch.where(inside, rewards, 0.0)
    advantages = torch.zeros_like(values)
    following = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(values[:, 0]) if last_values is None else last_values
    for step in reversed(range(values.shape[1])):
        delta = rewards[:, step] + gamma * next_value - values[:, step]
        following = torch.where(inside[:, step], delta + gamma * lam * following, following)
        next_value = torch.where(inside[:, step], values[:, step], next_value)
        advantages[:, step] = following
    return torch.where(inside, advantages, 0.0), torch.where(inside, advantages + values, 0.0)


def reinforce(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """The discounted return from each token on, G_t = Σ_k γ^k r_{t+k}; [B, T] to [B, T], 0 outside
    the mask.

    Williams 1992. Steps are the masked tokens, as in `gae`, of which it is the return with λ = 1
    and values of 0.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[0]


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """The returns of `reinforce`, whitened over all tokens of the batch; [B, T] to [B, T], 0
    outside the mask.

    Hu 2025, "REINFORCE++", where the KL penalty is part of each token's reward.
    """
    return masked_whiten(reinforce(rewards, mask, gamma), mask)


def rloo(scores: Tensor, group_size: int) -> Tensor:
    """Each score minus the mean of its group's others; [B] to [B] (Ahmadian et al. 2024, "Back to
    Basics", section 3.2).

    Raises ValueError for a group without others, or that B is no multiple of.
    """
    groups = _groups(scores, group_size)
    others = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    return _of_unequal(groups, groups - others).flatten()


def grpo(scores: Tensor, group_size: int) -> Tensor:
    """Each score minus its group's mean, over its group's sample deviation + 1e-4; [B] to [B].

    Shao et al. 2024, "DeepSeekMath", section 4.1.2. Raises ValueError as `rloo` does.
    """
    groups = _groups(scores, group_size)
    centered = _of_unequal(groups, groups - groups.mean(1, keepdim=True))
    return (centered / (groups.std(1, keepdim=True) + _GRPO_EPSILON)).flatten()


def grpo_steps(rewards: Tensor, ends: Tensor, mask: Tensor, group_size: int) -> Tensor:
    """Of each token the sum over the steps that end with it or behind it of their rewards,
    normalized within the group.

    A step's reward less the mean of all the group's steps, over their sample deviation + 1e-4: GRPO
    with process supervision (Shao et al. 2024, "DeepSeekMath", section 4.1.3). Steps end at `ends`,
    bool [B, T]; what else of the rewards [B, T] a response got, as for its answer, counts with its
    last step, or with its last token if it has none. [B, T], 0 outside the mask. Raises ValueError
    as `rloo` does.
    """
    _check_groups(len(rewards), group_size)
    places, ends = torch.arange(mask.shape[1]), ends & mask
    last = torch.where(ends, places, -1).amax(1, keepdim=True)
    last = torch.where(last < 0, torch.where(mask, places, 0).amax(1, keepdim=True), last)
    at_ends = torch.where(ends, rewards, 0.0)
    at_ends = at_ends.scatter_add(
        1, last, torch.where(mask & ~ends, rewards, 0.0).sum(1, keepdim=True)
    )
    ends = ends.scatter(1, last, True)
    for first in range(0, len(rewards), group_size):
        rows = slice(first, first + group_size)
        own = at_ends[rows][ends[rows]]
        compared = own - own.mean() if own.amax() > own.amin() else torch.zeros_like(own)
        scaled = compared / (own.std() + _GRPO_EPSILON) if len(own) > 1 else compared
        at_ends[rows] = at_ends[rows].masked_scatter(ends[rows], scaled)
    return torch.where(mask, at_ends.flip(1).cumsum(1).flip(1), 0.0)


def dr_grpo(scores: Tensor, group_size: int) -> Tensor:
    """Each score minus its group's mean; [B] to [B] (Liu et al. 2025, "Understanding R1-Zero-Like
    Training", section 3).

    Raises ValueError as `rloo` does.
    """
    groups = _groups(scores, group_size)
    return _of_unequal(groups, groups - groups.mean(1, keepdim=True)).flatten()


def group_whiten(advantages: Tensor, mask: Tensor, group_size: int) -> Tensor:
    """Advantages whitened over the masked tokens of each group of rows; [B, T] to [B, T], 0 outside
    the mask.

    A row without a masked token has no part in its group's mean and variance. Raises ValueError as
    `rloo` does.
    """
    _check_groups(len(advantages), group_size)
    groups = len(advantages) // group_size
    # reshape, not view: a slice of a wider tensor is not contiguous.
    return masked_whiten(advantages.reshape(groups, -1), mask.reshape(groups, -1), dim=1).view(
        advantages.shape
    )


def _groups(scores: Tensor, group_size: int) -> Tensor:
    """[B] to [B / group_size, group_size], in floating point."""
    if scores.ndim != 1:
        raise ValueError(
            f"scores: got shape {tuple(scores.shape)}, must be [B], one score per response"
        )
    _check_groups(len(scores), group_size)
    return (scores if scores.is_floating_point() else scores.float()).reshape(-1, group_size)


def _of_unequal(groups: Tensor, compared: Tensor) -> Tensor:
    """What a group's scores compare as, exactly 0 where they are all equal: their mean is rounded,
    and differs from them."""
    return torch.where(groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True), 0.0, compared)


def _check_groups(rows: int, group_size: int) -> None:
    if group_size < 2:
        raise ValueError(
            f"group_size={group_size}: must be >= 2, because responses to the same prompt are"
            " compared"
        )
    if rows % group_size:
        raise ValueError(
            f"the number of rows, {rows}, must be a multiple of group_size={group_size}"
        )


def groups_by_size(groups: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield the rows, int64 [N], of all groups of one size, and that size.

    Args:
        groups: int64 [B], the group of each row; rows of a group are next to each other.
    """
    _, of_rows, counts = groups.unique_consecutive(return_inverse=True, return_counts=True)
    for size in counts.unique().tolist():
        yield (counts[of_rows] == size).nonzero()[:, 0], size


def _of_responses(of_scores: Callable[[Tensor, int], Tensor]) -> Estimate:
    """A grouped estimator of whole responses: of their scores, less a KL penalty in the reward; a
    branch has its sample's."""

    def estimate(samples: ScoredSamples, settings: AlgorithmConfig) -> Tensor:
        rewards, groups = samples.rewards.sum(1), samples.groups
        if samples.episodes is not None:
            rewards, groups = rewards[~samples.is_branch], groups[~samples.is_branch]
        advantages = torch.zeros_like(rewards)
        for rows, size in groups_by_size(groups):
            advantages[rows] = of_scores(rewards[rows], size)
        return advantages if samples.episodes is None else advantages[samples.places]

    return estimate


def _of_steps(samples: ScoredSamples, settings: AlgorithmConfig) -> Tensor:
    assert samples.step_ends is not None, "grpo_steps requires step rewards"
    advantages = torch.zeros_like(samples.rewards)
    for rows, size in groups_by_size(samples.groups):
        advantages[rows] = grpo_steps(
            samples.rewards[rows], samples.step_ends[rows], samples.mask[rows], size
        )
    return advantages


def _with_critic(samples: ScoredSamples, settings: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    assert samples.values is not None, "gae requires a critic"
    return gae(
        samples.rewards,
        samples.values,
        samples.mask,
        settings.gamma,
        settings.lam,
        samples.cut_values,
    )


ESTIMATORS: Mapping[str, Estimate] = {
    "gae": _with_critic,
    "reinforce": lambda samples, settings: reinforce(samples.rewards, samples.mask, settings.gamma),
    "reinforce_plus_plus": lambda samples, settings: reinforce_plus_plus(
        samples.rewards, samples.mask, settings.gamma
    ),
    "rloo": _of_responses(rloo),
    "grpo": _of_responses(grpo),
    "grpo_steps": _of_steps,
    "dr_grpo": _of_responses(dr_grpo),
    "none": lambda samples, settings: torch.zeros_like(samples.rewards),
}
