"""Losses of pairs of answers, the chosen and the rejected one; every argument is a number a pair, [B].

Each is the mean over its pairs, or their sum over `denominator`, and so are the statistics: with the number of the whole
batch's pairs as denominator the parts of a batch add up to it.
"""

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
) -> tuple[Tensor, dict[str, Tensor]]:
    """The preference loss and its statistics of rows chosen, rejected, chosen, …, all [2P, T], as sums over `pairs`.

    `weights` [P] are the pairs'; the statistics are of all pairs alike.
    """

    def of_answers(of_tokens: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.where(mask, of_tokens, 0.0).sum(1)
        return whole[::2], whole[1::2]

    (chosen, rejected), (reference_chosen, reference_rejected) = of_answers(logprobs), of_answers(reference_logprobs)
    loss = dpo_loss(
        chosen,
        rejected,
        reference_chosen,
        reference_rejected,
        settings.beta,
        label_smoothing=settings.label_smoothing if settings.kind == "sigmoid" else 0.0,
        kind=settings.kind,
        denominator=pairs,
        weights=weights,
    )
    stats = dpo_stats(chosen, rejected, reference_chosen, reference_rejected, settings.beta, denominator=pairs)
    return loss, {"loss": loss.detach()} | stats


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

    With h = (policy_chosen - policy_rejected) - (reference_chosen - reference_rejected), the loss of a pair is
    sigmoid: -log σ(β·h) (Rafailov et al. 2023, equation 7), or with label_smoothing ε, the probability that a label is the
    wrong way round, -(1 - ε)·log σ(β·h) - ε·log σ(-β·h) (conservative DPO; Mitchell 2023);
    ipo: (h - 1/(2β))² (Azar et al. 2023, equation 17).
    `weights` [B] multiply the pairs' terms.
    Raises ValueError for another kind, a beta of 0 or less, and a smoothing that is not within 0 and 0.5 or that ipo gets.
    """
    if beta <= 0:
        raise ValueError(f"beta={beta} must be above 0")
    if not 0 <= label_smoothing <= 0.5:
        raise ValueError(f"label_smoothing={label_smoothing} must be within 0 and 0.5: above it the labels are turned round")
    preference = (policy_chosen - policy_rejected) - (reference_chosen - reference_rejected)
    if kind == "sigmoid":
        scaled = beta * preference
        losses = -(1 - label_smoothing) * logsigmoid(scaled) - label_smoothing * logsigmoid(-scaled)
    elif kind == "ipo":
        if label_smoothing:
            raise ValueError(f"label_smoothing={label_smoothing} is for kind='sigmoid': kind='ipo' has no smoothed form")
        losses = (preference - 1 / (2 * beta)).square()
    else:
        raise ValueError(f"unknown preference loss {kind!r}; known: sigmoid, ipo")
    return _mean(losses if weights is None else losses * weights, denominator)


@torch.no_grad()
def dpo_stats(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float,
    denominator: float | None = None,
) -> dict[str, Tensor]:
    """What `dpo_loss` has made of its pairs, by the implicit reward β·(policy - reference) (Rafailov et al. 2023, section 4).

    `chosen_reward`, `rejected_reward`, `margin` (the first minus the second) and `accuracy` (pairs whose margin is above 0).
    """
    chosen = beta * (policy_chosen - reference_chosen)
    rejected = beta * (policy_rejected - reference_rejected)
    return pairwise_reward_stats(chosen, rejected, denominator)


def pairwise_reward_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float | None = None, denominator: float | None = None
) -> Tensor:
    """-log σ(chosen - rejected - margin) of the rewards of each pair, to a scalar; margin [B], a number or none.

    Bradley and Terry 1952; the margin as in Touvron et al. 2023, "Llama 2", section 3.2.2.
    """
    difference = chosen - rejected
    return _mean(-logsigmoid(difference if margin is None else difference - margin), denominator)


@torch.no_grad()
def pairwise_reward_stats(chosen: Tensor, rejected: Tensor, denominator: float | None = None) -> dict[str, Tensor]:
    """`chosen_reward`, `rejected_reward`, `margin` (the first minus the second) and `accuracy` (margins above 0)."""
    margin = chosen - rejected
    return {
        "chosen_reward": _mean(chosen, denominator),
        "rejected_reward": _mean(rejected, denominator),
        "margin": _mean(margin, denominator),
        "accuracy": _mean((margin > 0).to(margin.dtype), denominator),
    }


def _mean(values: Tensor, denominator: float | None) -> Tensor:
    return values.sum() / (max(values.numel(), 1) if denominator is None else denominator)
