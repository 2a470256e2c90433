"""The metric that the best checkpoint is chosen by, against what the run measures."""

from collections.abc import Iterator

from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import Config

_EVERY_RUNS = ("eval", "policy")
_ONLINE = ("reward", "response", "kl", "value", "mismatch", "rollout", "staleness", "distill")


def problems(config: Config, model: ModelShape | None, expected: ExpectedInputs) -> Iterator[str]:
    """A metric that the run does not have."""
    if (metric := config.checkpoint.best_metric) is not None:
        yield from metric_problems(config, f"checkpoint.best_metric={metric}", metric)


def metric_problems(config: Config, given: str, metric: str) -> Iterator[str]:
    """Why the run's steps have no such metric, which a key asks for; `given` is the key with its
    value."""
    trainer = config.algorithm.trainer
    kinds = [*_EVERY_RUNS, *(_ONLINE if trainer == "online" else (trainer,))]
    if metric.partition("/")[0] not in kinds:
        yield (
            f"{given}: the run does not have this metric; the metrics of this run begin with"
            f" {', '.join(f'{kind}/' for kind in kinds)}"
        )
    evaluated = config.evaluation.every if trainer == "online" else config.data.held_out
    if metric.startswith("eval/") and not evaluated:
        advice = "evaluation.every=STEPS" if trainer == "online" else "data.held_out=ROWS"
        yield f"{given}: the run is not evaluated; set {advice}"
