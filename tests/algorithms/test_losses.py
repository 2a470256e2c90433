"""Test each loss and its gradient against its formula in loops over the masked tokens."""

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

from aligner.algorithms import policy_losses, preference_losses
from aligner.data.types import Stats

Tensors = dict[str, Tensor]
GROUP = 3


def random_tensors(
    seed: int, rows: int = 6, width: int = 7, dtype: torch.dtype = torch.float64
) -> Tensors:
    """Return random tensors [rows, width] and `scores` [rows].

    Values outside the random mask are NaN or infinite. One row of the mask is empty.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    proximal = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    tensors = {name: proximal + 0.4 * normal(rows, width) for name in ("new", "old", "reference")}
    tensors |= {
        "proximal": proximal,
        "advantages": normal(rows, width),
        "returns": normal(rows, width),
    }
    tensors["weights"] = torch.rand(rows, width, generator=generator, dtype=torch.float64)
    tensors["labels"] = torch.randint(2, (rows, width), generator=generator).double()
    mask = torch.rand(rows, width, generator=generator) > 0.4
    mask[seed % rows] = False
    poison = (
        tensor([math.nan, math.inf, -math.inf])
        .repeat(rows * width)[: rows * width]
        .view(rows, width)
    )
    tensors = {
        name: torch.where(mask, values, poison).to(dtype) for name, values in tensors.items()
    }
    return tensors | {"mask": mask, "scores": normal(rows).to(dtype)}


def of_rows(tensors: Tensors, rows: Any) -> Tensors:
    return {name: values[rows] for name, values in tensors.items()}


def clip(value: Tensor, low: float, high: float) -> Tensor:
    return value if low <= value <= high else value.new_tensor(low if value < low else high)


def surrogate(
    row: Tensors,
    level: str = "token",
    dual: float = math.inf,
    decoupled: tuple[str, float, str] | None = None,
) -> Tensor:
    """Return the weighted sum of the clipped surrogate's terms.

    The row contains only masked tokens.
    """
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


def weighted(term: Callable[[Tensors, int], Tensor]) -> Callable[[Tensors], Tensor]:
    def total(row: Tensors) -> Tensor:
        return sum(
            (row["weights"][t] * term(row, t) for t in range(len(row["new"]))),
            start=row["new"].new_zeros(()),
        )

    return total


def unweighted(term: Callable[[Tensors, int], Tensor]) -> Callable[[Tensors], Tensor]:
    return lambda row: sum(
        (term(row, t) for t in range(len(row["new"]))), start=row["new"].new_zeros(())
    )


def cispo_term(row: Tensors, t: int) -> Tensor:
    return (
        -clip(torch.exp(row["new"][t] - row["old"][t]).detach(), 0.8, 1.3)
        * row["advantages"][t]
        * row["new"][t]
    )


def value_term(row: Tensors, t: int) -> Tensor:
    value, old, target = row["new"][t], float(row["old"][t]), row["returns"][t]
    return 0.5 * max((value - target) ** 2, (clip(value, old - 0.2, old + 0.2) - target) ** 2)


def label_term(row: Tensors, t: int) -> Tensor:
    probability = 1 / (1 + torch.exp(-row["new"][t]))
    return -torch.log(probability if row["labels"][t] == 1 else 1 - probability)


def clipped(tensors: Tensors, denominator: float | None, **options: Any) -> tuple[Tensor, Stats]:
    proximal = tensors["proximal"] if "behavior_level" in options else None
    return policy_losses.policy_loss(
        *(tensors[name] for name in ("new", "old", "advantages", "mask")),
        clip_high=0.3,
        proximal_logprobs=proximal,
        weights=tensors["weights"],
        denominator=denominator,
        **options,
    )


def cispo(tensors: Tensors, denominator: float | None) -> tuple[Tensor, Stats]:
    inputs = (tensors[name] for name in ("new", "old", "advantages", "mask"))
    return policy_losses.cispo_loss(
        *inputs, clip_low=0.2, clip_high=0.3, weights=tensors["weights"], denominator=denominator
    )


def policy_gradient(tensors: Tensors, denominator: float | None) -> tuple[Tensor, Stats]:
    inputs = (tensors[name] for name in ("new", "advantages", "mask"))
    return policy_losses.reinforce_loss(
        *inputs, weights=tensors["weights"], denominator=denominator
    )


def value(tensors: Tensors, denominator: float | None) -> tuple[Tensor, Stats]:
    return policy_losses.value_loss(
        *(tensors[name] for name in ("new", "old", "returns", "mask")), 0.2, denominator
    )


def imitation(tensors: Tensors, denominator: float | None) -> tuple[Tensor, Stats]:
    return policy_losses.cross_entropy_loss(tensors["new"], tensors["mask"], denominator), {}


def labels(tensors: Tensors, denominator: float | None) -> tuple[Tensor, Stats]:
    return policy_losses.token_label_loss(
        tensors["new"], tensors["labels"], tensors["mask"], denominator
    ), {}


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
def test_loss_and_gradient_equal_formula(loss, formula, seed):
    tensors = random_tensors(seed)
    tensors["new"].requires_grad_()
    mask = tensors["mask"]
    value, stats = loss(tensors, None)
    total = 0 * tensors["new"][mask].sum()  # has a gradient even where every term is clipped
    for row, inside in enumerate(mask):
        if inside.any():
            tokens = {
                name: values[row][inside] for name, values in tensors.items() if name != "scores"
            }
            total = total + formula(tokens)
    expected = total / max(int(mask.sum()), 1)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
    (gradient,) = torch.autograd.grad(value, tensors["new"])
    assert not gradient[~mask].any()
    torch.testing.assert_close(
        gradient, torch.autograd.grad(expected, tensors["new"])[0], rtol=1e-9, atol=1e-12
    )
    assert all(stat.isfinite() and not stat.requires_grad for stat in stats.values())


def contrast(
    tensors: Tensors, denominator: float | None, group_size: int = GROUP
) -> tuple[Tensor, Stats]:
    return policy_losses.contrastive_policy_gradient_loss(
        *(tensors[name] for name in ("new", "reference", "scores", "mask")),
        group_size=group_size,
        kl_coefficient=0.3,
        denominator=denominator,
    )


def test_contrastive_gradient_equals_published_gradient():
    new, reference = (-torch.rand(2, 7, dtype=torch.float64) for _ in range(2))
    scores, beta = tensor([0.7, -0.4], dtype=torch.float64), 0.3
    new.requires_grad_()
    loss, _ = policy_losses.contrastive_policy_gradient_loss(
        new, reference, scores, torch.ones(2, 7), group_size=2, kl_coefficient=beta, denominator=1
    )
    # The published objective is differentiated through its reward. It has half the coefficient,
    # because of the derivative of the square.
    distance = (new - reference).sum(1)
    published = -(scores[0] - scores[1] - beta / 2 * (distance[0] - distance[1])) * (
        distance[0] - distance[1]
    )
    gradients = [torch.autograd.grad(each, new)[0] for each in (loss, published)]
    torch.testing.assert_close(*gradients)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_contrastive_loss_equals_loop_over_groups(seed):
    tensors = random_tensors(seed)
    tensors["scores"][seed % 6] = math.nan
    tensors["new"].requires_grad_()
    inside = tensors["mask"]
    expected, kl = 0 * tensors["new"][inside].sum(), 0.0
    for start in (0, GROUP):
        rows = [row for row in range(start, start + GROUP) if inside[row].any()]
        answers = {row: tensors["new"][row][inside[row]].sum() for row in rows}
        distance = {
            row: float(answers[row].detach() - tensors["reference"][row][inside[row]].sum())
            for row in rows
        }
        rewards = {row: float(tensors["scores"][row]) - 0.3 * distance[row] for row in rows}
        kl += sum(distance.values())
        for row in rows:
            others = [rewards[other] for other in rows if other != row]
            if others:
                expected = expected - (rewards[row] - sum(others) / len(others)) * answers[row] / 6
    loss, stats = contrast(tensors, None)
    torch.testing.assert_close(loss, expected)
    assert float(stats["reference_kl"]) == pytest.approx(kl / 6)
    (gradient,) = torch.autograd.grad(loss, tensors["new"])
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, tensors["new"])[0])


ALL_LOSSES = [
    *(pytest.param(each.values[0], id=each.id) for each in CASES),
    pytest.param(contrast, id="contrast"),
]


@pytest.mark.parametrize("loss", ALL_LOSSES)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10_000), order=st.permutations(range(4)), cuts=st.sets(st.integers(1, 3))
)
def test_micro_batches_change_no_gradient_or_statistic(loss, seed, order, cuts):
    tensors = random_tensors(seed, rows=4 * GROUP, dtype=torch.float32)
    tensors["new"].requires_grad_()
    denominator = float(tensors["mask"].sum())
    whole, stats = loss(tensors, denominator)
    groups = tensor(order)[:, None] * GROUP + torch.arange(GROUP)
    edges = [0, *sorted(cuts), 4]
    parts = [
        loss(of_rows(tensors, groups[start:end].flatten()), denominator)
        for start, end in itertools.pairwise(edges)
    ]
    summed = sum(value for value, _ in parts)
    torch.testing.assert_close(summed, whole, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(value, tensors["new"])[0] for value in (summed, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
    for name, value in stats.items():
        part_values = torch.stack([part[name] for _, part in parts])
        torch.testing.assert_close(
            part_values.amax() if name.endswith("_max") else part_values.sum(),
            value,
            rtol=1e-5,
            atol=1e-5,
        )


@pytest.mark.parametrize("loss", ALL_LOSSES)
def test_batch_without_masked_tokens_has_zero_loss(loss):
    tensors = random_tensors(0)
    tensors["mask"] = torch.zeros_like(tensors["mask"])
    tensors = {
        name: torch.full_like(each, math.nan) if each.is_floating_point() else each
        for name, each in tensors.items()
    }
    tensors["new"].requires_grad_()
    value, stats = loss(tensors, None)
    assert value == 0 and all(
        stat == 0 for name, stat in stats.items() if not name.endswith("_mean")
    )
    assert not torch.autograd.grad(value, tensors["new"])[0].any()


def test_token_weights_give_the_mean_of_row_means():
    tensors = random_tensors(2)
    mask = tensors["mask"]
    tensors["weights"] = 1 / mask.sum(1, keepdim=True).clamp(min=1).double().expand(mask.shape)
    rows = [row for row in range(6) if mask[row].any()]
    means = [
        policy_losses.policy_loss(
            *(tensors[n][[row]] for n in ("new", "old", "advantages", "mask")), clip_high=0.3
        )
        for row in rows
    ]
    loss, stats = clipped(tensors, float(len(rows)))
    torch.testing.assert_close(loss, torch.stack([value for value, _ in means]).mean())
    torch.testing.assert_close(
        stats["approx_kl"], torch.stack([each["approx_kl"] for _, each in means]).mean()
    )


def test_overflowing_ratio_has_zero_gradient():
    new = torch.zeros(2, 100, requires_grad=True)
    advantages = tensor([[1.0], [0.0]]).expand(2, 100)
    loss, _ = policy_losses.policy_loss(
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
def test_invalid_policy_loss_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        clipped(random_tensors(0), None, **options)


@pytest.mark.parametrize("size", [1, 4])
def test_contrastive_loss_refuses_invalid_group_size(size):
    with pytest.raises(
        ValueError, match=f"group_size={size}: must be >= 2 and must divide the number of rows, 6"
    ):
        contrast(random_tensors(0), None, group_size=size)


PAIRS = {
    "policy_chosen": tensor([-10.0, -4.0, -7.5], dtype=torch.float64),
    "policy_rejected": tensor([-11.0, -3.0, -9.0], dtype=torch.float64),
    "reference_chosen": tensor([-12.0, -4.5, -7.0], dtype=torch.float64),
    "reference_rejected": tensor([-11.5, -3.5, -9.0], dtype=torch.float64),
}


@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)])
def test_preference_loss_and_its_parts_equal_formula(kind, smoothing):
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


def test_preference_statistics_are_implicit_rewards():
    stats = preference_losses.dpo_stats(**PAIRS, beta=0.5)
    assert float(stats["chosen_reward"]) == pytest.approx(0.5 * (2.0 + 0.5 - 0.5) / 3)
    assert float(stats["rejected_reward"]) == pytest.approx(0.5 * (0.5 + 0.5 + 0.0) / 3)
    assert float(stats["margin"]) == pytest.approx(0.5 * (1.5 + 0.0 - 0.5) / 3)
    assert float(stats["accuracy"]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("margin", [None, 0.5, tensor([0.0, 1.0, 2.0])])
def test_reward_loss_subtracts_the_margin(margin):
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


def test_pair_of_equal_answers_has_zero_gradient():
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
def test_invalid_preference_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        preference_losses.dpo_loss(**PAIRS, **({"beta": 0.1} | options))
