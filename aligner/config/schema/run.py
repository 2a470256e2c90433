"""One run: what it is called, what it keeps and shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aligner.config.schema.options import option, section


@dataclass
class Run:
    """What the run is called, where it writes, how long it goes on."""

    experiment: str = option("", "set from the command line's experiment=NAME")
    name: str | None = option(None, "run name; the experiment's name and the time when null")
    dir: str | None = option(None, "run directory; runs/<run.name> when null")
    steps: int = option(1, "training steps", minimum=1, maximum=10**9)
    stop_after: int | None = option(None, "stop early after this step, with a checkpoint, as a preempted run would", minimum=1)
    resume: str = option(
        "false",
        "true: continue from the last checkpoint in an existing run directory; auto: the same where there is one, else begin,"
        " also in the directory of a run that was stopped before its first",
        choices=("false", "true", "auto"),
    )
    changes: list[str] = option(
        [], "keys, or sections, that a resumed run is meant to have otherwise than it was started with"
    )
    inputs: dict[str, Any] = option({}, "set at launch: the paths that were given as experiment:NAME, with what was given")
    command: str = option("", "set at launch: the command line, but for run.dir and run.resume")

    @property
    def resumes(self) -> bool:
        """Whether training goes on from a checkpoint, where there is one."""
        return self.resume != "false"


@dataclass
class Checkpoint:
    """When the run can be resumed."""

    every: int = option(0, "save every N steps; 0: at the end only", minimum=0)
    keep: int = option(2, "newest checkpoints kept; older ones are deleted", minimum=1)
    best_metric: str | None = option(
        None,
        "also keep the best checkpoint by this metric, the highest value or the lowest of a loss: such as reward/mean, or"
        " eval/score among the steps that are evaluated",
    )
    asynchronous: bool = option(True, "write a checkpoint while training goes on, from a copy in host memory")


@dataclass
class Wandb:
    """Weights & Biases, which needs the wandb extra."""

    enabled: bool = option(False, "record the metrics there too")
    mode: str = option(
        "offline",
        "offline: in the run directory, to be uploaded with `wandb sync`; online: on the server while the run goes on",
        choices=("offline", "online"),
    )
    project: str = option("aligner", "project that the run belongs to")
    entity: str | None = option(None, "team or user whose project it is; the key's own when null")
    group: str | None = option(None, "group of runs that belong together")
    tags: list[str] = option([], "the run's tags")


@dataclass
class Mlflow:
    """MLflow, which needs the mlflow extra."""

    enabled: bool = option(False, "record the metrics there too")
    tracking_uri: str | None = option(
        None, "the store, such as http://HOST:5000; files in the run directory, mlruns/, when null"
    )
    experiment: str = option("aligner", "experiment that the run belongs to")
    tags: dict[str, Any] = option({}, "the run's tags")


@dataclass
class Logging:
    """What is written and shown."""

    format: str = option(
        "text", "of logs/<role>-<rank>.log: lines of text, or one JSON object a line", choices=("text", "json")
    )
    tensorboard: bool = option(True, "write TensorBoard event files")
    timeline: bool = option(True, "write what every process does when, to be seen in trace.json")
    samples_every: int = option(5, "show and store samples every N steps", minimum=1)
    samples_count: int = option(4, "samples shown", minimum=1)
    wandb: Wandb = section(Wandb)
    mlflow: Mlflow = section(Mlflow)
