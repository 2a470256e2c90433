"""What responses to held-out prompts are worth: scores, passes, wins, each with a 95 % interval."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

_CONFIDENCE = 0.95
_RESAMPLED_AT_ONCE = 2**22
"""Numbers that the bootstrap holds at a time."""


def pass_at_k(correct: Tensor, samples: int | Tensor, k: int) -> Tensor:
    """Probability that at least one of k samples is right, float64 [P]: 1 - C(n - c, k) / C(n, k),
    unbiased.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", section 2.1.

    Args:
        correct: int64 [P], the number of right samples of each prompt.
        samples: n, the number of samples per prompt; int64 [P] if it differs.
        k: the number of samples of which one must be right.

    Raises:
        ValueError: k is not in [1, n], or more samples are right than there are.
    """
    counts = samples if isinstance(samples, Tensor) else torch.full_like(correct, samples)
    fewest = int(counts.min()) if isinstance(samples, Tensor) else samples
    if not 1 <= k <= fewest:
        raise ValueError(f"k={k}: must be in [1, {fewest}], the number of samples per prompt")
    if bool(((correct < 0) | (correct > counts)).any()):
        raise ValueError(
            f"correct={correct.tolist()}: must be in [0, {samples}], the number of samples per"
            " prompt"
        )
    # The share of draws without a right one, as a product: the i-th factor is 0 once there are too
    # few wrong ones.
    drawn = counts.double()[:, None] - torch.arange(k)
    wrong = drawn - correct.double()[:, None]
    return 1 - (wrong.clamp_min(0) / drawn).prod(1)


def win_rate(scores: Tensor, reference_scores: Tensor) -> Tensor:
    """The share of a prompt's responses that score above its reference, ties half; [P] or [P, K],
    and [P], to float64 [N].

    N is the number of prompts whose reference and at least one response have a finite score;
    responses without one are excluded.
    """
    responses = scores.view(len(reference_scores), -1)
    compared = responses.isfinite() & reference_scores.isfinite()[:, None]
    counts = compared.sum(1)
    wins = torch.sign(responses - reference_scores[:, None]).double() + 1
    totals = torch.where(compared, wins, 0.0).sum(1)
    return totals[counts > 0] / counts[counts > 0] / 2


def perplexity(logprobs: Tensor, mask: Tensor) -> float:
    """exp of minus the mean log-prob over the mask; [B, T] each.

    That of the initial model on the policy's responses says how far the policy has moved
    (Noukhovitch et al. 2024, "Asynchronous RLHF", which plots the win rate over it). Raises
    ValueError for an empty mask.
    """
    count = int(mask.sum())
    if count == 0:
        raise ValueError("mask: must contain at least one token")
    return float(torch.exp(-torch.where(mask, logprobs, 0.0).double().sum() / count))


def wilson_interval(
    successes: float, count: int, confidence: float = _CONFIDENCE
) -> tuple[float, float]:
    """The score interval of a proportion (Wilson 1927), inside [0, 1] and not empty at 0 and 1.

    `successes` need not be whole: a prompt counts for the share of its responses. Raises ValueError
    where it is not within 0 and `count`.
    """
    if count < 1 or not 0 <= successes <= count:
        raise ValueError(f"successes={successes}: must be in [0, count] with count={count} >= 1")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = successes / count, z * z / count
    center = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / count + weight / (4 * count)) / (1 + weight)
    return max(0.0, center - half), min(1.0, center + half)


def bootstrap_interval(
    values: Tensor, confidence: float = _CONFIDENCE, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """The percentile interval of the mean of values [P] (Efron 1979, "Bootstrap Methods: Another
    Look at the Jackknife").

    The same values and seed give the same interval. Raises ValueError where there is none.
    """
    if values.numel() == 0:
        raise ValueError("values: must not be empty")
    numbers, generator = values.double().numpy(), np.random.default_rng(seed)
    at_once = max(1, _RESAMPLED_AT_ONCE // len(numbers))
    means = [
        numbers[
            generator.integers(len(numbers), size=(min(at_once, resamples - first), len(numbers)))
        ].mean(1)
        for first in range(0, resamples, at_once)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def evaluation_metrics(
    scores: Tensor, pass_threshold: float, reference_scores: Tensor | None = None
) -> dict[str, float]:
    """`eval/score`, `eval/pass@k` for the powers of two up to K, and `eval/win_rate` where there
    are references [P].

    scores: [P, K], K responses to each of P prompts. Prompts are what is drawn at random, so
    intervals (`_low`, `_high`) are over them: the score's by bootstrap of the prompts' means; those
    of pass@1 and of the win rate are Wilson's with P trials, which for K above 1 is wider than it
    need be.

    Scores that are not finite are abstentions, of responses and of references: `eval/abstained`
    counts those of responses, and all other metrics exclude them. pass@k is over the prompts that
    have at least k scores.
    """
    scored = scores.isfinite()
    counts = scored.sum(1)
    abstained = scores.numel() - int(counts.sum())
    metrics = {"eval/abstained": float(abstained)} if abstained else {}
    known = counts > 0
    if not bool(known.any()):
        return metrics

    totals = torch.where(scored, scores.double(), 0.0).sum(1)
    means = totals[known] / counts[known]
    metrics["eval/score"] = float(means.mean())
    metrics |= _bounds("eval/score", bootstrap_interval(means))

    correct = (scored & (scores >= pass_threshold)).sum(1)
    shares = {}
    for power in range(int(counts.max()).bit_length()):
        enough = counts >= 2**power
        shares[f"eval/pass@{2**power}"] = pass_at_k(correct[enough], counts[enough], 2**power)
    if reference_scores is not None and bool((known & reference_scores.isfinite()).any()):
        shares["eval/win_rate"] = win_rate(scores, reference_scores)
    for name, share in shares.items():
        metrics[name] = float(share.mean())
        if name in ("eval/pass@1", "eval/win_rate"):
            trials = len(share)
            metrics |= _bounds(name, wilson_interval(min(float(share.sum()), trials), trials))
    return metrics


def judged_metrics(wins: Tensor) -> dict[str, float]:
    """`eval/judge_win_rate` with its interval, and `eval/judge_ties`, `…_order_bias` and
    `…_unreadable`.

    wins: [P, K, 2]: what each of K responses to P prompts has won against its reference, 0 to 1,
    where the judge was shown it first, and second; not a number where an answer could not be read.
    A comparison's two are averaged, for judges prefer a place (Zheng et al. 2023, "Judging
    LLM-as-a-Judge with MT-Bench and Chatbot Arena", section 3.4): of comparisons, ties are the
    share that nobody has won, and the order bias that in which the same place won both times, which
    are ties too. What could not be read is counted, and left out of all else; a prompt of which
    nothing is left is none of the trials.
    """
    readable = ~wins.isnan().any(-1)
    metrics = {"eval/judge_unreadable": float((~readable).sum())}
    if not bool(readable.any()):
        return metrics
    first, second = wins[readable].double().unbind(-1)
    shares = torch.stack(
        [
            each[its].double().mean()
            for each, its in zip(wins.mean(-1), readable, strict=True)
            if its.any()
        ]
    )
    interval = wilson_interval(min(float(shares.sum()), len(shares)), len(shares))
    return (
        {"eval/judge_win_rate": float(shares.mean())}
        | _bounds("eval/judge_win_rate", interval)
        | {"eval/judge_ties": float((first + second == 1).double().mean())}
        | {"eval/judge_order_bias": float(((first - second).abs() == 1).double().mean())}
        | metrics
    )


def group_metrics(scores: Tensor, pass_threshold: float, groups: Sequence[str]) -> dict[str, float]:
    """`eval/score/GROUP` and `eval/pass@1/GROUP` with its interval, of scores [P, K] whose prompts
    are of P groups."""
    metrics: dict[str, float] = {}
    for group in sorted(set(groups)):
        own = evaluation_metrics(
            scores[torch.tensor([each == group for each in groups])], pass_threshold
        )
        if "eval/score" not in own:  # the reward function abstained on all of its responses
            continue
        metrics[f"eval/score/{group}"] = own["eval/score"]
        metrics |= {
            f"eval/pass@1/{group}{end}": own[f"eval/pass@1{end}"] for end in ("", "_low", "_high")
        }
    return metrics


def _bounds(name: str, interval: tuple[float, float]) -> dict[str, float]:
    return {f"{name}_low": interval[0], f"{name}_high": interval[1]}
