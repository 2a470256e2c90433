"""Test evaluation metrics against enumeration, independent formulas and published values."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from aligner.algorithms.evaluation_scores import (
    bootstrap_interval,
    evaluation_metrics,
    group_metrics,
    judge_metrics,
    pass_at_k,
    perplexity,
    wilson_interval,
    win_rate,
)


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_equals_enumeration_of_subsets(samples: int) -> None:
    correct = torch.arange(samples + 1)
    for k in range(1, samples + 1):
        subsets = list(itertools.combinations(range(samples), k))
        shares = [
            sum(min(subset) < right for subset in subsets) / len(subsets)
            for right in correct.tolist()
        ]
        assert pass_at_k(correct, samples, k).tolist() == pytest.approx(shares, abs=1e-12)


def test_pass_at_k_stays_exact_where_factorials_are_huge() -> None:
    # 1 - C(197, 100) / C(200, 100), expanded manually: 1 - (100 * 99 * 98) / (200 * 199 * 198).
    assert float(pass_at_k(torch.tensor([3]), 200, 100)) == pytest.approx(
        1 - 970200 / 7880400, abs=1e-12
    )


def test_pass_at_k_is_unbiased() -> None:
    """The expectation of pass@2 equals the probability of a correct one of 2 samples.

    It is computed over all outcomes of 4 samples; each sample is correct with probability 0.3.
    """
    outcomes = [
        (math.comb(4, right) * 0.3**right * 0.7 ** (4 - right), right) for right in range(5)
    ]
    mean = sum(weight * float(pass_at_k(torch.tensor([right]), 4, 2)) for weight, right in outcomes)
    assert mean == pytest.approx(1 - 0.7**2, abs=1e-12)
    assert sum(weight * (1 - (1 - right / 4) ** 2) for weight, right in outcomes) < mean - 0.01


@pytest.mark.parametrize(("correct", "k"), [(1, 0), (1, 5), (-1, 2), (5, 2)])
def test_pass_at_k_refuses_invalid_counts(correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"must be in \["):
        pass_at_k(torch.tensor([correct]), 4, k)


def test_win_counts_one_and_tie_counts_half() -> None:
    assert win_rate(torch.tensor([1.0, 0.5, -2.0]), torch.tensor([0.0, 0.5, 0.0])).tolist() == [
        1.0,
        0.5,
        0.0,
    ]
    assert win_rate(torch.tensor([[1.0, 0.5, -2.0, 3.0]]), torch.tensor([0.5])).tolist() == [0.625]


def test_perplexity_uses_only_masked_tokens() -> None:
    probabilities = torch.tensor([[0.5, 0.25, 0.9], [0.125, 0.1, 0.9]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    logprobs = torch.where(mask, probabilities.log(), torch.nan)
    assert perplexity(logprobs, mask) == pytest.approx((0.5 * 0.25 * 0.125) ** (-1 / 3), rel=1e-6)
    with pytest.raises(ValueError, match="mask: must contain at least one token"):
        perplexity(logprobs, torch.zeros_like(mask))


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_equals_published_values(
    successes: int, count: int, low: float, high: float
) -> None:
    assert wilson_interval(successes, count) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson_interval(count - successes, count)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilson_bounds_solve_the_normal_test() -> None:
    for successes, confidence in ((3.5, 0.95), (9, 0.8)):
        z = {0.95: 1.959964, 0.8: 1.281552}[confidence]
        for bound in wilson_interval(successes, 12, confidence):
            assert abs(successes / 12 - bound) == pytest.approx(
                z * math.sqrt(bound * (1 - bound) / 12), rel=1e-5
            )
    with pytest.raises(ValueError, match=r"successes=13: must be in \[0, count\] with count=12"):
        wilson_interval(13, 12)


def test_bootstrap_approximates_normal_interval() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(2)) * 3 + 1
    low, high = bootstrap_interval(values, resamples=8000)
    half = 1.96 * float(values.std()) / 20
    assert (low, high) == pytest.approx(
        (float(values.mean()) - half, float(values.mean()) + half), abs=0.03
    )
    assert bootstrap_interval(values, resamples=8000) == (low, high)
    assert bootstrap_interval(values, resamples=8000, seed=1) != (low, high)
    assert bootstrap_interval(torch.ones(3)) == (1.0, 1.0)


def test_bootstrap_of_two_values_equals_enumeration() -> None:
    """The bootstrap means are 0, 1/2 and 1 with probabilities 1/4, 1/2 and 1/4.

    Half of the probability is strictly between 0 and 1.
    """
    assert bootstrap_interval(torch.tensor([0.0, 1.0]), confidence=0.4) == (0.5, 0.5)
    assert bootstrap_interval(torch.tensor([0.0, 1.0]), confidence=0.6) == (0.0, 1.0)


def test_evaluation_metrics_are_means_over_prompts() -> None:
    scores = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [2.0, 1.0, 0.5], [0.0, 1.0, 0.0]])
    metrics = evaluation_metrics(scores, 1.0, torch.tensor([0.5, 0.0, 1.0, 2.0]))
    assert metrics["eval/score"] == pytest.approx(6.5 / 12)
    assert metrics["eval/score_low"] < metrics["eval/score"] < metrics["eval/score_high"]
    assert metrics["eval/pass@1"] == pytest.approx((2 + 0 + 2 + 1) / 12)
    assert metrics["eval/pass@2"] == pytest.approx((1 + 0 + 1 + 2 / 3) / 4)
    assert "eval/pass@3" not in metrics and "eval/pass@4" not in metrics
    assert metrics["eval/win_rate"] == pytest.approx((2 / 3 + 1 / 2 + 1 / 2 + 0) / 4)
    assert (metrics["eval/pass@1_low"], metrics["eval/pass@1_high"]) == wilson_interval(
        4 * 5 / 12, 4
    )
    assert not any(name.startswith("eval/win_rate") for name in evaluation_metrics(scores, 1.0))


def test_group_metrics_use_prompts_of_the_group() -> None:
    scores = torch.tensor([[1.0, 0.0], [0.2, 0.4], [1.0, 1.0], [0.0, 1.0]])
    metrics = group_metrics(scores, 1.0, ["a", "b", "a", "b"])
    for group, own in (("a", scores[[0, 2]]), ("b", scores[[1, 3]])):
        expected = evaluation_metrics(own, 1.0)
        for name in ("eval/score", "eval/pass@1"):
            assert metrics[f"{name}/{group}"] == expected[name]
        for end in ("_low", "_high"):
            assert metrics[f"eval/pass@1/{group}{end}"] == expected[f"eval/pass@1{end}"]
    assert len(metrics) == 8


def test_judged_metrics_equal_loop_over_verdicts() -> None:
    """Unreadable verdicts are in no sum."""
    verdicts = [
        [(1.0, 1.0), (1.0, 0.0), None],  # win, tie due to order bias, unreadable
        [(0.5, 0.5), (0.0, 0.0), (0.5, 1.0)],
        [None, None, None],
        [(0.0, 1.0), (1.0, 1.0), (0.0, 0.5)],
    ]
    wins = torch.tensor(
        [[[math.nan] * 2 if pair is None else pair for pair in prompt] for prompt in verdicts]
    )
    readable = [[pair for pair in prompt if pair is not None] for prompt in verdicts]
    rates = [sum((a + b) / 2 for a, b in prompt) / len(prompt) for prompt in readable if prompt]
    pairs = [pair for prompt in readable for pair in prompt]
    metrics = judge_metrics(wins)
    low, high = wilson_interval(sum(rates), 3)
    assert metrics == pytest.approx(
        {
            "eval/judge_win_rate": sum(rates) / 3,
            "eval/judge_win_rate_low": low,
            "eval/judge_win_rate_high": high,
            "eval/judge_ties": sum(a + b == 1 for a, b in pairs) / len(pairs),
            "eval/judge_order_bias": sum({a, b} == {0.0, 1.0} for a, b in pairs) / len(pairs),
            "eval/judge_unreadable": 4.0,
        }
    )
    assert (metrics["eval/judge_ties"], metrics["eval/judge_order_bias"]) == (3 / 8, 2 / 8)
    assert judge_metrics(torch.full((2, 1, 2), math.nan)) == {"eval/judge_unreadable": 2.0}
