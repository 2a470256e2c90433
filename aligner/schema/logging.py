"""What a run writes and shows."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option, section


@dataclass
class WandbConfig:
    """Weights & Biases, which needs the wandb extra."""

    enabled: bool = option(False, "record the metrics there too")
    mode: str = option(
        "offline",
        "offline: in the run directory, to be uploaded with `wandb sync`; online: on the server"
        " while the run goes on",
        choices=("offline", "online"),
    )
    project: str = option("aligner", "project that the run belongs to")
    entity: str | None = option(None, "team or user whose project it is; the key's own when null")
    group: str | None = option(None, "group of runs that belong together")
    tags: list[str] = option([], "the run's tags")


@dataclass
class MlflowConfig:
    """MLflow, which needs the mlflow extra."""

    enabled: bool = option(False, "record the metrics there too")
    tracking_uri: str | None = option(
        None, "the store, such as http://HOST:5000; files in the run directory, mlruns/, when null"
    )
    experiment: str = option("aligner", "experiment that the run belongs to")
    tags: dict[str, Any] = option({}, "the run's tags")


@dataclass
class LoggingConfig:
    """What is written and shown."""

    format: str = option(
        "text",
        "of logs/<role>-<rank>.log: lines of text, or one JSON object a line",
        choices=("text", "json"),
    )
    tensorboard: bool = option(True, "write TensorBoard event files")
    timeline: bool = option(True, "write what every process does when, to be seen in trace.json")
    file_mib: int = option(
        64,
        "of logs/<role>-<rank>.log and of a process's timeline: the older half of one that is"
        " longer is dropped",
        minimum=1,
    )
    samples_every: int = option(
        5,
        "show and store samples every N steps",
        minimum=1,
        read="algorithm.trainer=online|preferences",
    )
    samples_count: int = option(
        4, "samples shown", minimum=1, read="algorithm.trainer=online|preferences"
    )
    samples_mib: int = option(
        1024,
        "of samples/, which has all samples: over it the oldest token files go, then the oldest"
        " step files; 0 keeps none",
        minimum=0,
        read="algorithm.trainer=online|preferences",
    )
    wandb: WandbConfig = section(WandbConfig, read=".enabled=true")
    mlflow: MlflowConfig = section(MlflowConfig, read=".enabled=true")
