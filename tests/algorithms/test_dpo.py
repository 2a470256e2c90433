"""Test preference losses of pairs and of labeled answers against the papers' formulas."""

from __future__ import annotations

import math

import pytest
import torch

from aligner.algorithms.offline_losses import LabeledRows, labeled_answer_loss
from aligner.algorithms.preference_losses import pair_loss
from aligner.schema import PreferenceConfig

MASK = torch.tensor([[True, True, False], [True, False, False]])
LOGPROBS = torch.tensor([[-4.0, -6.0, math.nan], [-11.0, math.inf, 3.0]])
REFERENCE = torch.tensor([[-12.0, 0.0, 5.0], [-11.5, math.nan, -1.0]])


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        # A published example: policy (-10, -11), reference (-12, -11.5), beta 0.1.
        (PreferenceConfig(), 0.620957),
        (PreferenceConfig(kind="ipo"), (1.5 - 5.0) ** 2),
        (
            PreferenceConfig(beta=2.0, label_smoothing=0.25),
            0.75 * math.log1p(math.exp(-3)) + 0.25 * math.log1p(math.exp(3)),
        ),
    ],
    ids=["sigmoid", "ipo", "conservative"],
)
def test_pair_loss_uses_only_masked_tokens(settings: PreferenceConfig, loss: float) -> None:
    value, stats = pair_loss(LOGPROBS, REFERENCE, MASK, settings, pairs=1)
    assert value.item() == pytest.approx(loss, abs=1e-5)
    assert stats["loss"].item() == value.item()
    assert stats["margin"].item() == pytest.approx(1.5 * settings.beta)
    assert stats["accuracy"].item() == 1


def test_pair_losses_of_parts_sum_to_batch_loss() -> None:
    generator = torch.Generator().manual_seed(2)
    logprobs, reference = (-torch.rand(8, 5, generator=generator) for _ in range(2))
    mask = torch.rand(8, 5, generator=generator) < 0.6
    whole, stats = pair_loss(logprobs, reference, mask, PreferenceConfig(), pairs=4)
    parts = [
        pair_loss(logprobs[rows], reference[rows], mask[rows], PreferenceConfig(), pairs=4)
        for rows in (slice(0, 2), slice(2, 8))
    ]
    torch.testing.assert_close(sum(value for value, _ in parts), whole)
    for name, value in stats.items():
        torch.testing.assert_close(sum(part[name] for _, part in parts), value)


KINDS = {
    "sigmoid": PreferenceConfig(beta=0.3, per_token=True),
    "smoothed": PreferenceConfig(beta=0.5, label_smoothing=0.2, imitation_weight=0.5),
    "ipo": PreferenceConfig(kind="ipo", beta=0.7, per_token=True),
    "simpo": PreferenceConfig(kind="simpo", beta=2.0, target_margin=1.3, imitation_weight=0.1),
    "orpo": PreferenceConfig(kind="orpo", beta=0.25),
    "rpo_sq": PreferenceConfig(kind="rpo_sq", beta=0.4, reward_scale=1.5),
    "rpo_fwd_kl": PreferenceConfig(
        kind="rpo_fwd_kl", beta=0.4, reward_scale=0.5, imitation_weight=1.0
    ),
    "rpo_bwd_kl": PreferenceConfig(kind="rpo_bwd_kl", beta=0.4, per_token=True),
}


def by_hand(answers: list[list[list[float]]], settings: PreferenceConfig, margin: float) -> float:
    """Compute the loss of a pair with the papers' formulas, in Python floats.

    Args:
        answers: Log-probs of the policy and of the reference model; for each model, those of the
            chosen and of the rejected answer's tokens.
    """
    (chosen, rejected), (reference_chosen, reference_rejected) = answers
    beta, cross_entropy = settings.beta, -sum(chosen) / len(chosen)

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    if settings.kind == "simpo":
        ahead = (
            beta / len(chosen) * sum(chosen)
            - beta / len(rejected) * sum(rejected)
            - settings.target_margin
        )
        return -math.log(sigmoid(ahead)) + settings.imitation_weight * cross_entropy
    if settings.kind == "orpo":
        likely, unlikely = (math.exp(sum(answer) / len(answer)) for answer in (chosen, rejected))
        ratio = (likely / (1 - likely)) / (unlikely / (1 - unlikely))
        return cross_entropy - beta * math.log(sigmoid(math.log(ratio)))

    def ahead_of_reference(answer: list[float], reference: list[float]) -> float:
        return (sum(answer) - sum(reference)) / (len(answer) if settings.per_token else 1)

    h = ahead_of_reference(chosen, reference_chosen) - ahead_of_reference(
        rejected, reference_rejected
    )
    if settings.kind == "sigmoid":
        right, smoothing = sigmoid(beta * h), settings.label_smoothing
        loss = -(1 - smoothing) * math.log(right) - smoothing * math.log(1 - right)
    elif settings.kind == "ipo":
        loss = (h - 1 / (2 * beta)) ** 2
    elif settings.kind == "rpo_sq":
        loss = (beta * h - settings.reward_scale * margin) ** 2
    else:
        ours, theirs = sigmoid(beta * h), sigmoid(settings.reward_scale * margin)
        p, q = (theirs, ours) if settings.kind == "rpo_bwd_kl" else (ours, theirs)
        loss = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    return loss + settings.imitation_weight * cross_entropy


@pytest.mark.promise("losses-equal-their-formulas")
@pytest.mark.parametrize("name", KINDS)
def test_preference_losses_equal_paper_formulas(name: str) -> None:
    """Compare 200 random pairs with weights.

    The expected gradient of a token's log-prob is a finite difference of the formula.
    """
    generator, settings = torch.Generator().manual_seed(5), KINDS[name]
    pairs, width, step = 200, 6, 1e-6
    logprobs, reference = (
        -3 * torch.rand(2 * pairs, width, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    mask = torch.arange(width) < torch.randint(1, width + 1, (2 * pairs, 1), generator=generator)
    margins, weights = (
        torch.rand(pairs, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    logprobs.requires_grad_()
    garbage = torch.where(mask, logprobs, math.nan)
    loss, stats = pair_loss(
        garbage, torch.where(mask, reference, math.nan), mask, settings, 50.0, weights, margins
    )
    loss.backward()
    assert logprobs.grad is not None

    def expected(pair: int, more: float = 0.0) -> float:
        rows = range(2 * pair, 2 * pair + 2)
        answers = [
            [table[row][mask[row]].tolist() for row in rows]
            for table in (logprobs.detach(), reference)
        ]
        answers[0][1][0] += more
        return by_hand(answers, settings, float(margins[pair])) * float(weights[pair]) / 50

    assert loss.item() == pytest.approx(sum(map(expected, range(pairs))), rel=1e-9)
    assert stats["loss"].item() == loss.item()
    for pair in range(pairs):
        slope = (expected(pair, step) - expected(pair, -step)) / (2 * step)
        assert logprobs.grad[2 * pair + 1, 0].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)
    assert torch.equal(logprobs.grad[~mask], torch.zeros(int((~mask).sum()), dtype=torch.float64))


@pytest.mark.parametrize("kind", ["simpo", "orpo"])
def test_reference_free_loss_ignores_reference(kind: str) -> None:
    settings = PreferenceConfig(kind=kind)
    logprobs = torch.where(MASK, LOGPROBS, 0.0)
    nowhere = torch.full_like(REFERENCE, math.nan)
    value, stats = pair_loss(logprobs, nowhere, MASK, settings, pairs=1)
    assert value.isfinite() and stats["margin"].item() == pytest.approx(settings.beta * (-5 + 11))


def test_orpo_is_finite_and_rpo_requires_margins() -> None:
    certain = torch.zeros(2, 3, requires_grad=True)
    value, _ = pair_loss(certain, certain, MASK, PreferenceConfig(kind="orpo"), pairs=1)
    value.backward()
    assert value.isfinite() and certain.grad is not None and certain.grad.isfinite().all()
    with pytest.raises(ValueError, match="kind=rpo_sq: requires the margins of the pairs"):
        pair_loss(LOGPROBS, REFERENCE, MASK, PreferenceConfig(kind="rpo_sq"), pairs=1)


@pytest.mark.promise("losses-equal-their-formulas")
@pytest.mark.parametrize("baseline", [0.0, 0.7])
def test_kto_loss_equals_paper_formula(baseline: float) -> None:
    generator, pieces, width = torch.Generator().manual_seed(6), 200, 5
    logprobs, reference = (
        -3 * torch.rand(pieces, width, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    mask = torch.arange(width) < torch.randint(1, width + 1, (pieces, 1), generator=generator)
    mask = torch.cat(
        [torch.zeros(pieces, 1, dtype=torch.bool), mask[:, 1:] | (torch.arange(1, width) == 1)], 1
    )
    desirable = torch.rand(pieces, generator=generator) < 0.3
    share = pieces / torch.where(desirable, desirable.sum(), (~desirable).sum())
    settings = PreferenceConfig(kind="kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    logprobs.requires_grad_()
    rows = LabeledRows(
        torch.zeros(pieces, width + 1, dtype=torch.int64),
        torch.full((pieces,), width + 1),
        mask,
        torch.where(mask, reference, math.nan),
        desirable,
        torch.full((pieces,), baseline, dtype=torch.float64),
        share,
    )
    loss, stats = labeled_answer_loss(logprobs, rows, settings, pieces)
    loss.backward()
    assert logprobs.grad is not None
    expected, rewards, slopes = 0.0, {True: list[float](), False: list[float]()}, []
    for row in range(pieces):
        ratio = math.fsum((logprobs.detach() - reference)[row][mask[row]].tolist())
        good = bool(desirable[row])
        value = 1 / (1 + math.exp(-0.3 * ((ratio - baseline) if good else (baseline - ratio))))
        expected += (1.5 if good else 0.5) * (1 - value) / pieces
        slopes.append((-1.5 if good else 0.5) * 0.3 * value * (1 - value) / pieces)
        rewards[good].append(0.3 * ratio)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(
        logprobs.grad, torch.where(mask, torch.tensor(slopes, dtype=torch.float64)[:, None], 0.0)
    )
    assert stats["chosen_reward"].item() == pytest.approx(
        sum(rewards[True]) / len(rewards[True]), rel=1e-6
    )
    assert stats["rejected_reward"].item() == pytest.approx(
        sum(rewards[False]) / len(rewards[False]), rel=1e-6
    )
    assert stats["kl"].item() == pytest.approx(baseline)
    parts = [
        labeled_answer_loss(logprobs[part], rows.select(part), settings, pieces)
        for part in torch.arange(pieces).split(60)
    ]
    assert sum(part.item() for part, _ in parts) == pytest.approx(expected)
    assert sum(float(part_stats["accuracy"]) for _, part_stats in parts) == pytest.approx(
        stats["accuracy"].item()
    )
