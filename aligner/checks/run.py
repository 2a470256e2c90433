"""The run's steps, and its date."""

from collections.abc import Iterator
from datetime import datetime

from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import Config


def problems(config: Config, model: ModelShape | None, expected: ExpectedInputs) -> Iterator[str]:
    """An early stop after the last step, and a date that is none."""
    stop, steps = config.run.stop_after, config.run.steps
    if stop is not None and stop > steps:
        yield f"run.stop_after={stop}: the run has {steps} steps (run.steps)"
    try:
        datetime.fromisoformat(config.run.date or "2026-11-23")
    except ValueError as error:
        yield f"run.date={config.run.date}: must be a date such as 2026-11-23, or with the time, 2026-11-23T08:30:00: {error}"
