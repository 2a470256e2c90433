"""Each loss and its gradient against the formula, written out token by token for the masked tokens
alone."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from aligner.algorithms import losses, preference_losses
from aligner.data.types import Stats

Drawn = dict[str, Tensor]
GROUP = 3


def draw(seed: int, rows: int = 6, width: int = 7, dtype: torch.dtype = torch.float64) -> Drawn:
    """Tensors [rows, width] (`scores` [rows]) with NaN and infinities behind a random mask that
    leaves a row empty."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    proximal = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    drawn = {name: proximal + 0.4 * normal(rows, width) for name in ("new", "old", "reference")}
    drawn |= {
        "proximal": proximal,
        "advantages": normal(rows, width),
        "returns": normal(rows, width),
    }
    drawn["weights"] = torch.rand(rows, width, generator=generator, dtype=torch.float64)
    drawn["labels"] = torch.randint(2, (rows, width), generator=generator).double()
    mask = torch.rand(rows, width, generator=generator) > 0.4
    mask[seed % rows] = False
    poison = (
        tensor([math.nan, math.inf, -math.inf])
        .repeat(rows * width)[: rows * width]
        .view(rows, width)
    )
    drawn = {name: torch.where(mask, values, poison).to(dtype) for name, values in drawn.items()}
    return drawn | {"mask": mask, "scores": normal(rows).to(dtype)}


def of_rows(drawn: Drawn, rows: Any) -> Drawn:
    return {name: values[rows] for name, values in drawn.items()}


def clip(value: Tensor, low: float, high: float) -> Tensor:
    return value if low <= value <= high else value.new_tensor(low if value < low else high)


def surrogate(
    row: Drawn,
    level: str = "token",
    dual: float = math.inf,
    decoupled: tuple[str, float, str] | None = None,
) -> Tensor:
    """Of a row that has nothing but masked tokens: the weighted sum of the clipped surrogate's
    terms."""
    anchor = row["old"] if decoupled is None else row["proximal"]
    ratios = torch.exp(row["new"]) / torch.exp(anchor)
    total = row["new"].new_zeros(())
    for t, advantage in enumerate(row["advantages"]):
        ratio = {
            "token": ratios[t],
            "sequence": ratios.prod() ** (1 / len(ratios)),
            "sequence_product": ratios.prod(),
        }[level]
        term = -min(ratio * advantage, clip(ratio, 0.8, 1.3) * advantage)
        if advantage < 0:
            term = min(term, -dual * advantage)
        if decoupled is not None:
            of, cap, above = decoupled
            each = torch.exp(row["proximal"] - row["old"])
            weight = float(each.prod() if of == "sequence" else each[t])
            term = term * (weight if weight <= cap else {"drop": 0.0, "truncate": cap}[above])
        total = total + row["weights"][t] * term
    return total


def weighted(term: Callable[[Drawn, int], Tensor]) -> Callable[[Drawn], Tensor]:
    def total(row: Drawn) -> Tensor:
        return sum(
            (row["weights"][t] * term(row, t) for t in range(len(row["new"]))),
            start=row["new"].new_zeros(()),
        )

    return total


def unweighted(term: Callable[[Drawn, int], Tensor]) -> Callable[[Drawn], Tensor]:
    return lambda row: sum(
        (term(row, t) for t in range(len(row["new"]))), start=row["new"].new_zeros(())
    )


def cispo_term(row: Drawn, t: int) -> Tensor:
    return (
        -clip(torch.exp(row["new"][t] - row["old"][t]).detach(), 0.8, 1.3)
        * row["advantages"][t]
        * row["new"][t]
    )


def value_term(row: Drawn, t: int) -> Tensor:
    value, old, target = row["new"][t], float(row["old"][t]), row["returns"][t]
    return 0.5 * max((value - target) ** 2, (clip(value, old - 0.2, old + 0.2) - target) ** 2)


def label_term(row: Drawn, t: int) -> Tensor:
    probability = 1 / (1 + torch.exp(-row["new"][t]))
    return -torch.log(probability if row["labels"][t] == 1 else 1 - probability)


def clipped(drawn: Drawn, denominator: float | None, **options: Any) -> tuple[Tensor, Stats]:
    proximal = drawn["proximal"] if "behavior_level" in options else None
    return losses.policy_loss(
        *(drawn[name] for name in ("new", "old", "advantages", "mask")),
        clip_high=0.3,
        proximal_logprobs=proximal,
        weights=drawn["weights"],
        denominator=denominator,
        **options,
    )


def cispo(drawn: Drawn, denominator: float | None) -> tuple[Tensor, Stats]:
    inputs = (drawn[name] for name in ("new", "old", "advantages", "mask"))
    return losses.cispo_loss(
        *inputs, clip_low=0.2, clip_high=0.3, weights=drawn["weights"], denominator=denominator
    )


def policy_gradient(drawn: Drawn, denominator: float | None) -> tuple[Tensor, Stats]:
    inputs = (drawn[name] for name in ("new", "advantages", "mask"))
    return losses.reinforce_loss(*inputs, weights=drawn["weights"], denominator=denominator)


def value(drawn: Drawn, denominator: float | None) -> tuple[Tensor, Stats]:
    return losses.value_loss(
        *(drawn[name] for name in ("new", "old", "returns", "mask")), 0.2, denominator
    )


def imitation(drawn: Drawn, denominator: float | None) -> tuple[Tensor, Stats]:
    return losses.cross_entropy_loss(drawn["new"], drawn["mask"], denominator), {}


def labels(drawn: Drawn, denominator: float | None) -> tuple[Tensor, Stats]:
    return losses.token_label_loss(drawn["new"], drawn["labels"], drawn["mask"], denominator), {}


def case(name: str, options: dict[str, Any], formula: dict[str, Any]) -> Any:
    return pytest.param(
        functools.partial(clipped, **options), functools.partial(surrogate, **formula), id=name
    )


CASES = [
    case("clip", {}, {}),
    case("dual_clip", {"dual_clip": 1.1}, {"dual": 1.1}),
    case("geometric_mean", {"ratio_level": "sequence"}, {"level": "sequence"}),
    case(
        "product",
        {"ratio_level": "sequence_product", "dual_clip": 1.5},
        {"level": "sequence_product", "dual": 1.5},
    ),
    *(
        case(
            f"decoupled_{level}_{above}",
            {"behavior_level": level, "behavior_weight_cap": 1.2, "above_behavior_cap": above},
            {"decoupled": (level, 1.2, above)},
        )
        for level in ("token", "sequence")
        for above in ("drop", "truncate")
    ),
    pytest.param(cispo, weighted(cispo_term), id="cispo"),
    pytest.param(
        policy_gradient,
        weighted(lambda row, t: -row["advantages"][t] * row["new"][t]),
        id="reinforce",
    ),
    pytest.param(value, unweighted(value_term), id="value"),
    pytest.param(imitation, unweighted(lambda row, t: -row["new"][t]), id="cross_entropy"),
    pytest.param(labels, unweighted(label_term), id="token_labels"),
]


@pytest.mark.promise("losses-equal-their-formulas")
@pytest.mark.parametrize(("loss", "formula"), CASES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_loss_and_gradient_are_the_formulas_of_the_masked_tokens(loss, formula, seed):
    drawn = draw(seed)
    drawn["new"].requires_grad_()
    mask = drawn["mask"]
    value, stats = loss(drawn, None)
    total = 0 * drawn["new"][mask].sum()  # has a gradient even where every term is clipped
    for row, inside in enumerate(mask):
        if inside.any():
            tokens = {
                name: values[row][inside] for name, values in drawn.items() if name != "scores"
            }
            total = total + formula(tokens)
    expected = total / max(int(mask.sum()), 1)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
    (gradient,) = torch.autograd.grad(value, drawn["new"])
    assert not gradient[~mask].any()
    torch.testing.assert_close(
        gradient, torch.autograd.grad(expected, drawn["new"])[0], rtol=1e-9, atol=1e-12
    )
    assert all(stat.isfinite() and not stat.requires_grad for stat in stats.values())


def contrast(
    drawn: Drawn, denominator: float | None, group_size: int = GROUP
) -> tuple[Tensor, Stats]:
    return losses.contrastive_policy_gradient_loss(
        *(drawn[name] for name in ("new", "reference", "scores", "mask")),
        group_size=group_size,
        kl_coefficient=0.3,
        denominator=denominator,
    )


def test_contrastive_gradient_of_a_pair_is_that_of_the_published_objective():
    new, reference = (-torch.rand(2, 7, dtype=torch.float64) for _ in range(2))
    scores, beta = tensor([0.7, -0.4], dtype=torch.float64), 0.3
    new.requires_grad_()
    loss, _ = losses.contrastive_policy_gradient_loss(
        new, reference, scores, torch.ones(2, 7), group_size=2, kl_coefficient=beta, denominator=1
    )
    # As published it is differentiated through, with half the coefficient for the square's
    # derivative.
    distance = (new - reference).sum(1)
    published = -(scores[0] - scores[1] - beta / 2 * (distance[0] - distance[1])) * (
        distance[0] - distance[1]
    )
    gradients = [torch.autograd.grad(each, new)[0] for each in (loss, published)]
    torch.testing.assert_close(*gradients)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_contrastive_loss_compares_each_row_with_its_groups_others_that_have_tokens(seed):
    drawn = draw(seed)
    drawn["scores"][seed % 6] = math.nan
    drawn["new"].requires_grad_()
    inside = drawn["mask"]
    expected, kl = 0 * drawn["new"][inside].sum(), 0.0
    for start in (0, GROUP):
        rows = [row for row in range(start, start + GROUP) if inside[row].any()]
        answers = {row: drawn["new"][row][inside[row]].sum() for row in rows}
        distance = {
            row: float(answers[row].detach() - drawn["reference"][row][inside[row]].sum())
            for row in rows
        }
        rewards = {row: float(drawn["scores"][row]) - 0.3 * distance[row] for row in rows}
        kl += sum(distance.values())
        for row in rows:
            others = [rewards[other] for other in rows if other != row]
            if others:
                expected = expected - (rewards[row] - sum(others) / len(others)) * answers[row] / 6
    loss, stats = contrast(drawn, None)
    torch.testing.assert_close(loss, expected)
    assert float(stats["reference_kl"]) == pytest.approx(kl / 6)
    (gradient,) = torch.autograd.grad(loss, drawn["new"])
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, drawn["new"])[0])


ALL_LOSSES = [
    *(pytest.param(each.values[0], id=each.id) for each in CASES),
    pytest.param(contrast, id="contrast"),
]


@pytest.mark.parametrize("loss", ALL_LOSSES)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10_000), order=st.permutations(range(4)), cuts=st.sets(st.integers(1, 3))
)
def test_micro_batches_change_no_gradient_and_no_statistic(loss, seed, order, cuts):
    drawn = draw(seed, rows=4 * GROUP, dtype=torch.float32)
    drawn["new"].requires_grad_()
    denominator = float(drawn["mask"].sum())
    whole, stats = loss(drawn, denominator)
    groups = tensor(order)[:, None] * GROUP + torch.arange(GROUP)
    edges = [0, *sorted(cuts), 4]
    parts = [
        loss(of_rows(drawn, groups[start:end].flatten()), denominator)
        for start, end in itertools.pairwise(edges)
    ]
    summed = sum(value for value, _ in parts)
    torch.testing.assert_close(summed, whole, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(value, drawn["new"])[0] for value in (summed, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
    for name, value in stats.items():
        together = torch.stack([part[name] for _, part in parts])
        torch.testing.assert_close(
            together.amax() if name.endswith("_max") else together.sum(),
            value,
            rtol=1e-5,
            atol=1e-5,
        )


@pytest.mark.parametrize("loss", ALL_LOSSES)
def test_a_batch_without_a_masked_token_costs_nothing(loss):
    drawn = draw(0)
    drawn["mask"] = torch.zeros_like(drawn["mask"])
    drawn = {
        name: torch.full_like(each, math.nan) if each.is_floating_point() else each
        for name, each in drawn.items()
    }
    drawn["new"].requires_grad_()
    value, stats = loss(drawn, None)
    assert value == 0 and all(
        stat == 0 for name, stat in stats.items() if not name.endswith("_mean")
    )
    assert not torch.autograd.grad(value, drawn["new"])[0].any()


def test_weights_make_the_mean_of_the_rows_means():
    drawn = draw(2)
    mask = drawn["mask"]
    drawn["weights"] = 1 / mask.sum(1, keepdim=True).clamp(min=1).double().expand(mask.shape)
    rows = [row for row in range(6) if mask[row].any()]
    means = [
        losses.policy_loss(
            *(drawn[n][[row]] for n in ("new", "old", "advantages", "mask")), clip_high=0.3
        )
        for row in rows
    ]
    loss, stats = clipped(drawn, float(len(rows)))
    torch.testing.assert_close(loss, torch.stack([value for value, _ in means]).mean())
    torch.testing.assert_close(
        stats["approx_kl"], torch.stack([each["approx_kl"] for _, each in means]).mean()
    )


def test_the_product_of_a_long_responses_ratios_overflows_into_no_gradient():
    new = torch.zeros(2, 100, requires_grad=True)
    advantages = tensor([[1.0], [0.0]]).expand(2, 100)
    loss, _ = losses.policy_loss(
        new,
        torch.full((2, 100), -1.0),
        advantages,
        torch.ones(2, 100),
        ratio_level="sequence_product",
    )
    assert loss.item() == pytest.approx(-0.6) and not torch.autograd.grad(loss, new)[0].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ratio_level": "row"},
            "unknown ratio_level 'row'; allowed: token, sequence, sequence_product",
        ),
        (
            {"behavior_level": "row"},
            "unknown level of behavior weights 'row'; allowed: token, sequence",
        ),
        (
            {"behavior_level": "token", "above_behavior_cap": "keep"},
            "cap 'keep'; allowed: drop, truncate",
        ),
        ({"dual_clip": 0.5}, r"dual_clip=0\.5: must be >= 1"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        clipped(draw(0), None, **options)


@pytest.mark.parametrize("size", [1, 4])
def test_contrast_needs_whole_groups_of_two_or_more(size):
    with pytest.raises(
        ValueError, match=f"group_size={size}: must be >= 2 and must divide the number of rows, 6"
    ):
        contrast(draw(0), None, group_size=size)


PAIRS = {
    "policy_chosen": tensor([-10.0, -4.0, -7.5], dtype=torch.float64),
    "policy_rejected": tensor([-11.0, -3.0, -9.0], dtype=torch.float64),
    "reference_chosen": tensor([-12.0, -4.5, -7.0], dtype=torch.float64),
    "reference_rejected": tensor([-11.5, -3.5, -9.0], dtype=torch.float64),
}


@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)])
def test_preference_loss_is_the_mean_of_its_formula_and_adds_up_over_parts(kind, smoothing):
    beta, total = 0.3, 0.0
    for chosen, rejected, of_chosen, of_rejected in zip(
        *(each.tolist() for each in PAIRS.values()), strict=True
    ):
        h = chosen - rejected - of_chosen + of_rejected
        right = 1 / (1 + math.exp(-beta * h))
        total += (
            (h - 1 / (2 * beta)) ** 2
            if kind == "ipo"
            else -(1 - smoothing) * math.log(right) - smoothing * math.log(1 - right)
        )
    options = {"beta": beta, "label_smoothing": smoothing, "kind": kind}
    assert float(preference_losses.dpo_loss(**PAIRS, **options)) == pytest.approx(total / 3)
    parts = [
        preference_losses.dpo_loss(**of_rows(PAIRS, rows), **options, denominator=3)
        for rows in (slice(0, 1), slice(1, 3))
    ]
    assert float(sum(parts)) == pytest.approx(total / 3)


def test_preference_statistics_tell_the_implicit_rewards():
    stats = preference_losses.dpo_stats(**PAIRS, beta=0.5)
    assert float(stats["chosen_reward"]) == pytest.approx(0.5 * (2.0 + 0.5 - 0.5) / 3)
    assert float(stats["rejected_reward"]) == pytest.approx(0.5 * (0.5 + 0.5 + 0.0) / 3)
    assert float(stats["margin"]) == pytest.approx(0.5 * (1.5 + 0.0 - 0.5) / 3)
    assert float(stats["accuracy"]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("margin", [None, 0.5, tensor([0.0, 1.0, 2.0])])
def test_reward_loss_asks_for_the_margin(margin):
    chosen, rejected = tensor([1.0, 0.5, -2.0]), tensor([0.0, 1.0, -2.0])
    margins = margin.tolist() if isinstance(margin, Tensor) else [margin or 0.0] * 3
    differences = [
        a - b - m for a, b, m in zip(chosen.tolist(), rejected.tolist(), margins, strict=True)
    ]
    expected = [math.log(1 + math.exp(-difference)) for difference in differences]
    assert float(preference_losses.pairwise_reward_loss(chosen, rejected, margin)) == pytest.approx(
        sum(expected) / 3
    )
    assert float(
        preference_losses.pairwise_reward_loss(chosen, rejected, margin, denominator=6)
    ) == pytest.approx(sum(expected) / 6)


def test_a_pair_of_equal_answers_teaches_nothing():
    shared = tensor([-3.0], requires_grad=True)
    for kind in ("sigmoid", "ipo"):
        loss = preference_losses.dpo_loss(
            shared, shared, tensor([-2.0]), tensor([-2.0]), beta=0.1, kind=kind
        )
        assert torch.autograd.grad(loss, shared)[0] == 0
    assert (
        torch.autograd.grad(preference_losses.pairwise_reward_loss(shared, shared), shared)[0] == 0
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "hinge"}, "unknown preference loss 'hinge'; allowed: sigmoid, ipo"),
        ({"beta": 0.0}, r"beta=0\.0: must be > 0"),
        ({"label_smoothing": 0.6}, r"label_smoothing=0\.6: must be in \[0, 0\.5\]"),
        (
            {"kind": "ipo", "label_smoothing": 0.1},
            "label_smoothing=0\\.1: is not supported with kind='ipo'",
        ),
    ],
)
def test_preference_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        preference_losses.dpo_loss(**PAIRS, **({"beta": 0.1} | options))
