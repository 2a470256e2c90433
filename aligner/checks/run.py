"""The run's steps, what ends it before the last of them, and its date."""

from collections.abc import Iterator
from datetime import datetime

from aligner.checks.checkpoint import metric_problems
from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import Config
from aligner.schema.conditions import value_text


def problems(config: Config, model: ModelShape | None, expected: ExpectedInputs) -> Iterator[str]:
    """An early stop after the last step, an end by what the run does not measure, and a date that
    is none."""
    stop, steps = config.run.stop_after, config.run.steps
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
    run, best = config.run, config.checkpoint.best_metric
    try:
        if (target := run.end_target) is not None:
            yield from _unmeasured(config, f"run.end_at={run.end_at}", target[0])
    except ValueError:
        yield f"run.end_at={run.end_at}: must be METRIC:NUMBER, such as eval/score:0.9"
    if run.end_without_gain is None:
        return
    given = f"run.end_without_gain={run.end_without_gain}"
    if best is not None and best.startswith("eval/"):
        yield from _unmeasured(config, given, best)
    else:
        yield (
            f"{given}: requires checkpoint.best_metric to be a metric of evaluations, such as"
            f" eval/score, got checkpoint.best_metric={value_text(best)}"
        )


def _unmeasured(config: Config, given: str, metric: str) -> Iterator[str]:
    """Why no step before the last has a metric that a key asks for."""
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
