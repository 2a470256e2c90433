"""Keys of logs, metrics, trackers and stored samples: section `logging`."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option, section
from aligner.schema.server import MAX_PORT


@dataclass
class WandbConfig:
    """Weights & Biases; requires the extra `wandb`."""

    enabled: bool = option(False, "Whether metrics are also logged to Weights & Biases.")
    mode: str = option(
        "offline",
        "`offline`: metrics are stored in the run directory, for upload with `wandb sync`;"
        " `online`: metrics are sent to the server during the run.",
        choices=("offline", "online"),
    )
    project: str = option("aligner", "Weights & Biases project of the run.")
    entity: str | None = option(
        None, "Team or user that owns the project; null means the owner of the API key."
    )
    group: str | None = option(None, "Group of related runs.")
    tags: list[str] = option([], "Tags of the run.")


@dataclass
class MlflowConfig:
    """MLflow; requires the extra `mlflow`."""

    enabled: bool = option(False, "Whether metrics are also logged to MLflow.")
    tracking_uri: str | None = option(
        None,
        "Tracking URI, such as `http://HOST:5000`; null means files in `mlruns/` in the run"
        " directory.",
    )
    experiment: str = option("aligner", "MLflow experiment of the run.")
    tags: dict[str, Any] = option({}, "Tags of the run.")


@dataclass
class PrometheusConfig:
    """HTTP server of the launcher with the run's metrics for Prometheus, and with health checks."""

    port: int | None = option(
        None,
        "Port of `/metrics`, `/healthz` and `/readyz`; null means that the launcher does not"
        " listen.",
        minimum=1,
        maximum=MAX_PORT,
    )
    interface: str = option(
        "127.0.0.1",
        "Address or name of the network interface on which the launcher listens. Requests for"
        " metrics must carry the run's access key, unless `server.guard=none`.",
    )


@dataclass
class LoggingConfig:
    """Logs, metrics and stored samples."""

    format: str = option(
        "text",
        "Format of the log files `logs/<role>-<rank>.log`. `text`: lines of text; `json`: one"
        " JSON object per line.",
        choices=("text", "json"),
    )
    tensorboard: bool = option(True, "Whether to write TensorBoard event files.")
    timeline: bool = option(
        True,
        "Whether to record the activities of every process with their times, for `trace.json`.",
    )
    file_mib: int = option(
        64,
        "Maximum size in MiB of a log file in `logs/`, including Triton's, and of the timeline of"
        " a process. The older half of a larger file is dropped; the first line of a log says how"
        " much was dropped.",
        minimum=1,
    )
    samples_every: int = option(
        5,
        "Number of steps between outputs of samples, which are shown and stored in"
        " `samples.jsonl`.",
        minimum=1,
        read_if="algorithm.trainer=online|preferences",
    )
    samples_count: int = option(
        4,
        "Number of samples in each output.",
        minimum=1,
        read_if="algorithm.trainer=online|preferences",
    )
    samples_mib: int = option(
        1024,
        "Maximum size in MiB of `samples/`, which stores all samples. If the directory is"
        " larger, the oldest token files are deleted first, then the oldest step files. 0 means"
        " that no samples are stored.",
        minimum=0,
        read_if="algorithm.trainer=online|preferences",
    )
    prometheus: PrometheusConfig = section(PrometheusConfig, read_if=".port!=null")
    wandb: WandbConfig = section(WandbConfig, read_if=".enabled=true")
    mlflow: MlflowConfig = section(MlflowConfig, read_if=".enabled=true")
