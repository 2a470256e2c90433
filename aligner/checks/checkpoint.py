"""Checks of the section `checkpoint`, and of keys that name a metric."""

from collections.abc import Iterator

from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import Config

# Prefixes of the metrics of every run, and of further metrics of online runs.
_COMMON_PREFIXES = ("eval", "policy")
_ONLINE_PREFIXES = (
    "reward",
    "response",
    "kl",
    "value",
    "mismatch",
    "rollout",
    "staleness",
    "distill",
)


def find_problems(
    config: Config, model: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield a line for each problem of the metric that selects the best checkpoint."""
    if (metric := config.checkpoint.best_metric) is not None:
        yield from find_metric_problems(config, f"checkpoint.best_metric={metric}", metric)


def find_metric_problems(config: Config, setting: str, metric: str) -> Iterator[str]:
    """Yield the reasons why the run does not measure a metric that a key names.

    Args:
        config: Configuration of the run.
        setting: Key with its value, for the messages.
        metric: Name of the metric.
    """
    trainer = config.algorithm.trainer
    prefixes = [*_COMMON_PREFIXES, *(_ONLINE_PREFIXES if trainer == "online" else (trainer,))]
    if metric.partition("/")[0] not in prefixes:
        yield (
            f"{setting}: the run does not have this metric; the metrics of this run begin with"
            f" {', '.join(f'{prefix}/' for prefix in prefixes)}"
        )
    is_evaluated = config.evaluation.every if trainer == "online" else config.data.held_out
    if metric.startswith("eval/") and not is_evaluated:
        advice = "evaluation.every=STEPS" if trainer == "online" else "data.held_out=ROWS"
        yield f"{setting}: the run is not evaluated; set {advice}"
