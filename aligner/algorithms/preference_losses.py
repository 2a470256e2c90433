"""Losses of pairs of answers, the chosen and the rejected one, and of answers with a label;
arguments are a number each, [B].

Each is the mean over its pairs or answers, or their sum over `denominator`, and so are the
statistics: with the number of the whole batch's pairs as denominator the parts of a batch add up to
it.
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
    """The preference loss and its statistics of rows chosen, rejected, chosen, …, all [2P, T], as
    sums over `pairs`.

    `weights` [P] are the pairs'; the statistics are of all pairs alike. `margins` [P], by how much
    the chosen answer's reward is above the other's, are what the rpo kinds go by. The reference's
    log-probs are not looked at where the kind has none.
    """
    lengths = mask.sum(1).clamp(min=1)
    if not settings.has_reference:
        reference_logprobs = torch.zeros_like(logprobs)

    def of_answers(of_tokens: Tensor, per_token: bool) -> tuple[Tensor, Tensor]:
        whole = torch.where(mask, of_tokens, 0.0).sum(1)
        chosen, rejected = (whole / lengths if per_token else whole).view(-1, 2).unbind(1)
        return chosen, rejected

    per_token = settings.per_token or not settings.has_reference
    answers = (*of_answers(logprobs, per_token), *of_answers(reference_logprobs, per_token))
    chosen, rejected, beta = answers[0], answers[1], settings.beta
    imitation = -of_answers(logprobs, per_token=True)[0]
    shared: dict[str, Any] = {"denominator": pairs, "weights": weights}
    imitation_weight = settings.imitation_weight
    if settings.kind == "simpo":
        loss = simpo_loss(chosen, rejected, beta, settings.target_margin, **shared)
    elif settings.kind == "orpo":
        loss, imitation_weight = odds_ratio_loss(chosen, rejected, beta, **shared), 1.0
    elif settings.has_margin:
        if margins is None:
            raise ValueError(f"kind={settings.kind}: requires the margins of the pairs")
        distance = settings.kind.removeprefix("rpo_")
        loss = rpo_loss(*answers, margins, beta, settings.reward_scale, distance, **shared)
    else:
        smoothing = settings.label_smoothing if settings.kind == "sigmoid" else 0.0
        loss = dpo_loss(*answers, beta, label_smoothing=smoothing, kind=settings.kind, **shared)
    if imitation_weight:
        loss = loss + imitation_weight * _mean(imitation, **shared)
    stats = dpo_stats(*answers, beta, denominator=pairs)
    return loss, {"loss": loss.detach(), "chosen_nll": _mean(imitation.detach(), pairs)} | stats


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
    """Direct preference optimization; log-probabilities of whole answers to a scalar.

    With h = (policy_chosen - policy_rejected) - (reference_chosen - reference_rejected), the loss
    of a pair is sigmoid: -log σ(β·h) (Rafailov et al. 2023, equation 7), or with label_smoothing ε,
    the probability that a label is the wrong way round, -(1 - ε)·log σ(β·h) - ε·log σ(-β·h)
    (conservative DPO; Mitchell 2023); ipo: (h - 1/(2β))² (Azar et al. 2023, equation 17). `weights`
    [B] multiply the pairs' terms. Raises ValueError for another kind, a beta of 0 or less, and a
    smoothing that is not within 0 and 0.5 or that ipo gets.
    """
    if beta <= 0:
        raise ValueError(f"beta={beta}: must be > 0")
    if not 0 <= label_smoothing <= 0.5:
        raise ValueError(
            f"label_smoothing={label_smoothing}: must be in [0, 0.5]; larger values invert the"
            " labels"
        )
    preference = (policy_chosen - policy_rejected) - (reference_chosen - reference_rejected)
    if kind == "sigmoid":
        scaled = beta * preference
        losses = -(1 - label_smoothing) * logsigmoid(scaled) - label_smoothing * logsigmoid(-scaled)
    elif kind == "ipo":
        if label_smoothing:
            raise ValueError(
                f"label_smoothing={label_smoothing}: is not supported with kind='ipo'; set 0 or"
                " kind='sigmoid'"
            )
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
    """-log σ(β·(chosen - rejected) - γ) of mean log-probabilities a token, to a scalar; γ is
    `target_margin`.

    Meng et al. 2024, "SimPO", equation 6.
    """
    return _mean(-logsigmoid(beta * (chosen - rejected) - target_margin), denominator, weights)


def odds_ratio_loss(
    chosen: Tensor,
    rejected: Tensor,
    weight: float,
    denominator: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """-λ·log σ(log odds(chosen) - log odds(rejected)) of mean log-probabilities a token, to a
    scalar; λ is `weight`.

    With p = exp(mean log-probability) odds are p / (1 - p): Hong et al. 2024, "ORPO", equations 4
    to 7. Its loss has the cross entropy of the chosen answer besides.
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
    """Reward-aware preference optimization (Adler et al. 2024, "Nemotron-4 340B", section 3.3.2),
    to a scalar.

    With a = β·h, h as in `dpo_loss`, and b = scale·margin, the distance of the policy's preference
    from the rewards': sq: (a - b)²; fwd_kl: KL(Bernoulli(σ(a)) ‖ Bernoulli(σ(b))); bwd_kl: the
    other way round, as NeMo-Aligner calls them. Raises ValueError for another distance.
    """
    given = scale * margins
    implied = beta * ((policy_chosen - policy_rejected) - (reference_chosen - reference_rejected))
    if distance == "sq":
        losses = (implied - given).square()
    elif distance == "fwd_kl":
        losses = _bernoulli_kl(implied, given)
    elif distance == "bwd_kl":
        losses = _bernoulli_kl(given, implied)
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
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, "KTO", equation 8); a number an
    answer, [B], to a scalar.

    With r = log_ratios, of whole answers to the reference, and z0 = baseline, a desirable answer's
    loss is λ_D·(1 - σ(β·(r - z0))), another's λ_U·(1 - σ(β·(z0 - r))).
    """
    ahead = beta * (log_ratios - baseline)
    losses = torch.where(
        is_desirable, desirable_weight * (-ahead).sigmoid(), undesirable_weight * ahead.sigmoid()
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
    """What `dpo_loss` has made of its pairs, by the implicit reward β·(policy - reference)
    (Rafailov et al. 2023, section 4).

    `chosen_reward`, `rejected_reward`, `margin` (the first minus the second) and `accuracy` (pairs
    whose margin is above 0).
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
    """-log σ(chosen - rejected - margin) of the rewards of each pair, to a scalar; margin [B], a
    number or none.

    Bradley and Terry 1952; the margin as in Touvron et al. 2023, "Llama 2", section 3.2.2.
    """
    difference = chosen - rejected
    return _mean(-logsigmoid(difference if margin is None else difference - margin), denominator)


@torch.no_grad()
def pairwise_reward_stats(
    chosen: Tensor, rejected: Tensor, denominator: float | None = None
) -> dict[str, Tensor]:
    """`chosen_reward`, `rejected_reward`, `margin` (the first minus the second) and `accuracy`
    (margins above 0)."""
    margin = chosen - rejected
    return {
        "chosen_reward": _mean(chosen, denominator),
        "rejected_reward": _mean(rejected, denominator),
        "margin": _mean(margin, denominator),
        "accuracy": _mean((margin > 0).to(margin.dtype), denominator),
    }


def _bernoulli_kl(first: Tensor, second: Tensor) -> Tensor:
    """KL(Bernoulli(σ(first)) ‖ Bernoulli(σ(second)))."""
    return first.sigmoid() * (logsigmoid(first) - logsigmoid(second)) + (-first).sigmoid() * (
        logsigmoid(-first) - logsigmoid(-second)
    )


def _log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)); a probability of 1 counts as the next one below it."""
    below = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    return below - torch.log(-torch.expm1(below))


def _mean(values: Tensor, denominator: float | None, weights: Tensor | None = None) -> Tensor:
    weighted = values if weights is None else values * weights
    return weighted.sum() / (max(values.numel(), 1) if denominator is None else denominator)
