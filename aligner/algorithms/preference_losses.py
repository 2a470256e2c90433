"""Losses of pairs of answers (chosen and rejected) and of answers with a label.

Except for `pair_loss`, the arguments contain one number for each pair or answer, `[B]`.

Each loss and each statistic is the mean over the pairs or answers or, with `denominator`, their sum
divided by `denominator`. With the number of pairs of the whole batch as the denominator, the
results of the parts of a batch add up to the result of the batch.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from aligner.schema import PreferenceConfig


def pair_loss(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    settings: PreferenceConfig,
    pairs: float,
    weights: Tensor | None = None,
    margins: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the preference loss `settings.kind` of pairs of rows, and its statistics.

    The rows are chosen, rejected, chosen, rejected, …

    Args:
        logprobs: Log-probs `[2P, T]` of the policy, differentiable.
        reference_logprobs: Log-probs `[2P, T]` of the reference model; ignored if the kind has no
            reference.
        mask: bool `[2P, T]`, true at the response tokens.
        settings: Section `algorithm.preference` of the configuration.
        pairs: Divisor of the sums over pairs.
        weights: Weights `[P]` of the pairs' terms in the loss, but not in the statistics; None
            means 1.
        margins: Reward of the chosen answer minus reward of the rejected answer, `[P]`; required by
            the rpo kinds.

    Returns:
        The loss, a scalar, and the statistics `loss`, `chosen_nll` (negative log-likelihood per
        token of the chosen answers) and the statistics of `dpo_stats`.

    Raises:
        ValueError: The kind requires margins, and `margins` is None.
    """
    lengths = mask.sum(1).clamp(min=1)
    if not settings.has_reference:
        reference_logprobs = torch.zeros_like(logprobs)

    def reduce_answers(token_logprobs: Tensor, per_token: bool) -> tuple[Tensor, Tensor]:
        sums = torch.where(mask, token_logprobs, 0.0).sum(1)
        chosen, rejected = (sums / lengths if per_token else sums).view(-1, 2).unbind(1)
        return chosen, rejected

    # Losses without a reference (SimPO, ORPO) are defined on log-probs per token.
    per_token = settings.per_token or not settings.has_reference
    answers = (
        *reduce_answers(logprobs, per_token),
        *reduce_answers(reference_logprobs, per_token),
    )
    chosen = answers[0]
    rejected = answers[1]
    beta = settings.beta
    chosen_nll = -reduce_answers(logprobs, per_token=True)[0]

    reduction: dict[str, Any] = {"denominator": pairs, "weights": weights}
    imitation_weight = settings.imitation_weight
    if settings.kind == "simpo":
        loss = simpo_loss(chosen, rejected, beta, settings.target_margin, **reduction)
    elif settings.kind == "orpo":
        loss = odds_ratio_loss(chosen, rejected, beta, **reduction)
        # ORPO always contains the cross entropy of the chosen answer (Hong et al. 2024, equation 6)
        imitation_weight = 1.0
    elif settings.has_margin:
        if margins is None:
            raise ValueError(f"kind={settings.kind}: requires the margins of the pairs")
        distance = settings.kind.removeprefix("rpo_")
        loss = rpo_loss(*answers, margins, beta, settings.reward_scale, distance, **reduction)
    else:
        smoothing = settings.label_smoothing if settings.kind == "sigmoid" else 0.0
        loss = dpo_loss(*answers, beta, label_smoothing=smoothing, kind=settings.kind, **reduction)

    if imitation_weight:
        loss = loss + imitation_weight * _mean(chosen_nll, **reduction)
    stats = dpo_stats(*answers, beta, denominator=pairs)
    return loss, {"loss": loss.detach(), "chosen_nll": _mean(chosen_nll.detach(), pairs)} | stats


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    kind: str = "sigmoid",
    denominator: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the loss of direct preference optimization, a scalar.

    With h = (policy_chosen - policy_rejected) - (reference_chosen - reference_rejected), the loss
    of a pair is -log σ(β·h) with `kind="sigmoid"` (Rafailov et al. 2023, equation 7), and
    (h - 1/(2β))² with `kind="ipo"` (Azar et al. 2023, equation 17). With label smoothing ε, which
    is the probability that a label is wrong, the sigmoid loss is -(1 - ε)·log σ(β·h) -
    ε·log σ(-β·h) (conservative DPO; Mitchell 2023).

    Args:
        policy_chosen: Log-prob of each chosen answer under the policy.
        policy_rejected: Log-prob of each rejected answer under the policy.
        reference_chosen: Log-prob of each chosen answer under the reference model.
        reference_rejected: Log-prob of each rejected answer under the reference model.
        beta: β, the strength of the implicit KL constraint.
        label_smoothing: ε; only for `sigmoid`.
        kind: `sigmoid` or `ipo`.
        denominator: Divisor of the sum; None means the number of pairs.
        weights: Weights `[B]` of the pairs' terms; None means 1.

    Raises:
        ValueError: `kind` is unknown, `beta` is not above 0, `label_smoothing` is not in [0, 0.5],
            or `label_smoothing` is set with `ipo`.
    """
    if beta <= 0:
        raise ValueError(f"beta={beta}: must be > 0")
    if not 0 <= label_smoothing <= 0.5:
        raise ValueError(
            f"label_smoothing={label_smoothing}: must be in [0, 0.5]; larger values invert the"
            " labels"
        )
    # h, the difference of the implicit rewards divided by β
    preference = (policy_chosen - policy_rejected) - (reference_chosen - reference_rejected)
    if kind == "sigmoid":
        # Rafailov et al. 2023, equation 7, with the label smoothing of Mitchell 2023
        scaled = beta * preference
        losses = -(1 - label_smoothing) * logsigmoid(scaled) - label_smoothing * logsigmoid(-scaled)
    elif kind == "ipo":
        if label_smoothing:
            raise ValueError(
                f"label_smoothing={label_smoothing}: is not supported with kind='ipo'; set 0 or"
                " kind='sigmoid'"
            )
        # Azar et al. 2023, equation 17
        losses = (preference - 1 / (2 * beta)).square()
    else:
        raise ValueError(f"unknown preference loss {kind!r}; allowed: sigmoid, ipo")
    return _mean(losses, denominator, weights)


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    beta: float,
    target_margin: float,
    denominator: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return SimPO's loss -log σ(β·(chosen - rejected) - γ), a scalar.

    Meng et al. 2024, "SimPO", equation 6.

    Args:
        chosen: Mean log-prob per token of each chosen answer.
        rejected: Mean log-prob per token of each rejected answer.
        beta: β.
        target_margin: γ.
        denominator: Divisor of the sum; None means the number of pairs.
        weights: Weights `[B]` of the pairs' terms; None means 1.
    """
    return _mean(-logsigmoid(beta * (chosen - rejected) - target_margin), denominator, weights)


def odds_ratio_loss(
    chosen: Tensor,
    rejected: Tensor,
    weight: float,
    denominator: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return ORPO's odds-ratio loss -λ·log σ(log odds(chosen) - log odds(rejected)), a scalar.

    With p = exp(mean log-prob per token), the odds are p / (1 - p) (Hong et al. 2024, "ORPO",
    equations 4 to 7). The complete ORPO loss also contains the cross entropy of the chosen answer.

    Args:
        chosen: Mean log-prob per token of each chosen answer.
        rejected: Mean log-prob per token of each rejected answer.
        weight: λ.
        denominator: Divisor of the sum; None means the number of pairs.
        weights: Weights `[B]` of the pairs' terms; None means 1.
    """
    return weight * _mean(
        -logsigmoid(_log_odds(chosen) - _log_odds(rejected)), denominator, weights
    )


def rpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    margins: Tensor,
    beta: float,
    scale: float,
    distance: str,
    denominator: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the loss of reward-aware preference optimization, a scalar.

    Adler et al. 2024, "Nemotron-4 340B", section 3.3.2. The loss of a pair is a distance between
    the policy's preference a = β·h, with h as in `dpo_loss`, and the reward margin b =
    scale·margin: `sq`: (a - b)²; `fwd_kl`: KL(Bernoulli(σ(a)) ‖ Bernoulli(σ(b))); `bwd_kl`:
    KL(Bernoulli(σ(b)) ‖ Bernoulli(σ(a))). NeMo-Aligner uses the same names.

    Args:
        policy_chosen: Log-prob of each chosen answer under the policy.
        policy_rejected: Log-prob of each rejected answer under the policy.
        reference_chosen: Log-prob of each chosen answer under the reference model.
        reference_rejected: Log-prob of each rejected answer under the reference model.
        margins: Reward of the chosen answer minus reward of the rejected answer.
        beta: β.
        scale: Factor of the margins.
        distance: `sq`, `fwd_kl` or `bwd_kl`.
        denominator: Divisor of the sum; None means the number of pairs.
        weights: Weights `[B]` of the pairs' terms; None means 1.

    Raises:
        ValueError: `distance` is unknown.
    """
    reward_margins = scale * margins
    policy_margins = beta * (
        (policy_chosen - policy_rejected) - (reference_chosen - reference_rejected)
    )
    if distance == "sq":
        losses = (policy_margins - reward_margins).square()
    elif distance == "fwd_kl":
        losses = _bernoulli_kl(policy_margins, reward_margins)
    elif distance == "bwd_kl":
        losses = _bernoulli_kl(reward_margins, policy_margins)
    else:
        raise ValueError(f"unknown distance {distance!r}; allowed: sq, fwd_kl, bwd_kl")
    return _mean(losses, denominator, weights)


def kto_loss(
    log_ratios: Tensor,
    is_desirable: Tensor,
    baseline: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
    denominator: float | None = None,
) -> Tensor:
    """Return the loss of Kahneman-Tversky optimization, a scalar.

    With r = log_ratios and z0 = baseline, the loss of a desirable answer is λ_D·(1 - σ(β·(r - z0)))
    and the loss of an undesirable answer is λ_U·(1 - σ(β·(z0 - r))) (Ethayarajh et al. 2024, "KTO",
    equation 8).

    Args:
        log_ratios: Log-prob of each whole answer under the policy minus its log-prob under the
            reference.
        is_desirable: Label of each answer, bool `[B]`.
        baseline: z0, the estimate of the KL divergence between policy and reference.
        beta: β.
        desirable_weight: λ_D.
        undesirable_weight: λ_U.
        denominator: Divisor of the sum; None means the number of answers.
    """
    # Ethayarajh et al. 2024, equation 8; 1 - σ(x) = σ(-x)
    relative_rewards = beta * (log_ratios - baseline)
    losses = torch.where(
        is_desirable,
        desirable_weight * (-relative_rewards).sigmoid(),
        undesirable_weight * relative_rewards.sigmoid(),
    )
    return _mean(losses, denominator)


@torch.no_grad()
def dpo_stats(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float,
    denominator: float | None = None,
) -> dict[str, Tensor]:
    """Return statistics of the implicit rewards of the pairs of `dpo_loss`.

    The implicit reward of an answer is β·(policy - reference) (Rafailov et al. 2023, section 4).

    Returns:
        The statistics `chosen_reward`, `rejected_reward`, `margin` (chosen minus rejected) and
        `accuracy` (share of pairs whose margin is above 0).
    """
    chosen = beta * (policy_chosen - reference_chosen)
    rejected = beta * (policy_rejected - reference_rejected)
    return pairwise_reward_stats(chosen, rejected, denominator)


def pairwise_reward_loss(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | float | None = None,
    denominator: float | None = None,
) -> Tensor:
    """Return the loss -log σ(chosen - rejected - margin) of the rewards of pairs, a scalar.

    Bradley and Terry 1952; with the margin of Touvron et al. 2023, "Llama 2", section 3.2.2.

    Args:
        chosen: Reward of each chosen answer.
        rejected: Reward of each rejected answer.
        margin: Required difference of the rewards, `[B]` or one number; None means 0.
        denominator: Divisor of the sum; None means the number of pairs.
    """
    difference = chosen - rejected
    return _mean(-logsigmoid(difference if margin is None else difference - margin), denominator)


@torch.no_grad()
def pairwise_reward_stats(
    chosen: Tensor, rejected: Tensor, denominator: float | None = None
) -> dict[str, Tensor]:
    """Return statistics of the rewards of pairs.

    Returns:
        The statistics `chosen_reward`, `rejected_reward`, `margin` (chosen minus rejected) and
        `accuracy` (share of pairs whose margin is above 0).
    """
    margin = chosen - rejected
    return {
        "chosen_reward": _mean(chosen, denominator),
        "rejected_reward": _mean(rejected, denominator),
        "margin": _mean(margin, denominator),
        "accuracy": _mean((margin > 0).to(margin.dtype), denominator),
    }


def _bernoulli_kl(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(Bernoulli(σ(first)) ‖ Bernoulli(σ(second)))."""
    return first.sigmoid() * (logsigmoid(first) - logsigmoid(second)) + (-first).sigmoid() * (
        logsigmoid(-first) - logsigmoid(-second)
    )


def _log_odds(logprobs: Tensor) -> Tensor:
    """Return log(p / (1 - p)); a probability of 1 counts as the largest number below 1."""
    # A log-prob of 0 would give log 0 = -inf in the denominator.
    clamped = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    # log(1 - p) = log(-expm1(log p)) is accurate for p near 0.
    return clamped - torch.log(-torch.expm1(clamped))


def _mean(values: Tensor, denominator: float | None, weights: Tensor | None = None) -> Tensor:
    """Return the sum of weighted values divided by `denominator`, or by their number if None."""
    weighted = values if weights is None else values * weights
    return weighted.sum() / (max(values.numel(), 1) if denominator is None else denominator)
