"""Rules that end a run early, and the direction and the validity of the metrics that keys name.

A run can end before its last step because of its KL to the reference, because a metric reaches a
target, or because evaluations stop improving.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aligner.errors import AlignerError
from aligner.schema import Config


def better_sign(metric: str) -> int:
    """Return 1 if higher values of the metric are better, otherwise -1.

    Lower values are better for losses, perplexities and distances from another distribution.
    """
    is_lower = metric.endswith(("loss", "perplexity", "_kl")) or metric.startswith(
        ("kl/", "mismatch/")
    )
    return -1 if is_lower else 1


def check_named(given: str, metric: str, measured: Mapping[str, float]) -> None:
    """Raise AlignerError if a metric is unknown, according to the metrics of a step.

    It is unknown if the step has other metrics with the same prefix, such as eval/….

    Args:
        given: Text of the configuration key for the error.
        metric: Name of the metric.
        measured: Metrics of the step.
    """
    kind = metric.partition("/")[0] + "/"
    if metric not in measured and any(name.startswith(kind) for name in measured):
        raise AlignerError(
            f"{given}: unknown metric; metrics of this step: {', '.join(sorted(measured))}"
        )


@dataclass(frozen=True)
class EndRule:
    """Values of `run.end_kl`, `run.end_at` and `run.end_without_gain`; None for a condition that is
    not set."""

    kl: float | None = None
    target: tuple[str, float] | None = None
    """Name of a metric, and the value that it must reach."""
    without_gain: int | None = None
    metric: str = ""
    """Metric in which evaluations must improve, from `checkpoint.best_metric`; empty without
    one."""

    @staticmethod
    def of(config: Config) -> "EndRule | None":
        """Return the rule of a run; None if only its number of steps ends it."""
        run = config.run
        if not run.ends:
            return None
        return EndRule(
            run.end_kl, run.end_target, run.end_without_gain, config.checkpoint.best_metric or ""
        )

    def reason(self, measured: Mapping[str, float], evaluations: Sequence[float]) -> str | None:
        """Return why the run ends after a step; None if it continues.

        Args:
            measured: Metrics of the step.
            evaluations: Values of `metric` measured so far, including this step's if it was
                evaluated. The first evaluation cannot improve on another, and a value equal to the
                best is no improvement.

        Raises:
            AlignerError: The metric of `run.end_at` is unknown.
        """
        if self.target is not None:
            metric, value = self.target
            setting = f"run.end_at={metric}:{value:.10g}"
            sign = better_sign(metric)
            check_named(setting, metric, measured)
            if metric in measured and sign * measured[metric] >= sign * value:
                return f"{metric} {measured[metric]:.6g} has reached {setting}"
        if self.kl is not None and (kl := measured.get("kl/reference", 0.0)) > self.kl:
            return f"kl/reference {kl:.6g} is above run.end_kl={self.kl:g}"
        if self.without_gain is not None and self.metric in measured:
            # `index` returns the first maximum: a value equal to the best is no improvement.
            values = [better_sign(self.metric) * value for value in evaluations]
            best = values.index(max(values))
            if len(values) - 1 - best >= self.without_gain:
                return (
                    f"{self.metric} has not improved since the value {evaluations[best]:.6g}"
                    f" (run.end_without_gain={self.without_gain})"
                )
        return None
