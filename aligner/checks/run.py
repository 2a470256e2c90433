"""Checks of the section `run`: its steps, the conditions that end it early, and its date."""

from collections.abc import Iterator
from datetime import datetime

from aligner.checks.checkpoint import metric_problems
from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import Config
from aligner.schema.conditions import value_text


def problems(config: Config, model: ModelShape | None, expected: ExpectedInputs) -> Iterator[str]:
    """Yield a line for each problem of an early stop, of a condition that ends the run, or of the
    date."""
    stop = config.run.stop_after
    steps = config.run.steps
    if stop is not None and stop > steps:
        yield f"run.stop_after={stop}: must be at most run.steps={steps}"
    yield from _end_problems(config)
    try:
        datetime.fromisoformat(config.run.date or "2026-11-23")
    except ValueError as error:
        yield (
            f"run.date={config.run.date}: expected a date such as 2026-11-23, or with the time,"
            f" 2026-11-23T08:30:00: {error}"
        )


def _end_problems(config: Config) -> Iterator[str]:
    """Yield problems of the metrics that end the run early."""
    run = config.run
    best = config.checkpoint.best_metric
    try:
        if (target := run.end_target) is not None:
            yield from _unmeasured(config, f"run.end_at={run.end_at}", target[0])
    except ValueError:
        yield f"run.end_at={run.end_at}: must be METRIC:NUMBER, such as eval/score:0.9"
    if run.end_without_gain is None:
        return
    setting = f"run.end_without_gain={run.end_without_gain}"
    if best is not None and best.startswith("eval/"):
        yield from _unmeasured(config, setting, best)
    else:
        yield (
            f"{setting}: requires checkpoint.best_metric to be a metric of evaluations, such as"
            f" eval/score, got checkpoint.best_metric={value_text(best)}"
        )


def _unmeasured(config: Config, given: str, metric: str) -> Iterator[str]:
    """Yield the reasons why the run does not measure a metric before its last step.

    Args:
        config: Configuration of the run.
        given: Key that names the metric, with its value.
        metric: Name of the metric.
    """
    yield from metric_problems(config, given, metric)
    is_evaluated_at_its_end = config.algorithm.trainer != "online" and config.data.held_out > 0
    if (
        metric.startswith("eval/")
        and is_evaluated_at_its_end
        and not (config.evaluation.every or config.checkpoint.every)
    ):
        yield (
            f"{given}: requires evaluations before the last step of the run;"
            " set evaluation.every=STEPS"
        )
