"""Checks of the section `run`: its steps, the conditions that end it early, and its date."""

from collections.abc import Iterator
from datetime import datetime

from aligner.checks.checkpoint import find_metric_problems
from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import Config
from aligner.schema.conditions import format_value


def find_problems(
    config: Config, model: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield a line for each problem of an early stop, of a condition that ends the run, or of the
    date."""
    stop_after = config.run.stop_after
    steps = config.run.steps
    if stop_after is not None and stop_after > steps:
        yield f"run.stop_after={stop_after}: must be at most run.steps={steps}"
    yield from _find_end_problems(config)
    # Any valid date stands for a date that is not set.
    try:
        datetime.fromisoformat(config.run.date or "2026-11-23")
    except ValueError as error:
        yield (
            f"run.date={config.run.date}: expected a date such as 2026-11-23, or with the time,"
            f" 2026-11-23T08:30:00: {error}"
        )


def _find_end_problems(config: Config) -> Iterator[str]:
    """Yield problems of the metrics that end the run early."""
    run = config.run
    best_metric = config.checkpoint.best_metric
    try:
        if (target := run.end_target) is not None:
            yield from _find_metric_problems(config, f"run.end_at={run.end_at}", target[0])
    except ValueError:
        yield f"run.end_at={run.end_at}: must be METRIC:NUMBER, such as eval/score:0.9"
    if run.end_without_gain is None:
        return
    setting = f"run.end_without_gain={run.end_without_gain}"
    if best_metric is not None and best_metric.startswith("eval/"):
        yield from _find_metric_problems(config, setting, best_metric)
    else:
        yield (
            f"{setting}: requires checkpoint.best_metric to be a metric of evaluations, such as"
            f" eval/score, got checkpoint.best_metric={format_value(best_metric)}"
        )


def _find_metric_problems(config: Config, setting: str, metric: str) -> Iterator[str]:
    """Yield the reasons why the run does not measure a metric before its last step.

    Args:
        config: Configuration of the run.
        setting: Key that names the metric, with its value.
        metric: Name of the metric.
    """
    yield from find_metric_problems(config, setting, metric)
    # Offline runs with held-out records are always evaluated at their end, which is too late.
    is_evaluated_at_end = config.algorithm.trainer != "online" and config.data.held_out > 0
    if (
        metric.startswith("eval/")
        and is_evaluated_at_end
        and not (config.evaluation.every or config.checkpoint.every)
    ):
        yield (
            f"{setting}: requires evaluations before the last step of the run;"
            " set evaluation.every=STEPS"
        )
