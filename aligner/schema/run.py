"""One run: its name, its directory and its length."""

import math
from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option


@dataclass
class RunConfig:
    """What the run is called, where it writes, how long it goes on."""

    experiment: str = option("", "set from the command line's experiment=NAME")
    automatic: bool = option(
        False,
        "layout, batch, lengths, learning rates and steps that neither the experiment nor the"
        " command line gives are chosen for the model, the data and the machine; always so without"
        " an experiment",
    )
    chosen: list[str] = option([], "set at launch: the keys whose values were chosen so")
    name: str | None = option(None, "run name; the experiment's name and the time when null")
    dir: str | None = option(None, "run directory; runs/<run.name> when null")
    steps: int = option(1, "training steps", minimum=1, maximum=10**9)
    stop_after: int | None = option(
        None, "stop early after this step, with a checkpoint, as a preempted run would", minimum=1
    )
    end_kl: float | None = option(
        None,
        "end after a step whose kl/reference, nats a response, is above this; never by that when"
        " null",
        above=0,
        read="algorithm.trainer=online",
    )
    end_at: str | None = option(
        None,
        "METRIC:NUMBER, such as eval/score:0.9: end after a step in which the metric is so high or,"
        " of a loss or a KL, so low; never by that when null",
        read="algorithm.trainer!=preferences|teacher_scores",
    )
    end_without_gain: int | None = option(
        None,
        "end after so many evaluations in a row that are no better than the best before them, by"
        " checkpoint.best_metric; never by that when null",
        minimum=1,
        read="algorithm.trainer!=preferences|teacher_scores",
    )
    max_restarts: int = option(
        3,
        "a trainer of which a rank is killed or hangs is started again from the last checkpoint so"
        " often, while the servers stay; 0: its end is the run's",
        minimum=0,
    )
    resume: str = option(
        "false",
        "true: continue from the last checkpoint in an existing run directory; auto: the same where"
        " there is one, else begin, also in the directory of a run that was stopped before its"
        " first",
        choices=("false", "true", "auto"),
    )
    changes: list[str] = option(
        [],
        "keys, or sections, that a resumed run is meant to have otherwise than it was started with",
        read=".resume!=false",
    )
    date: str | None = option(
        None,
        "what chat templates that ask for the date are told, such as 2026-11-23 or"
        " 2026-11-23T08:30:00; null: when the run was first launched",
    )
    inputs: dict[str, Any] = option(
        {}, "set at launch: the paths that were given as experiment:NAME, with what was given"
    )
    command: str = option("", "set at launch: the command line, but for run.dir and run.resume")

    @property
    def resumes(self) -> bool:
        """Whether training goes on from a checkpoint, where there is one."""
        return self.resume != "false"

    @property
    def ends(self) -> dict[str, Any]:
        """By what the run may end before its last step: the keys that are given, and their
        values."""
        found = {
            "run.end_kl": self.end_kl,
            "run.end_at": self.end_at,
            "run.end_without_gain": self.end_without_gain,
        }
        return {key: value for key, value in found.items() if value is not None}

    @property
    def end_target(self) -> tuple[str, float] | None:
        """The metric and the number of `end_at`. Raises ValueError for a text of another form."""
        if self.end_at is None:
            return None
        metric, _, number = self.end_at.rpartition(":")
        if not metric or not math.isfinite(float(number)):
            raise ValueError(self.end_at)
        return metric, float(number)
