"""Trackers that receive a run's metrics in addition to `metrics.jsonl`: TensorBoard, Weights &
Biases, MLflow."""

import contextlib
import logging
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import unquote, urlsplit

from aligner.files import write_file
from aligner.observability.metrics import MetricsSink, Record, read_metrics
from aligner.paths import RunPaths
from aligner.schema import Config
from aligner.schema.keys import get_masked_values

SUPERSEDED_DIRECTORY = "superseded"
"""Directory below the run's `wandb` directory to which a resume moves earlier offline recordings,
because their steps are recorded again."""

# Maximum number of parameters in one request to MLflow.
_PARAMETERS_PER_REQUEST = 100
_log = logging.getLogger(__name__)
# Maximum number of queued records of a sink.
_QUEUE_SIZE = 1000
_CLOSE_TIMEOUT_S = 60.0
_RETRY_S = 30.0
_Action = Callable[[MetricsSink], None]


def open_sinks(config: Config, paths: RunPaths) -> list[MetricsSink]:
    """Return the sinks that the configuration section `logging` enables."""
    settings = config.logging
    trackers: tuple[tuple[str, bool, Callable[[], MetricsSink]], ...] = (
        ("tensorboard", settings.tensorboard, lambda: TensorBoardSink(paths.tensorboard)),
        ("wandb", settings.wandb.enabled, lambda: WandbSink(config, paths)),
        ("mlflow", settings.mlflow.enabled, lambda: MlflowSink(config, paths)),
    )
    return [
        BackgroundSink(name, open_sink, lambda: read_metrics(paths.metrics))
        for name, is_enabled, open_sink in trackers
        if is_enabled
    ]


class BackgroundSink:
    """A sink that runs in a separate thread, so that a slow or failed tracker does not delay or end
    the training.

    The first failure is logged as a warning. The sink is opened again after a while, and then
    receives all records that it lacks.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], MetricsSink],
        read_records: Callable[[], Sequence[Record]],
        close_timeout_s: float = _CLOSE_TIMEOUT_S,
        retry_s: float = _RETRY_S,
    ) -> None:
        """Start the thread.

        Args:
            name: Name of the tracker in log messages.
            open_sink: Function that opens the tracker; it is called in the thread.
            read_records: Function that returns all records that the tracker should have.
            close_timeout_s: Maximum time that `close` waits, in seconds.
            retry_s: Time after a failure until the tracker is opened again, in seconds.
        """
        self._name = name
        self._open = open_sink
        self._read_records = read_records
        self._close_timeout_s = close_timeout_s
        self._retry_s = retry_s
        self._sink: MetricsSink | None = None
        # Records of a `resume` that the sink has not executed yet.
        self._records_to_resume: Sequence[Record] | None = None
        self.failures = 0
        """Number of failures of the tracker."""
        # Whether the sink lacks records, after a failure or because the queue was full.
        self._is_behind = False
        self._retry_at = 0.0
        self._queue: queue.Queue[tuple[_Action, bool]] = queue.Queue(_QUEUE_SIZE)
        self._thread = threading.Thread(target=self._process_queue, name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, record: Record) -> None:
        """Queue the record for the tracker."""
        self._enqueue(lambda sink: sink.write(step, record))

    def resume(self, records: Sequence[Record]) -> None:
        """Queue the resume for the tracker."""
        self._records_to_resume = records

        def resume(sink: MetricsSink) -> None:
            sink.resume(records)
            self._records_to_resume = None

        self._enqueue(resume)

    def close(self, failed: bool) -> None:
        """Wait until all queued records are written, but not longer than the timeout."""
        deadline = time.monotonic() + self._close_timeout_s
        with contextlib.suppress(queue.Full):
            self._queue.put((lambda sink: sink.close(failed), True), timeout=self._close_timeout_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() or self._is_behind:
            _log.warning(
                "%s failed %d times and is missing steps; metrics.jsonl has all steps",
                self._name,
                self.failures,
            )

    def _enqueue(self, action: _Action) -> None:
        try:
            self._queue.put_nowait((action, False))
        except queue.Full:
            self._is_behind = True

    def _process_queue(self) -> None:
        is_last = False
        while not is_last:
            action, is_last = self._queue.get()
            # Until the next attempt to open the sink, discard actions: the attempt reads all
            # records anew.
            if is_last or time.monotonic() >= self._retry_at:
                self._execute(action)

    def _execute(self, action: _Action) -> None:
        """Write the records that the tracker lacks, then execute an action. Log the first
        failure."""
        try:
            self._sink = self._sink or self._open()
            if self._is_behind:
                self._is_behind = False
                # Resume first: otherwise, the tracker would keep steps from before the resume that
                # the resumed run has trained again.
                if self._records_to_resume is not None:
                    self._sink.resume(self._records_to_resume)
                    self._records_to_resume = None
                self._sink.resume(self._read_records())
            action(self._sink)
        except Exception as error:  # the trackers' libraries raise arbitrary exceptions
            self._sink = None
            self._is_behind = True
            self.failures += 1
            self._retry_at = time.monotonic() + self._retry_s
            if self.failures == 1:
                cause = f"{type(error).__name__}: {error}"
                _log.warning(
                    "%s cannot record metrics; the run continues and tries again later: %s",
                    self._name,
                    cause,
                )


class TensorBoardSink:
    """Sink that writes TensorBoard event files.

    It uses TensorBoard's own event writer, whose import takes 0.4 s and does not import torch.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._visible_steps = _read_visible_steps(directory)
        self._events = EventFileWriter(str(directory), flush_secs=5)

    def write(self, step: int, record: Record) -> None:
        """Write each metric as a scalar. A step that TensorBoard already shows stays unchanged."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if step in self._visible_steps:
            return
        values = [Summary.Value(tag=key, simple_value=value) for key, value in record.items()]
        self._events.add_event(
            Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        )
        self._events.flush()
        self._visible_steps.add(step)

    def resume(self, records: Sequence[Record]) -> None:
        """Make TensorBoard hide the first missing step and all later steps, and write these
        again."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        steps = [int(record["step"]) for record in records]
        next_step = steps[-1] + 1 if steps else 0
        start = next((step for step in steps if step not in self._visible_steps), next_step)
        self._events.add_event(
            Event(
                wall_time=time.time(), step=start, session_log=SessionLog(status=SessionLog.START)
            )
        )
        self._events.flush()
        self._visible_steps = {step for step in self._visible_steps if step < start}
        for step, record in zip(steps, records, strict=True):
            self.write(step, {key: value for key, value in record.items() if key != "step"})

    def close(self, failed: bool) -> None:
        """Write out the buffered events, and close the file."""
        self._events.close()


def _read_visible_steps(directory: Path) -> set[int]:
    """Return the steps of a directory's event files that TensorBoard displays.

    A START event makes TensorBoard hide all earlier events of its step and of later steps.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.compat.proto.event_pb2 import SessionLog

    visible_steps: set[int] = set()
    for file in sorted(directory.glob("*tfevents*")):
        for event in LegacyEventFileLoader(str(file)).Load():
            if event.session_log.status == SessionLog.START:
                visible_steps = {step for step in visible_steps if step < event.step}
            elif event.HasField("summary"):
                visible_steps.add(event.step)
    return visible_steps


class WandbSink:
    """Sink that writes one run of Weights & Biases, with the same id after each resume."""

    def __init__(self, config: Config, paths: RunPaths) -> None:
        import wandb

        settings = config.logging.wandb
        id_file = paths.tracker_run("wandb")
        is_resumed = id_file.exists()
        if not is_resumed:
            write_file(id_file, secrets.token_hex(8))
        paths.wandb.mkdir(exist_ok=True)
        # An offline recording cannot be continued: the resumed run records all steps anew.
        for recording in [*paths.wandb.glob("offline-run-*")]:
            (paths.wandb / SUPERSEDED_DIRECTORY).mkdir(exist_ok=True)
            recording.rename(paths.wandb / SUPERSEDED_DIRECTORY / recording.name)
        self._run: Any = wandb.init(
            dir=str(paths.root),
            id=id_file.read_text(),
            name=config.run.name,
            mode=cast(Literal["offline", "online"], settings.mode),
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            tags=settings.tags,
            config=get_masked_values(config),
            resume="allow" if is_resumed and settings.mode == "online" else None,
            allow_val_change=True,
            reinit="create_new",  # the process may have other wandb runs
            settings=wandb.Settings(console="off", silent=True, save_code=False, disable_git=True),
        )
        self._next_step = int(self._run.step)

    def write(self, step: int, record: Record) -> None:
        """Log a step immediately. A step that was logged before a resume stays unchanged."""
        if step >= self._next_step:
            self._run.log(dict(record), step=step, commit=True)
            self._next_step = step + 1

    def resume(self, records: Sequence[Record]) -> None:
        """Log the records that this run lacks; an offline run, which is new, lacks all of them."""
        for record in records:
            self.write(
                int(record["step"]), {key: value for key, value in record.items() if key != "step"}
            )

    def close(self, failed: bool) -> None:
        """Finish the run, and wait for wandb's service process, which may still be writing."""
        import wandb

        self._run.finish(exit_code=int(failed))
        wandb.teardown(exit_code=int(failed))


class MlflowSink:
    """Sink that writes one run of MLflow, the same run after each resume."""

    def __init__(self, config: Config, paths: RunPaths) -> None:
        uri = config.logging.mlflow.tracking_uri or paths.mlflow.as_uri()
        self._store_directory = _local_directory(uri)
        if self._store_directory is not None:
            # MLflow rejects file stores by default, in favor of databases.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(uri)
        self._last_step = -1
        id_file = paths.tracker_run("mlflow")
        is_new = not id_file.exists()
        if is_new:
            write_file(id_file, self._create_run(config))
        self._id = id_file.read_text()
        if not is_new:
            self._back_up_description()
            self._client.update_run(self._id, "RUNNING")
        self._add_parameters(config)

    def write(self, step: int, record: Record) -> None:
        """Log a step. A step that was logged before a resume stays unchanged."""
        if step > self._last_step:
            self._log(step, record)

    def resume(self, records: Sequence[Record]) -> None:
        """Log the metrics that the store lacks, and delete later steps from a file store.

        A server cannot delete steps, and keeps the first value of each step. A file store, which
        writes one file per metric, may contain only some metrics of the step in which the run was
        killed.
        """
        last = int(records[-1]["step"]) if records else -1
        if self._store_directory is not None:
            _truncate_metrics_after(self._run_directory / "metrics", last)
        keys = self._client.get_run(self._id).data.metrics
        stored = {
            (metric.step, key)
            for key in keys
            for metric in self._client.get_metric_history(self._id, key)
        }
        for record in records:
            step = int(record["step"])
            missing = {
                key: value
                for key, value in record.items()
                if (step, to_mlflow_name(key)) not in stored and key != "step"
            }
            if missing:
                self._log(step, missing)
        self._last_step = max([last, *(step for step, _ in stored)])

    def close(self, failed: bool) -> None:
        """Set the final status of the run."""
        self._back_up_description()
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")

    @property
    def _run_directory(self) -> Path:
        """Directory of the run in a file store."""
        assert self._store_directory is not None
        return next(self._store_directory.glob(f"*/{self._id}"))

    def _back_up_description(self) -> None:
        """Copy the run's description in a file store, or restore it from the copy if it is empty.

        MLflow truncates the file before it writes it anew, so a process that is killed in between
        leaves an empty file.
        """
        if self._store_directory is not None:
            description = self._run_directory / "meta.yaml"
            copy = description.with_suffix(".before")
            if not description.read_text() and copy.exists():
                write_file(description, copy.read_text())
            write_file(copy, description.read_text())

    def _create_run(self, config: Config) -> str:
        """Create the run, and its experiment if it is missing. Return the run's id."""
        settings = config.logging.mlflow
        experiment = self._client.get_experiment_by_name(settings.experiment)
        experiment_id = (
            self._client.create_experiment(settings.experiment)
            if experiment is None
            else experiment.experiment_id
        )
        tags = {key: str(value) for key, value in settings.tags.items()}
        return str(
            self._client.create_run(experiment_id, run_name=config.run.name, tags=tags).info.run_id
        )

    def _add_parameters(self, config: Config) -> None:
        """Log the configuration as parameters.

        MLflow's parameters cannot change: a resumed run keeps its original values.
        """
        from mlflow.entities import Param

        stored = self._client.get_run(self._id).data.params
        parameters = [
            Param(key, str(value))
            for key, value in _flatten(get_masked_values(config))
            if key not in stored
        ]
        for start in range(0, len(parameters), _PARAMETERS_PER_REQUEST):
            self._client.log_batch(
                self._id, params=parameters[start : start + _PARAMETERS_PER_REQUEST]
            )

    def _log(self, step: int, record: Record) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        self._client.log_batch(
            self._id,
            [Metric(to_mlflow_name(key), value, now, step) for key, value in record.items()],
        )


def to_mlflow_name(key: str) -> str:
    """Return a metric's name in MLflow, where `_` replaces characters that MLflow rejects.

    Example: `eval/pass@1` becomes `eval/pass_1`.
    """
    return re.sub(r"[^\w\-. :/]", "_", key)


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested mappings with dotted keys."""
    for key, entry in value.items():
        if isinstance(entry, dict) and entry:
            yield from _flatten(entry, f"{prefix}{key}.")
        else:
            yield to_mlflow_name(f"{prefix}{key}"), entry


def _local_directory(uri: str) -> Path | None:
    """Return the directory of a file store; None if the URI is not a file store."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme or uri == "databricks" else Path(uri)


def _truncate_metrics_after(directory: Path, step: int) -> None:
    """Delete the metrics of steps after `step` from a file store, which MLflow's client cannot do.

    A line of a metric's file contains a time, a value and a step.
    """
    for file in [path for path in directory.rglob("*") if path.is_file()]:
        lines = file.read_text().splitlines(keepends=True)
        remaining = [line for line in lines if line.endswith("\n") and int(line.split()[2]) <= step]
        if remaining:
            write_file(file, "".join(remaining))
        else:
            file.unlink()
