"""By what a run ends before its last step: its KL to the reference, a value that is reached,
evaluations without a gain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aligner.errors import AlignerError
from aligner.schema import Config


def better_sign(metric: str) -> int:
    """1 where the highest value is the best one; -1 for losses, perplexities and distances from
    another distribution."""
    is_lower = metric.endswith(("loss", "perplexity", "_kl")) or metric.startswith(
        ("kl/", "mismatch/")
    )
    return -1 if is_lower else 1


def check_named(given: str, metric: str, measured: Mapping[str, float]) -> None:
    """Raise AlignerError when a step has metrics of this one's kind, such as eval/…, but not it;
    `given` is the key's text."""
    kind = metric.partition("/")[0] + "/"
    if metric not in measured and any(known.startswith(kind) for known in measured):
        raise AlignerError(
            f"{given}: unknown metric; metrics of this step: {', '.join(sorted(measured))}"
        )


@dataclass(frozen=True)
class EndRule:
    """What `run.end_kl`, `run.end_at` and `run.end_without_gain` say; None where the run does not
    end by it."""

    kl: float | None = None
    target: tuple[str, float] | None = None
    """A metric, and the value that it is to reach."""
    without_gain: int | None = None
    metric: str = ""
    """What an evaluation gains in: `checkpoint.best_metric`; empty where there is none."""

    @staticmethod
    def of(config: Config) -> "EndRule | None":
        """The run's; None where nothing but its steps ends it."""
        run = config.run
        if not run.ends:
            return None
        return EndRule(
            run.end_kl, run.end_target, run.end_without_gain, config.checkpoint.best_metric or ""
        )

    def reason(self, measured: Mapping[str, float], evaluations: Sequence[float]) -> str | None:
        """Why the run ends after a step that has measured this; None where it goes on.

        `evaluations` are the values of `metric` that were found so far, this step's last if it was
        evaluated: the first has nothing to gain on, and one that is as good as the best before it
        gains nothing. Raises AlignerError where the target's metric is none of those of its kind.
        """
        if self.target is not None:
            metric, value = self.target
            given, sign = f"run.end_at={metric}:{value:.10g}", better_sign(metric)
            check_named(given, metric, measured)
            if metric in measured and sign * measured[metric] >= sign * value:
                return f"{metric} {measured[metric]:.6g} has reached {given}"
        if self.kl is not None and (kl := measured.get("kl/reference", 0.0)) > self.kl:
            return f"kl/reference {kl:.6g} is above run.end_kl={self.kl:g}"
        if self.without_gain is not None and self.metric in measured:
            values = [better_sign(self.metric) * value for value in evaluations]
            best = values.index(max(values))
            if len(values) - 1 - best >= self.without_gain:
                return (
                    f"{self.metric} has not improved since the value {evaluations[best]:.6g}"
                    f" (run.end_without_gain={self.without_gain})"
                )
        return None
