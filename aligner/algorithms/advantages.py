"""Advantage estimators, and the masked mean and whitening that they use.

Each estimator is a function of tensors. `ESTIMATORS` contains the estimators by their names in
`algorithm.advantage`. A grouped estimator compares the `group_size` responses to the same prompt,
which are consecutive rows. If all scores of a group are equal, its advantages are exactly 0. If the
reward function abstained on some responses, the groups have different sizes; each size is then
computed separately.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from aligner.data.types import ScoredSamples
from aligner.schema import AlgorithmConfig


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of the values where `mask` is true, over all dimensions or along `dim`.

    The mean over no values is 0.
    """
    masked_values = torch.where(mask.bool(), values, 0.0)
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    total = masked_values.sum() if dim is None else masked_values.sum(dim)
    return total / count.clamp(min=1)


def masked_whiten(
    values: Tensor, mask: Tensor, shift_mean: bool = True, dim: int | None = None
) -> Tensor:
    """Return the values scaled to variance 1 over the mask, and shifted to mean 0.

    The scale is 1/√(population variance + 1e-8) (Huang et al. 2023, "The N Implementation Details
    of RLHF with PPO", detail 11). If all values are equal, their deviation from the mean is exactly
    0.

    Args:
        values: Values to whiten.
        mask: Mask in the shape of `values`. Only values where the mask is true enter the mean and
            the variance.
        shift_mean: False keeps the mean of the values.
        dim: Dimension to whiten along; None whitens over all dimensions.

    Returns:
        A tensor of the shape of `values`, 0 outside the mask.
    """

    def broadcast_mean(tensor: Tensor) -> Tensor:
        mean = masked_mean(tensor, mask, dim)
        return mean if dim is None else mean.unsqueeze(dim)

    def broadcast_max(tensor: Tensor) -> Tensor:
        masked_values = torch.where(mask.bool(), tensor, -torch.inf)
        return masked_values.max() if dim is None else masked_values.amax(dim, keepdim=True)

    mean = broadcast_mean(values)
    # The mean of equal values is rounded. Dividing by a standard deviation of about 0 would amplify
    # the rounding error, so equal values (maximum = minimum) are centered to exactly 0.
    is_constant = broadcast_max(values) == -broadcast_max(-values)
    centered = torch.where(is_constant, 0.0, values - mean)
    variance = broadcast_mean(centered.square())
    whitened = centered * torch.rsqrt(variance + 1e-8)
    return torch.where(mask.bool(), whitened if shift_mean else whitened + mean, 0.0)


AdvantageEstimator = Callable[[ScoredSamples, AlgorithmConfig], Tensor | tuple[Tensor, Tensor]]
"""Function from the samples of a step and the section `algorithm` to advantages.

The advantages have shape `[B]`, one for each response, or `[B, S-1]`, one for each token. With a
critic the function returns a tuple of the advantages and the returns `[B, S-1]`, which are the
targets of the critic.
"""

# Added to the standard deviation of a group, which is 0 if all its scores are equal.
_GRPO_EPSILON = 1e-4


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns of generalized advantage estimation.

    A_t = Σ_k (γλ)^k δ_{t+k} with δ_t = r_t + γ V_{t+1} - V_t, and returns = A + V (Schulman et al.
    2016, equation 16). The time steps are the masked tokens. Tokens before, between and after the
    masked tokens are skipped.

    Args:
        rewards: `[B, T]`.
        values: Values of the critic `[B, T]`.
        mask: `[B, T]`, true at the time steps.
        gamma: Discount factor γ.
        lam: Exponential weight λ.
        last_values: Value after the last masked token of each row, `[B]`; None means 0. It
            estimates the rewards that a truncated response would still have received (Pardo et al.
            2018, "Time Limits in Reinforcement Learning", section 3).

    Returns:
        Advantages and returns, `[B, T]`, 0 outside the mask.
    """
    inside = mask.bool()
    values = torch.where(inside, values, 0.0)
    rewards = torch.where(inside, rewards, 0.0)

    advantages = torch.zeros_like(values)
    next_advantage = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(values[:, 0]) if last_values is None else last_values
    for step in reversed(range(values.shape[1])):
        delta = rewards[:, step] + gamma * next_value - values[:, step]
        # A token outside the mask is not a time step, so the next step's values stay unchanged.
        next_advantage = torch.where(
            inside[:, step], delta + gamma * lam * next_advantage, next_advantage
        )
        next_value = torch.where(inside[:, step], values[:, step], next_value)
        advantages[:, step] = next_advantage
    return torch.where(inside, advantages, 0.0), torch.where(inside, advantages + values, 0.0)


def reinforce(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return the discounted return from each token on, G_t = Σ_k γ^k r_{t+k}.

    Williams 1992. The time steps are the masked tokens, as in `gae`; the result equals the returns
    of `gae` with λ = 1 and values of 0.

    Args:
        rewards: `[B, T]`.
        mask: `[B, T]`, true at the time steps.
        gamma: Discount factor γ.

    Returns:
        `[B, T]`, 0 outside the mask.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[0]


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return the returns of `reinforce`, whitened over all masked tokens of the batch.

    Hu 2025, "REINFORCE++". In that paper the reward of each token includes the KL penalty.

    Args:
        rewards: `[B, T]`.
        mask: `[B, T]`, true at the time steps.
        gamma: Discount factor γ.

    Returns:
        `[B, T]`, 0 outside the mask.
    """
    return masked_whiten(reinforce(rewards, mask, gamma), mask)


def rloo(scores: Tensor, group_size: int) -> Tensor:
    """Return each score minus the mean of the other scores of its group.

    Ahmadian et al. 2024, "Back to Basics", section 3.2.

    Args:
        scores: `[B]`; the rows of a group are consecutive.
        group_size: Number of rows of each group.

    Returns:
        `[B]`.

    Raises:
        ValueError: `group_size` is below 2 or does not divide B.
    """
    groups = _group_scores(scores, group_size)
    other_means = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    return _zero_equal_groups(groups, groups - other_means).flatten()


def grpo(scores: Tensor, group_size: int) -> Tensor:
    """Return each score minus its group's mean, divided by (the group's deviation + 1e-4).

    The deviation is the sample standard deviation (Shao et al. 2024, "DeepSeekMath", section
    4.1.2).

    Args:
        scores: `[B]`; the rows of a group are consecutive.
        group_size: Number of rows of each group.

    Returns:
        `[B]`.

    Raises:
        ValueError: `group_size` is below 2 or does not divide B.
    """
    groups = _group_scores(scores, group_size)
    centered = _zero_equal_groups(groups, groups - groups.mean(1, keepdim=True))
    return (centered / (groups.std(1, keepdim=True) + _GRPO_EPSILON)).flatten()


def grpo_steps(rewards: Tensor, ends: Tensor, mask: Tensor, group_size: int) -> Tensor:
    """Return each token's sum of the normalized rewards of all steps that end at the token or
    later.

    This is GRPO with process supervision (Shao et al. 2024, "DeepSeekMath", section 4.1.3). The
    reward of a step is normalized within the group: minus the mean over all steps of the group,
    divided by (their sample standard deviation + 1e-4).

    Args:
        rewards: `[B, T]`. Rewards at tokens that end no step, such as the reward of the answer, are
            added to the last step of the row. A row without steps counts as one step that ends at
            its last masked token.
        ends: bool `[B, T]`, true at the last token of each step.
        mask: bool `[B, T]`, true at the response tokens.
        group_size: Number of rows of each group; they are consecutive.

    Returns:
        `[B, T]`, 0 outside the mask.

    Raises:
        ValueError: `group_size` is below 2 or does not divide B.
    """
    _check_groups(len(rewards), group_size)
    positions = torch.arange(mask.shape[1])
    ends = ends & mask

    # Position of the last step's end in each row, or of the last masked token if the row has no
    # step.
    last = torch.where(ends, positions, -1).amax(1, keepdim=True)
    last = torch.where(last < 0, torch.where(mask, positions, 0).amax(1, keepdim=True), last)

    step_rewards = torch.where(ends, rewards, 0.0)
    step_rewards = step_rewards.scatter_add(
        1, last, torch.where(mask & ~ends, rewards, 0.0).sum(1, keepdim=True)
    )
    ends = ends.scatter(1, last, True)

    for first in range(0, len(rewards), group_size):
        rows = slice(first, first + group_size)
        step_rewards[rows] = step_rewards[rows].masked_scatter(
            ends[rows], _normalize(step_rewards[rows][ends[rows]])
        )

    # Suffix sum: each token gets the normalized rewards of its own step and of all later steps.
    return torch.where(mask, step_rewards.flip(1).cumsum(1).flip(1), 0.0)


def grpo_turns(rewards: Tensor, mask: Tensor, groups: Tensor, gamma: float) -> Tensor:
    """Return for each token the return of its turn, normalized over all turns of the group.

    The return of turn k of a row is G_k = Σ_{j≥k} γ^(j-k) R_j, where R_j is the sum of the rewards
    of the tokens of turn j. A turn is a run of consecutive masked tokens. Returns are normalized as
    scores are in `grpo` (Baronio et al. 2025, "Kevin: Multi-Turn RL for Generating CUDA Kernels").

    Args:
        rewards: `[B, T]`.
        mask: bool `[B, T]`, true at the response tokens.
        groups: Group of each row, int64 `[B]`, in any order.
        gamma: Discount factor γ per turn.

    Returns:
        `[B, T]`, 0 outside the mask.
    """
    is_start = mask.clone()
    is_start[:, 1:] &= ~mask[:, :-1]
    turn_counts = is_start.sum(1, keepdim=True)
    # turn of each masked token; the other tokens have a valid index, too
    turns = (is_start.cumsum(1) - 1).clamp_min(0)
    width = int(turns.max()) + 1

    returns = rewards.new_zeros(len(rewards), width)
    returns = returns.scatter_add(1, turns, torch.where(mask, rewards, 0.0))
    for turn in reversed(range(width - 1)):
        returns[:, turn] += gamma * returns[:, turn + 1]

    is_turn = torch.arange(width) < turn_counts
    for group in groups.unique():
        in_group = is_turn & (groups == group)[:, None]
        returns[in_group] = _normalize(returns[in_group])
    return torch.where(mask, returns.gather(1, turns), 0.0)


def dr_grpo(scores: Tensor, group_size: int) -> Tensor:
    """Return each score minus the mean of its group.

    Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.

    Args:
        scores: `[B]`; the rows of a group are consecutive.
        group_size: Number of rows of each group.

    Returns:
        `[B]`.

    Raises:
        ValueError: `group_size` is below 2 or does not divide B.
    """
    groups = _group_scores(scores, group_size)
    return _zero_equal_groups(groups, groups - groups.mean(1, keepdim=True)).flatten()


def group_whiten(advantages: Tensor, mask: Tensor, group_size: int) -> Tensor:
    """Return the advantages whitened over the masked tokens of each group of rows.

    A row without a masked token does not affect the mean and the variance of its group.

    Args:
        advantages: `[B, T]`; the rows of a group are consecutive.
        mask: `[B, T]`.
        group_size: Number of rows of each group.

    Returns:
        `[B, T]`, 0 outside the mask.

    Raises:
        ValueError: `group_size` is below 2 or does not divide B.
    """
    _check_groups(len(advantages), group_size)
    group_count = len(advantages) // group_size
    # reshape instead of view: a slice of a wider tensor is not contiguous.
    return masked_whiten(
        advantages.reshape(group_count, -1), mask.reshape(group_count, -1), dim=1
    ).view(advantages.shape)


def _group_scores(scores: Tensor, group_size: int) -> Tensor:
    """Return scores `[B]` as a floating-point tensor `[B / group_size, group_size]`."""
    if scores.ndim != 1:
        raise ValueError(
            f"scores: got shape {tuple(scores.shape)}, must be [B], one score per response"
        )
    _check_groups(len(scores), group_size)
    return (scores if scores.is_floating_point() else scores.float()).reshape(-1, group_size)


def _normalize(values: Tensor) -> Tensor:
    """Return values `[N]` minus their mean, divided by (their sample deviation + 1e-4).

    Equal values, also a single one, are normalized to exactly 0; their rounded mean can differ
    from them.
    """
    if not len(values) or values.amax() == values.amin():
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std() + _GRPO_EPSILON)


def _zero_equal_groups(groups: Tensor, advantages: Tensor) -> Tensor:
    """Return the advantages, set to exactly 0 in every group whose scores are all equal.

    The mean of equal scores is rounded, and the rounded mean can differ from them.
    """
    is_equal = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    return torch.where(is_equal, 0.0, advantages)


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
    """Yield for each group size the rows of all groups of that size, int64 `[N]`, and the size.

    Args:
        groups: Group of each row, int64 `[B]`; the rows of a group are consecutive.
    """
    _, group_indices, counts = groups.unique_consecutive(return_inverse=True, return_counts=True)
    for size in counts.unique().tolist():
        yield (counts[group_indices] == size).nonzero()[:, 0], size


def _build_response_estimator(
    estimate_scores: Callable[[Tensor, int], Tensor],
) -> AdvantageEstimator:
    """Return a grouped estimator that applies `estimate_scores` to the scores of whole responses.

    The score of a response is the sum of its rewards, which may include the KL penalty. The
    branches of an episode get the advantage of the episode's sample.
    """

    def estimate(samples: ScoredSamples, settings: AlgorithmConfig) -> Tensor:
        """Return an advantage for each response, float32 [N], from the rewards of its group."""
        rewards = samples.rewards.sum(1)
        groups = samples.groups
        if samples.episodes is not None:
            # A group compares episodes, so that an episode with many branches counts once.
            rewards = rewards[~samples.is_branch]
            groups = groups[~samples.is_branch]

        advantages = torch.zeros_like(rewards)
        for rows, size in groups_by_size(groups):
            advantages[rows] = estimate_scores(rewards[rows], size)
        return advantages if samples.episodes is None else advantages[samples.episode_indices]

    return estimate


def _estimate_grpo_steps(samples: ScoredSamples, settings: AlgorithmConfig) -> Tensor:
    assert samples.step_ends is not None, "grpo_steps requires step rewards"
    advantages = torch.zeros_like(samples.rewards)
    for rows, size in groups_by_size(samples.groups):
        advantages[rows] = grpo_steps(
            samples.rewards[rows], samples.step_ends[rows], samples.mask[rows], size
        )
    return advantages


def _estimate_gae(samples: ScoredSamples, settings: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    assert samples.values is not None, "gae requires a critic"
    return gae(
        samples.rewards,
        samples.values,
        samples.mask,
        settings.gamma,
        settings.lam,
        samples.cut_values,
    )


ESTIMATORS: Mapping[str, AdvantageEstimator] = {
    "gae": _estimate_gae,
    "reinforce": lambda samples, settings: reinforce(samples.rewards, samples.mask, settings.gamma),
    "reinforce_plus_plus": lambda samples, settings: reinforce_plus_plus(
        samples.rewards, samples.mask, settings.gamma
    ),
    "rloo": _build_response_estimator(rloo),
    "grpo": _build_response_estimator(grpo),
    "grpo_steps": _estimate_grpo_steps,
    "grpo_turns": lambda samples, settings: grpo_turns(
        samples.rewards, samples.mask, samples.groups, settings.gamma
    ),
    "dr_grpo": _build_response_estimator(dr_grpo),
    "none": lambda samples, settings: torch.zeros_like(samples.rewards),
}
"""Built-in estimators by their name in `algorithm.advantage`."""
