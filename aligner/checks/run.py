"""The run's steps."""

from collections.abc import Iterator

from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import Config


def problems(config: Config, model: ModelShape | None, expected: ExpectedInputs) -> Iterator[str]:
    """An early stop after the last step."""
    stop, steps = config.run.stop_after, config.run.steps
    if stop is not None and stop > steps:
        yield f"run.stop_after={stop}: the run has {steps} steps (run.steps)"
