"""Rules that end a run early, and the direction and the validity of the metrics that keys name.

A run can end before its last step because of its KL to the reference, because a metric reaches a
target, or because evaluations stop improving.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aligner.errors import AlignerError
from aligner.schema import Config


def get_improvement_sign(metric: str) -> int:
    """Return 1 if higher values of the metric are better, otherwise -1.

    Lower values are better for losses, perplexities and distances from another distribution.
    """
    is_lower_better = metric.endswith(("loss", "perplexity", "_kl")) or metric.startswith(
        ("kl/", "mismatch/")
    )
    return -1 if is_lower_better else 1


def check_metric_name(setting: str, metric: str, metrics: Mapping[str, float]) -> None:
    """Raise AlignerError if a metric is unknown, according to the metrics of a step.

    It is unknown if the step has other metrics with the same prefix, such as eval/….

    Args:
        setting: Text of the configuration key for the error.
        metric: Name of the metric.
        metrics: Metrics of the step.
    """
    # Not every step has every kind of metric: a step without an evaluation has no eval/… at all,
    # which does not make the name wrong.
    prefix = metric.partition("/")[0] + "/"
    if metric not in metrics and any(name.startswith(prefix) for name in metrics):
        raise AlignerError(
            f"{setting}: unknown metric; metrics of this step: {', '.join(sorted(metrics))}"
        )


@dataclass(frozen=True)
class EndRule:
    """Conditions that end a run early; None for a condition that is not set."""

    max_kl: float | None = None
    """KL to the reference above which the run ends (`run.end_kl`)."""
    target: tuple[str, float] | None = None
    """Name of a metric, and the value at which the run ends (`run.end_at`)."""
    patience: int | None = None
    """Number of successive evaluations without improvement after which the run ends
    (`run.end_without_gain`)."""
    metric: str = ""
    """Metric in which evaluations must improve, from `checkpoint.best_metric`; empty without
    one."""

    @staticmethod
    def from_config(config: Config) -> "EndRule | None":
        """Return the rule of a run; None if only its number of steps ends it."""
        run = config.run
        if not run.end_conditions:
            return None
        return EndRule(
            run.end_kl, run.end_target, run.end_without_gain, config.checkpoint.best_metric or ""
        )

    def find_end_reason(
        self, metrics: Mapping[str, float], evaluations: Sequence[float]
    ) -> str | None:
        """Return why the run ends after a step; None if it continues.

        Args:
            metrics: Metrics of the step.
            evaluations: Values of `metric` measured so far, including this step's if it was
                evaluated. The first evaluation cannot improve on another, and a value equal to the
                best is no improvement.

        Raises:
            AlignerError: The metric of `run.end_at` is unknown.
        """
        if self.target is not None:
            metric, value = self.target
            setting = f"run.end_at={metric}:{value:.10g}"
            sign = get_improvement_sign(metric)
            check_metric_name(setting, metric, metrics)
            # The sign turns "at most" for metrics such as losses into "at least".
            if metric in metrics and sign * metrics[metric] >= sign * value:
                return f"{metric} {metrics[metric]:.6g} has reached {setting}"

        # A step that trained on no sample has no KL to the reference.
        if self.max_kl is not None and (kl := metrics.get("kl/reference", 0.0)) > self.max_kl:
            return f"kl/reference {kl:.6g} is above run.end_kl={self.max_kl:g}"

        # Only a step with an evaluation can exhaust the patience.
        if self.patience is not None and self.metric in metrics:
            values = [get_improvement_sign(self.metric) * value for value in evaluations]
            # `index` returns the first maximum: a value equal to the best is no improvement.
            best_index = values.index(max(values))
            if len(values) - 1 - best_index >= self.patience:
                return (
                    f"{self.metric} has not improved since the value {evaluations[best_index]:.6g}"
                    f" (run.end_without_gain={self.patience})"
                )
        return None
