"""Keys of the name, directory, length and resumption of a run: section `run`."""

import math
from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option


@dataclass
class RunConfig:
    """Name, directory, length and resumption of the run."""

    experiment: str = option(
        "", "Name of the experiment; set by `experiment=NAME` on the command line."
    )
    automatic: bool = option(
        False,
        "Whether aligner chooses the settings that neither the experiment nor the command line"
        " sets: layout, batch size, lengths, learning rates and number of steps. The choices"
        " depend on the model, the data and the machine. Always true without an experiment.",
    )
    chosen: list[str] = option(
        [], "Keys whose values aligner chose because of `run.automatic`; set at launch."
    )
    name: str | None = option(
        None,
        "Name of the run; null means the experiment's name followed by the time of the launch.",
    )
    dir: str | None = option(None, "Run directory; null means `runs/<run.name>`.")
    steps: int = option(1, "Number of training steps.", minimum=1, maximum=10**9)
    stop_after: int | None = option(
        None,
        "Step after which the run saves a checkpoint and stops, as after a preemption; null"
        " means that the run does not stop early.",
        minimum=1,
    )
    end_kl: float | None = option(
        None,
        "Maximum KL divergence to the reference (`kl/reference`) in nats per response. The run"
        " ends after the first step with a higher value. Null means no maximum.",
        above=0,
        read_if="algorithm.trainer=online",
    )
    end_at: str | None = option(
        None,
        "Target of a metric as `METRIC:NUMBER`, such as `eval/score:0.9`. The run ends after"
        " the first step at which the metric is at least the target (for a loss, perplexity, KL"
        " or `mismatch/…`: at most the target). Null means no target.",
        read_if="algorithm.trainer!=preferences|teacher_scores",
    )
    end_without_gain: int | None = option(
        None,
        "Early-stopping patience: number of consecutive evaluations without a new best value of"
        " `checkpoint.best_metric` after which the run ends. Null means no early stopping.",
        minimum=1,
        read_if="algorithm.trainer!=preferences|teacher_scores",
    )
    max_restarts: int = option(
        3,
        "Maximum number of trainer restarts per hour, from the last checkpoint, after a trainer"
        " rank was killed or hung. The servers keep running during a restart. 0 means that the"
        " first such failure ends the run.",
        minimum=0,
    )
    resume: str = option(
        "false",
        "`false`: start a new run. `true`: resume the run from the last checkpoint in the run"
        " directory. `auto`: resume if the run directory has a checkpoint; otherwise start from"
        " the beginning, even if an earlier run in the directory stopped before its first"
        " checkpoint.",
        choices=("false", "true", "auto"),
    )
    changes: list[str] = option(
        [],
        "Keys or sections that a resumed run may change, in addition to the keys that"
        ' docs/configuration.md lists under "What a resumed run may change". Any other change is'
        " an error. Keys that define the weights of the initial model can never change.",
        read_if=".resume!=false",
    )
    date: str | None = option(
        None,
        "Date for chat templates that call `strftime_now`, such as `2026-11-23` or"
        " `2026-11-23T08:30:00`; null means the time of the first launch.",
    )
    inputs: dict[str, Any] = option(
        {},
        "Original `experiment:NAME` references by key, before aligner replaced the references"
        " with paths; set at launch.",
    )
    command: str = option(
        "", "Command line of the launch, without `run.dir` and `run.resume`; set at launch."
    )

    @property
    def should_resume(self) -> bool:
        """Whether the run resumes if its directory has a checkpoint."""
        return self.resume != "false"

    @property
    def end_conditions(self) -> dict[str, Any]:
        """Values of the keys that are set and can end the run before its last step, by key."""
        values = {
            "run.end_kl": self.end_kl,
            "run.end_at": self.end_at,
            "run.end_without_gain": self.end_without_gain,
        }
        return {key: value for key, value in values.items() if value is not None}

    @property
    def end_target(self) -> tuple[str, float] | None:
        """Metric and number of `end_at`; None if the key is not set.

        Raises:
            ValueError: `end_at` does not have the form METRIC:NUMBER.
        """
        if self.end_at is None:
            return None
        # float() raises ValueError, too, if the part after the colon is not a number.
        metric, _, number = self.end_at.rpartition(":")
        if not metric or not math.isfinite(float(number)):
            raise ValueError(self.end_at)
        return metric, float(number)
