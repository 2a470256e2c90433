"""Metrics of responses to held-out prompts: scores, pass rates and win rates, with intervals."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

_CONFIDENCE = 0.95
# Number of resampled values that the bootstrap keeps in memory at a time.
_BOOTSTRAP_CHUNK_SIZE = 2**22


def pass_at_k(correct: Tensor, samples: int | Tensor, k: int) -> Tensor:
    """Return the unbiased estimate of the probability that at least one of k samples is correct.

    The estimate of a prompt is 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large
    Language Models Trained on Code", section 2.1).

    Args:
        correct: c, the number of correct samples of each prompt, int64 `[P]`.
        samples: n, the number of samples per prompt; int64 `[P]` if it differs between prompts.
        k: Number of samples of which at least one must be correct.

    Returns:
        float64 `[P]`.

    Raises:
        ValueError: `k` is not in [1, n], or `correct` is not in [0, n].
    """
    counts = samples if isinstance(samples, Tensor) else torch.full_like(correct, samples)
    min_count = int(counts.min()) if isinstance(samples, Tensor) else samples
    if not 1 <= k <= min_count:
        raise ValueError(f"k={k}: must be in [1, {min_count}], the number of samples per prompt")
    if bool(((correct < 0) | (correct > counts)).any()):
        raise ValueError(
            f"correct={correct.tolist()}: must be in [0, {samples}], the number of samples per"
            " prompt"
        )
    # C(n - c, k) / C(n, k) = Π_{i<k} (n - c - i) / (n - i). If there are fewer than k incorrect
    # samples, a factor is 0.
    remaining = counts.double()[:, None] - torch.arange(k)
    remaining_incorrect = remaining - correct.double()[:, None]
    return 1 - (remaining_incorrect.clamp_min(0) / remaining).prod(1)


def win_rate(scores: Tensor, reference_scores: Tensor) -> Tensor:
    """Return for each prompt the share of its responses that score above the reference response.

    A tie counts as half a win.

    Args:
        scores: Scores of the responses, `[P]` or `[P, K]`.
        reference_scores: Scores of the references, `[P]`.

    Returns:
        float64 `[N]`, where N is the number of prompts whose reference and at least one response
        have a finite score. Responses without a finite score are excluded.
    """
    responses = scores.view(len(reference_scores), -1)
    is_compared = responses.isfinite() & reference_scores.isfinite()[:, None]
    counts = is_compared.sum(1)
    # 2 for a win, 1 for a tie, 0 for a loss; the last line divides by 2.
    half_wins = torch.sign(responses - reference_scores[:, None]).double() + 1
    totals = torch.where(is_compared, half_wins, 0.0).sum(1)
    return totals[counts > 0] / counts[counts > 0] / 2


def perplexity(logprobs: Tensor, mask: Tensor) -> float:
    """Return the perplexity: exp of minus the mean log-prob over the mask.

    The perplexity of the initial model on the policy's responses measures how far the policy has
    diverged from it (Noukhovitch et al. 2024, "Asynchronous RLHF", plots the win rate against it).

    Args:
        logprobs: `[B, T]`.
        mask: bool `[B, T]`.

    Raises:
        ValueError: The mask is empty.
    """
    count = int(mask.sum())
    if count == 0:
        raise ValueError("mask: must contain at least one token")
    return float(torch.exp(-torch.where(mask, logprobs, 0.0).double().sum() / count))


def wilson_interval(
    successes: float, count: int, confidence: float = _CONFIDENCE
) -> tuple[float, float]:
    """Return the Wilson score interval of a proportion (Wilson 1927).

    The interval is within [0, 1], and is not empty at the proportions 0 and 1.

    Args:
        successes: Number of successes. It may be fractional, because a prompt counts with the share
            of its successful responses.
        count: Number of trials.
        confidence: Coverage of the interval.

    Returns:
        Lower and upper bound.

    Raises:
        ValueError: `successes` is not in [0, count], or `count` is below 1.
    """
    if count < 1 or not 0 <= successes <= count:
        raise ValueError(f"successes={successes}: must be in [0, count] with count={count} >= 1")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    proportion = successes / count
    weight = z * z / count
    center = (proportion + weight / 2) / (1 + weight)
    half_width = (
        z * math.sqrt(proportion * (1 - proportion) / count + weight / (4 * count)) / (1 + weight)
    )
    return max(0.0, center - half_width), min(1.0, center + half_width)


def bootstrap_interval(
    values: Tensor, confidence: float = _CONFIDENCE, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Return the bootstrap percentile interval of the mean.

    Efron 1979, "Bootstrap Methods: Another Look at the Jackknife". The same values and seed give
    the same interval.

    Args:
        values: `[P]`.
        confidence: Coverage of the interval.
        resamples: Number of bootstrap resamples.
        seed: Seed of the resampling.

    Returns:
        Lower and upper bound.

    Raises:
        ValueError: `values` is empty.
    """
    if values.numel() == 0:
        raise ValueError("values: must not be empty")
    numbers = values.double().numpy()
    generator = np.random.default_rng(seed)
    chunk = max(1, _BOOTSTRAP_CHUNK_SIZE // len(numbers))
    means = [
        numbers[
            generator.integers(len(numbers), size=(min(chunk, resamples - first), len(numbers)))
        ].mean(1)
        for first in range(0, resamples, chunk)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def evaluation_metrics(
    scores: Tensor, pass_threshold: float, reference_scores: Tensor | None = None
) -> dict[str, float]:
    """Return the metrics `eval/score`, `eval/pass@k` and `eval/win_rate` with their intervals.

    Scores that are not finite are abstentions, of responses or of references. `eval/abstained`
    counts the abstentions of responses; all other metrics exclude abstentions. pass@k is computed
    for the powers of two up to K, over the prompts that have at least k scores. The win rate exists
    only with references.

    The intervals (suffixes `_low` and `_high`) treat the prompts as the random sample. The interval
    of the score is a bootstrap of the prompts' means. The intervals of pass@1 and of the win rate
    are Wilson intervals with P trials, which are wider than necessary if K is above 1.

    Args:
        scores: Scores of K responses to each of P prompts, `[P, K]`.
        pass_threshold: A response passes if its score is at least this value.
        reference_scores: Scores of the prompts' references, `[P]`.
    """
    has_score = scores.isfinite()
    counts = has_score.sum(1)
    abstained = scores.numel() - int(counts.sum())
    metrics = {"eval/abstained": float(abstained)} if abstained else {}
    has_scores = counts > 0
    if not bool(has_scores.any()):
        return metrics

    totals = torch.where(has_score, scores.double(), 0.0).sum(1)
    means = totals[has_scores] / counts[has_scores]
    metrics["eval/score"] = float(means.mean())
    metrics |= _interval_metrics("eval/score", bootstrap_interval(means))

    correct = (has_score & (scores >= pass_threshold)).sum(1)
    shares = {}
    for power in range(int(counts.max()).bit_length()):
        has_enough = counts >= 2**power
        shares[f"eval/pass@{2**power}"] = pass_at_k(
            correct[has_enough], counts[has_enough], 2**power
        )
    if reference_scores is not None and bool((has_scores & reference_scores.isfinite()).any()):
        shares["eval/win_rate"] = win_rate(scores, reference_scores)

    for name, share in shares.items():
        metrics[name] = float(share.mean())
        if name in ("eval/pass@1", "eval/win_rate"):
            trials = len(share)
            # min: the sum of rounded shares may slightly exceed the number of trials.
            interval = wilson_interval(min(float(share.sum()), trials), trials)
            metrics |= _interval_metrics(name, interval)
    return metrics


def judge_metrics(wins: Tensor) -> dict[str, float]:
    """Return the metrics of a judge's comparisons with the references.

    The metrics are `eval/judge_win_rate` with its interval, `eval/judge_ties`,
    `eval/judge_order_bias` and `eval/judge_unreadable`. The judge sees each comparison in both
    orders, because judges prefer a position (Zheng et al. 2023, "Judging LLM-as-a-Judge with
    MT-Bench and Chatbot Arena", section 3.4). The result of a comparison is the mean of the two
    orders. `judge_ties` is the share of comparisons whose mean is a tie. `judge_order_bias` is the
    share of comparisons in which the same position won in both orders; these comparisons are ties
    too. `judge_unreadable` counts the comparisons with an answer that could not be parsed; all
    other metrics exclude them, and exclude prompts without a readable comparison.

    Args:
        wins: `[P, K, 2]`, the result of each of K responses to P prompts against the reference, in
            [0, 1]: first with the response in the first position, then with the response in the
            second position. NaN if the judge's answer could not be parsed.
    """
    is_readable = ~wins.isnan().any(-1)
    metrics = {"eval/judge_unreadable": float((~is_readable).sum())}
    if not bool(is_readable.any()):
        return metrics

    first, second = wins[is_readable].double().unbind(-1)
    shares = torch.stack(
        [
            results[is_valid].double().mean()
            for results, is_valid in zip(wins.mean(-1), is_readable, strict=True)
            if is_valid.any()
        ]
    )
    interval = wilson_interval(min(float(shares.sum()), len(shares)), len(shares))
    return (
        {"eval/judge_win_rate": float(shares.mean())}
        | _interval_metrics("eval/judge_win_rate", interval)
        | {"eval/judge_ties": float((first + second == 1).double().mean())}
        | {"eval/judge_order_bias": float(((first - second).abs() == 1).double().mean())}
        | metrics
    )


def group_metrics(scores: Tensor, pass_threshold: float, groups: Sequence[str]) -> dict[str, float]:
    """Return `eval/score/GROUP`, and `eval/pass@1/GROUP` with its interval, for each group.

    A group is absent if the reward function abstained on all of its responses.

    Args:
        scores: Scores of K responses to each of P prompts, `[P, K]`.
        pass_threshold: A response passes if its score is at least this value.
        groups: Group of each of the P prompts.
    """
    metrics: dict[str, float] = {}
    for group in sorted(set(groups)):
        is_member = torch.tensor([name == group for name in groups])
        group_values = evaluation_metrics(scores[is_member], pass_threshold)
        if "eval/score" not in group_values:
            continue
        metrics[f"eval/score/{group}"] = group_values["eval/score"]
        metrics |= {
            f"eval/pass@1/{group}{suffix}": group_values[f"eval/pass@1{suffix}"]
            for suffix in ("", "_low", "_high")
        }
    return metrics


def _interval_metrics(name: str, interval: tuple[float, float]) -> dict[str, float]:
    return {f"{name}_low": interval[0], f"{name}_high": interval[1]}
