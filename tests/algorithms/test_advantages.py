"""Test advantage estimators against loops over the masked tokens."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aligner.algorithms import advantages
from aligner.algorithms.advantages import masked_mean, masked_whiten

SEEDS = st.integers(0, 10_000)


def random_inputs(seed: int, rows: int = 6, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Return random rewards, values and a mask, [rows, width] each.

    Outside the mask, rewards are NaN and values are infinite. One row of the mask is empty.
    """
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (
        torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    mask = torch.rand(rows, width, generator=generator) > 0.4
    mask[seed % rows] = False
    return torch.where(mask, rewards, math.nan), torch.where(mask, values, math.inf), mask


def whitened(values: list[float]) -> list[float]:
    mean = sum(values) / max(len(values), 1)
    variance = sum((each - mean) ** 2 for each in values) / max(len(values), 1)
    return [(each - mean) / math.sqrt(variance + 1e-8) for each in values]


def returns_of(rewards: list[float], gamma: float) -> list[float]:
    return [
        sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards)))
        for t in range(len(rewards))
    ]


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_is_the_discounted_sum_of_temporal_differences(seed, gamma, lam):
    rewards, values, mask = random_inputs(seed)
    found, returns = advantages.gae(rewards, values, mask, gamma, lam)
    assert not found[~mask].any() and not returns[~mask].any()
    for row, inside in enumerate(mask):
        r, v = rewards[row][inside].tolist(), [*values[row][inside].tolist(), 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        expected = returns_of(deltas, gamma * lam)
        assert found[row][inside].tolist() == pytest.approx(expected)
        assert returns[row][inside].tolist() == pytest.approx(
            [a + b for a, b in zip(expected, v, strict=False)]
        )


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_bootstraps_truncated_responses(seed, gamma, lam):
    rewards, values, mask = random_inputs(seed)
    last = torch.randn(6, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    last[seed % 5] = 0.0  # this response is complete
    found, returns = advantages.gae(rewards, values, mask, gamma, lam, last)
    assert not found[~mask].any() and not returns[~mask].any()
    for row, inside in enumerate(mask):
        r, v = rewards[row][inside].tolist(), [*values[row][inside].tolist(), float(last[row])]
        expected = returns_of([r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))], gamma * lam)
        assert found[row][inside].tolist() == pytest.approx(expected)
        # Definition of the λ-return: each n-step return has the weight (1 - λ)·λ^(n-1), and the
        # longest return has the remaining weight.
        for t in range(len(r)):
            steps = [
                sum(gamma**k * r[t + k] for k in range(n)) + gamma**n * v[t + n]
                for n in range(1, len(r) - t + 1)
            ]
            mixed = (
                sum((1 - lam) * lam**n * each for n, each in enumerate(steps[:-1]))
                + lam ** (len(steps) - 1) * steps[-1]
            )
            assert float(returns[row][inside][t]) == pytest.approx(mixed, abs=1e-9)


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, gamma=st.floats(0, 1))
def test_reinforce_variants_equal_loop_reference(seed, gamma):
    rewards, _, mask = random_inputs(seed)
    found, plus_plus = (
        of(rewards, mask, gamma) for of in (advantages.reinforce, advantages.reinforce_plus_plus)
    )
    assert not found[~mask].any() and not plus_plus[~mask].any()
    expected = [
        each
        for row, inside in enumerate(mask)
        for each in returns_of(rewards[row][inside].tolist(), gamma)
    ]
    assert found[mask].tolist() == pytest.approx(expected)
    assert plus_plus[mask].tolist() == pytest.approx(whitened(expected))


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, size=st.sampled_from([2, 3, 6]))
def test_grouped_advantages_equal_loop_reference(seed, size):
    scores = torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    estimators = (advantages.rloo, advantages.grpo, advantages.dr_grpo)
    for index, values in enumerate(
        zip(*(of(scores, size).tolist() for of in estimators), strict=True)
    ):
        group = scores[index // size * size :][:size].tolist()
        others = [score for place, score in enumerate(group) if place != index % size]
        above = group[index % size] - statistics.fmean(group)
        expected = (
            group[index % size] - statistics.fmean(others),
            above / (statistics.stdev(group) + 1e-4),
            above,
        )
        assert values == pytest.approx(expected)


@pytest.mark.parametrize("estimator", [advantages.rloo, advantages.grpo, advantages.dr_grpo])
def test_equal_integer_scores_have_zero_advantage(estimator):
    scores = torch.tensor([1, 1, 1, 0, 0, 0])
    assert estimator(scores, 3).tolist() == [0.0] * 6


@settings(max_examples=60, deadline=None)
@given(score=st.floats(-1e6, 1e6, width=32), size=st.integers(2, 9))
def test_equal_scores_have_exactly_zero_advantage(score, size):
    groups = torch.tensor([score] * size + [0.0, *[1.0] * (size - 1)])
    for estimator in (advantages.rloo, advantages.grpo, advantages.dr_grpo):
        found = estimator(groups, size)
        assert not found[:size].any() and found[size:].all()


@pytest.mark.parametrize("value", [0.1, -0.7, 1000.1, 123456.7])
def test_whitening_of_equal_values_is_zero(value):
    mask = torch.ones(3, 7).bool()
    mask[:, 5:] = False
    values = torch.where(mask, torch.full(mask.shape, value), math.nan)
    for found in (
        masked_whiten(values, mask),
        masked_whiten(values, mask, dim=1),
        advantages.group_whiten(values, mask, 3),
    ):
        assert not found.any()
    kept = masked_whiten(values, mask, shift_mean=False)
    assert kept[mask].tolist() == pytest.approx([value] * 15) and not kept[~mask].any()
    rewards = torch.zeros(3, 7).index_fill(1, torch.tensor([4]), value)
    assert not advantages.reinforce_plus_plus(rewards, mask, 1.0).any()
    one_differs = torch.where(
        mask,
        values.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(value + 1)),
        math.nan,
    )
    assert masked_whiten(one_differs, mask)[mask].all()


@pytest.mark.parametrize(
    "estimate",
    [
        advantages.rloo,
        advantages.grpo,
        advantages.dr_grpo,
        lambda scores, size: advantages.group_whiten(scores[:, None], torch.ones(6, 1), size),
    ],
)
def test_invalid_group_size_is_refused(estimate):
    with pytest.raises(ValueError, match="group_size=1: must be >= 2"):
        estimate(torch.zeros(6), 1)
    with pytest.raises(
        ValueError, match="the number of rows, 6, must be a multiple of group_size=4"
    ):
        estimate(torch.zeros(6), 4)


def test_per_token_scores_are_refused():
    with pytest.raises(
        ValueError, match=r"scores: got shape \(4, 2\), must be \[B\], one score per response"
    ):
        advantages.rloo(torch.zeros(4, 2), 2)


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, size=st.sampled_from([2, 3, 6]))
def test_group_whitening_uses_masked_tokens_of_group(seed, size):
    values, _, mask = random_inputs(seed)
    found = advantages.group_whiten(values, mask, size)
    assert not found[~mask].any()
    for start in range(0, 6, size):
        rows = slice(start, start + size)
        assert found[rows][mask[rows]].tolist() == pytest.approx(
            whitened(values[rows][mask[rows]].tolist())
        )


def test_empty_row_does_not_shift_its_group():
    values = torch.tensor([[1.0, 3.0], [5.0, 2.0], [9.0, 9.0], [4.0, 6.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1]])
    found = advantages.group_whiten(values, mask, 2)
    alone = advantages.group_whiten(values[[3, 3]], mask[[3, 3]], 2)
    torch.testing.assert_close(found[3], alone[0])
    torch.testing.assert_close(found[0], torch.tensor([-2.0, 0.0]) / math.sqrt(8 / 3))
    assert not found[2].any()


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, shift=st.booleans())
def test_whitening_uses_masked_population_variance(seed, shift):
    values, _, mask = random_inputs(seed)
    chosen = values[mask].tolist()
    mean = sum(chosen) / len(chosen)
    assert float(masked_mean(values, mask)) == pytest.approx(mean)
    found = masked_whiten(values, mask, shift_mean=shift)
    assert found[mask].tolist() == pytest.approx(
        [each + (0.0 if shift else mean) for each in whitened(chosen)]
    )
    assert not found[~mask].any()
    for row, inside, by_row in zip(values, mask, masked_mean(values, mask, dim=1), strict=True):
        assert by_row.item() == pytest.approx(row[inside].mean().item() if inside.any() else 0.0)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS)
def test_grpo_steps_equals_loop_reference(seed):
    """Rewards outside step ends count at the last step end of their response.

    In a response without step ends, they count at the last token.
    """
    rewards, _, mask = random_inputs(seed)
    mask[seed % 6, seed % 8] = True
    rewards = torch.where(mask, rewards.nan_to_num(0.5), math.nan)
    ends = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed + 1)) > 0.6
    ends[(seed + 1) % 6] = False
    found = advantages.grpo_steps(rewards, ends, mask, 3)
    for first in (0, 3):
        steps: list[list[tuple[int, float]]] = []
        for row in range(first, first + 3):
            inside = mask[row].nonzero()[:, 0].tolist()
            own = [(place, float(rewards[row, place])) for place in inside if ends[row, place]]
            rest = sum(float(rewards[row, place]) for place in inside if not ends[row, place])
            own = own or [(max(inside, default=0), 0.0)]
            steps.append([*own[:-1], (own[-1][0], own[-1][1] + rest)])
        every = [reward for row in steps for _, reward in row]
        mean, spread = statistics.fmean(every), statistics.stdev(every)
        for row, own in enumerate(steps, start=first):
            for place in range(mask.shape[1]):
                ahead = sum(
                    (reward - mean) / (spread + 1e-4) for end, reward in own if end >= place
                )
                assert float(found[row, place]) == pytest.approx(
                    ahead if mask[row, place] else 0.0, abs=1e-9
                )


def test_grpo_steps_is_0_for_equal_steps_and_grpo_for_one_step():
    mask = torch.ones(4, 3, dtype=torch.bool)
    ends = torch.tensor(
        [[False, True, True], [True, False, True], [False, False, True], [True, True, True]]
    )
    assert not advantages.grpo_steps(torch.where(ends, 0.3, 0.0), ends, mask, 2).any()
    scores = torch.tensor([1.0, 0.0, 0.25, 4.0])
    at_end = torch.zeros(4, 3)
    at_end[:, 2] = scores
    whole = advantages.grpo_steps(at_end, torch.zeros_like(mask), mask, 2)
    assert torch.allclose(whole, advantages.grpo(scores, 2)[:, None].expand(4, 3))


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, gamma=st.sampled_from([0.0, 0.4, 1.0]))
def test_grpo_turns_equals_loop_reference(seed, gamma):
    """Rows of a group need not be adjacent, and rewards outside the mask have no effect."""
    rewards, _, mask = random_inputs(seed)
    rewards = torch.where(mask, rewards.nan_to_num(0.5), math.nan)
    groups = torch.tensor([0, 0, 1, 1, 0, 1])
    found = advantages.grpo_turns(rewards, mask, groups, gamma)
    for group in (0, 1):
        turns = []  # row, tokens and return of each turn
        for row in (groups == group).nonzero()[:, 0].tolist():
            turns_of_row: list[list[int]] = []
            for token in mask[row].nonzero()[:, 0].tolist():
                if turns_of_row and turns_of_row[-1][-1] == token - 1:
                    turns_of_row[-1].append(token)
                else:
                    turns_of_row.append([token])
            sums = [sum(float(rewards[row, token]) for token in turn) for turn in turns_of_row]
            turns += [
                (
                    row,
                    tokens,
                    sum(gamma**ahead * sums[at + ahead] for ahead in range(len(sums) - at)),
                )
                for at, tokens in enumerate(turns_of_row)
            ]
        returns = [value for _, _, value in turns]
        spread = statistics.stdev(returns) if len(returns) > 1 else 0.0
        for row, tokens, value in turns:
            expected = (value - statistics.fmean(returns)) / (spread + 1e-4)
            assert found[row, tokens].tolist() == pytest.approx([expected] * len(tokens), abs=1e-6)
    assert not found[~mask].any()


def test_grpo_turns_credits_turns_that_lead_to_rewards():
    """Two episodes of two turns: the first one fails in its first turn, the second one later."""
    mask = torch.tensor([[True, True, False, True]]).repeat(2, 1)
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    found = advantages.grpo_turns(rewards, mask, torch.tensor([0, 0]), 0.5)
    returns = torch.tensor([0.5, 1.0, 1.0, 0.0])
    first, last, other_first, other_last = ((returns - 0.625) / (returns.std() + 1e-4)).tolist()
    assert torch.allclose(
        found,
        torch.tensor([[first, first, 0.0, last], [other_first, other_first, 0.0, other_last]]),
    )


def test_grpo_turns_is_grpo_for_single_turns_and_0_for_equal_returns():
    mask = torch.ones(4, 3, dtype=torch.bool)
    groups = torch.tensor([0, 0, 1, 1])
    scores = torch.tensor([1.0, 0.0, 0.25, 4.0])
    at_end = torch.zeros(4, 3)
    at_end[:, 2] = scores
    found = advantages.grpo_turns(at_end, mask, groups, 0.9)
    assert torch.allclose(found, advantages.grpo(scores, 2)[:, None].expand(4, 3))
    assert not advantages.grpo_turns(torch.full((4, 3), 0.1), mask, groups, 0.9).any()
