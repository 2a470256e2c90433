"""Metrics of the episodes of a step: failures, retries, and the metrics that agents report."""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from aligner.data.types import Sample

_log = logging.getLogger(__name__)
_FAILURES = "episode/failures/"
_LEFT_OUT = "episode/left_out_fraction"


def compute_episode_metrics(samples: Sequence[Sample], samples_per_prompt: int) -> dict[str, float]:
    """Return metrics of the episodes that a step has generated; metrics that are 0 are absent.

    * `episode/failures/KIND`: number of episodes that a failure has ended, by `FailureKind`.
    * `episode/retries/KIND`: number of failures after which an episode was retried.
    * `episode/left_out_fraction`: fraction of the episodes that are not trained on, because an
      episode of their prompt has failed and has no reward.
    * `episode/metrics/NAME`: mean of a metric over the episodes whose agents reported it.

    Args:
        samples: All samples of the step, consecutive for each prompt.
        samples_per_prompt: Number of samples per prompt.
    """
    counts = Counter[str]()
    for sample in samples:
        if (report := sample.report) is None:
            continue
        if report.failure is not None:
            counts[_FAILURES + report.failure.value] += 1
        counts.update(f"episode/retries/{kind.value}" for kind in report.retries)

    metrics = {name: float(count) for name, count in counts.items()}
    metrics |= compute_reported_means(samples, "episode/metrics/")
    lost_prompts = {
        index // samples_per_prompt for index, sample in enumerate(samples) if _is_lost(sample)
    }
    if lost_prompts:
        metrics[_LEFT_OUT] = len(lost_prompts) * samples_per_prompt / len(samples)
    # sorted, because the order of the samples depends on the selection of prompts
    return dict(sorted(metrics.items()))


def compute_reported_means(samples: Iterable[Sample], prefix: str) -> dict[str, float]:
    """Return the mean of each metric over the episodes whose agents reported it.

    Args:
        samples: Samples of the episodes.
        prefix: Prefix of the names of the means, such as `episode/metrics/`.
    """
    values = defaultdict[str, list[float]](list)
    for sample in samples:
        if sample.report is not None:
            for name, value in sample.report.metrics.items():
                values[prefix + name].append(value)
    return {name: sum(values[name]) / len(values[name]) for name in sorted(values)}


def warn_of_left_out_episodes(metrics: Mapping[str, float]) -> None:
    """Log a warning if episodes of the step are not trained on because of failures.

    Args:
        metrics: Result of `compute_episode_metrics`.
    """
    if _LEFT_OUT not in metrics:
        return
    counts = ", ".join(
        f"{name.removeprefix(_FAILURES)} {count:g}"
        for name, count in metrics.items()
        if name.startswith(_FAILURES)
    )
    _log.warning(
        "the model does not learn from %.1f%% of the step's episodes, because an episode of their"
        " prompts failed without a reward (failed episodes by kind: %s); with"
        " environment.failure_reward, the model learns from the kinds error and timeout",
        100 * metrics[_LEFT_OUT],
        counts,
    )


def _is_lost(sample: Sample) -> bool:
    """Return whether a sample is an episode without a reward."""
    reward = sample.environment_reward
    return reward is not None and bool(reward.isnan())
