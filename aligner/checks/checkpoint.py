"""The metric that the best checkpoint is chosen by, against what the run measures."""

from collections.abc import Iterator

from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import Config

_EVERY_RUNS = ("eval", "policy", "throughput")
_ONLINE = ("reward", "response", "kl", "value", "mismatch", "rollout", "staleness")


def problems(config: Config, model: ModelShape | None, expected: ExpectedInputs) -> Iterator[str]:
    """A metric that the run does not have."""
    metric, trainer = config.checkpoint.best_metric, config.algorithm.trainer
    if metric is None:
        return
    kinds = [*_EVERY_RUNS, *(_ONLINE if trainer == "online" else (trainer,))]
    if metric.partition("/")[0] not in kinds:
        yield f"checkpoint.best_metric={metric}: the metrics of this run begin with {', '.join(f'{kind}/' for kind in kinds)}"
    evaluated = config.evaluation.every if trainer == "online" else config.data.held_out
    if metric.startswith("eval/") and not evaluated:
        advice = "evaluation.every=STEPS" if trainer == "online" else "data.held_out=ROWS"
        yield f"checkpoint.best_metric={metric}: the run is never evaluated; give {advice}"
