"""Where a run's metrics go beside `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow."""

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
from aligner.schema.keys import shown

SUPERSEDED = "superseded"
"""Where, below the run's `wandb` directory, what was recorded offline before a resume is kept: its
steps are recorded anew."""

_PARAMETERS_AT_ONCE = 100
_log = logging.getLogger(__name__)
_WAITING = 1000
_CLOSE_TIMEOUT_S, _RETRY_S = 60.0, 30.0
_Action = Callable[[MetricsSink], None]


def open_sinks(config: Config, paths: RunPaths) -> list[MetricsSink]:
    """All that `logging` asks for."""
    settings = config.logging
    known: tuple[tuple[str, bool, Callable[[], MetricsSink]], ...] = (
        ("tensorboard", settings.tensorboard, lambda: TensorBoardSink(paths.tensorboard)),
        ("wandb", settings.wandb.enabled, lambda: WandbSink(config, paths)),
        ("mlflow", settings.mlflow.enabled, lambda: MlflowSink(config, paths)),
    )
    return [
        BackgroundSink(name, opened, lambda: read_metrics(paths.metrics))
        for name, chosen, opened in known
        if chosen
    ]


class BackgroundSink:
    """A sink with a thread of its own: training never waits for a server, and does not end with it.

    The first failure is told as a warning; the sink is opened again after a while, and then gets
    all that it lacks.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], MetricsSink],
        recorded: Callable[[], Sequence[Record]],
        close_timeout_s: float = _CLOSE_TIMEOUT_S,
        retry_s: float = _RETRY_S,
    ) -> None:
        """`open_sink` is called in the thread, too; `recorded` gives what it should have got.
        `close` waits for so long."""
        self._name, self._open, self._recorded = name, open_sink, recorded
        self._close_timeout_s, self._retry_s = close_timeout_s, retry_s
        self._sink: MetricsSink | None = None
        self._to_resume: Sequence[Record] | None = None
        self.failures = 0
        self._is_behind, self._retry_at = False, 0.0
        self._waiting: queue.Queue[tuple[_Action, bool]] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, record: Record) -> None:
        """Hand the record on."""
        self._put(lambda sink: sink.write(step, record))

    def resume(self, kept: Sequence[Record]) -> None:
        """Hand the records on."""
        self._to_resume = kept

        def resume(sink: MetricsSink) -> None:
            sink.resume(kept)
            self._to_resume = None

        self._put(resume)

    def close(self, failed: bool) -> None:
        """Wait until all is written, but not forever."""
        deadline = time.monotonic() + self._close_timeout_s
        with contextlib.suppress(queue.Full):
            self._waiting.put(
                (lambda sink: sink.close(failed), True), timeout=self._close_timeout_s
            )
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() or self._is_behind:
            _log.warning(
                "%s failed %d times and is missing steps; metrics.jsonl has all steps",
                self._name,
                self.failures,
            )

    def _put(self, action: _Action) -> None:
        try:
            self._waiting.put_nowait((action, False))
        except queue.Full:
            self._is_behind = True

    def _work(self) -> None:
        is_last = False
        while not is_last:
            action, is_last = self._waiting.get()
            if is_last or time.monotonic() >= self._retry_at:
                self._do(action)

    def _do(self, action: _Action) -> None:
        try:
            self._sink = self._sink or self._open()
            if self._is_behind:
                self._is_behind = False
                # what was done after that point before would stay otherwise
                if self._to_resume is not None:
                    self._sink.resume(self._to_resume)
                    self._to_resume = None
                self._sink.resume(self._recorded())
            action(self._sink)
        except Exception as error:  # whatever a tracker's library raises
            self._sink, self._is_behind = None, True
            self.failures += 1
            self._retry_at = time.monotonic() + self._retry_s
            if self.failures == 1:
                what = f"{type(error).__name__}: {error}"
                _log.warning(
                    "%s cannot record metrics; the run continues and tries again later: %s",
                    self._name,
                    what,
                )


class TensorBoardSink:
    """TensorBoard's own event writer, which imports in 0.4 s and without torch."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._shown = _shown_steps(directory)
        self._events = EventFileWriter(str(directory), flush_secs=5)

    def write(self, step: int, record: Record) -> None:
        """Write a scalar each; a step that TensorBoard shows already stays as it is."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if step in self._shown:
            return
        values = [Summary.Value(tag=key, simple_value=value) for key, value in record.items()]
        self._events.add_event(
            Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        )
        self._events.flush()
        self._shown.add(step)

    def resume(self, kept: Sequence[Record]) -> None:
        """Tell TensorBoard to hide what was written from the first step on that it lacks, and write
        all from there again."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        steps = [int(record["step"]) for record in kept]
        after = steps[-1] + 1 if steps else 0
        start = next((step for step in steps if step not in self._shown), after)
        self._events.add_event(
            Event(
                wall_time=time.time(), step=start, session_log=SessionLog(status=SessionLog.START)
            )
        )
        self._events.flush()
        self._shown = {step for step in self._shown if step < start}
        for step, record in zip(steps, kept, strict=True):
            self.write(step, {key: value for key, value in record.items() if key != "step"})

    def close(self, failed: bool) -> None:
        """Write out what the writer still holds."""
        self._events.close()


def _shown_steps(directory: Path) -> set[int]:
    """What TensorBoard shows of a directory's event files: from where a run started again, nothing
    of before."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.compat.proto.event_pb2 import SessionLog

    shown: set[int] = set()
    for file in sorted(directory.glob("*tfevents*")):
        for event in LegacyEventFileLoader(str(file)).Load():
            if event.session_log.status == SessionLog.START:
                shown = {step for step in shown if step < event.step}
            elif event.HasField("summary"):
                shown.add(event.step)
    return shown


class WandbSink:
    """One run of Weights & Biases, under the same id however often the run is resumed."""

    def __init__(self, config: Config, paths: RunPaths) -> None:
        import wandb

        settings, id_file = config.logging.wandb, paths.tracker_run("wandb")
        is_resumed = id_file.exists()
        if not is_resumed:
            write_file(id_file, secrets.token_hex(8))
        paths.wandb.mkdir(exist_ok=True)
        for earlier in [*paths.wandb.glob("offline-run-*")]:
            (paths.wandb / SUPERSEDED).mkdir(exist_ok=True)
            earlier.rename(paths.wandb / SUPERSEDED / earlier.name)
        self._run: Any = wandb.init(
            dir=str(paths.root),
            id=id_file.read_text(),
            name=config.run.name,
            mode=cast(Literal["offline", "online"], settings.mode),
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            tags=settings.tags,
            config=shown(config),
            resume="allow" if is_resumed and settings.mode == "online" else None,
            allow_val_change=True,
            reinit="create_new",  # no run of the process's: there may be others
            settings=wandb.Settings(console="off", silent=True, save_code=False, disable_git=True),
        )
        self._next = int(self._run.step)

    def write(self, step: int, record: Record) -> None:
        """Log a step, at once; one that the server has already, from before the run was resumed,
        stays as it is there."""
        if step >= self._next:
            self._run.log(dict(record), step=step, commit=True)
            self._next = step + 1

    def resume(self, kept: Sequence[Record]) -> None:
        """Log again what this run does not have: offline everything, for it begins anew."""
        for record in kept:
            self.write(
                int(record["step"]), {key: value for key, value in record.items() if key != "step"}
            )

    def close(self, failed: bool) -> None:
        """Finish the run, and wait for wandb's own process, which is still writing then."""
        import wandb

        self._run.finish(exit_code=int(failed))
        wandb.teardown(exit_code=int(failed))


class MlflowSink:
    """One run of MLflow, the same however often the run is resumed."""

    def __init__(self, config: Config, paths: RunPaths) -> None:
        uri = config.logging.mlflow.tracking_uri or paths.mlflow.as_uri()
        self._files = _local_directory(uri)
        if self._files is not None:
            # MLflow would rather have a database
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(uri)
        self._last = -1
        id_file = paths.tracker_run("mlflow")
        is_new = not id_file.exists()
        if is_new:
            write_file(id_file, self._create(config))
        self._id = id_file.read_text()
        if not is_new:
            self._keep_description()
            self._client.update_run(self._id, "RUNNING")
        self._add_parameters(config)

    def write(self, step: int, record: Record) -> None:
        """Log a step; one that the store has already, from before the run was resumed, stays as it
        is there."""
        if step > self._last:
            self._log(step, record)

    def resume(self, kept: Sequence[Record]) -> None:
        """Log what the store lacks, and drop what was done after it. A server drops nothing: there
        the first values stay.

        A file store may have a part of the step in which the run was killed: it writes a file a
        metric.
        """
        last = int(kept[-1]["step"]) if kept else -1
        if self._files is not None:
            _cut_after(self._run_directory / "metrics", last)
        keys = self._client.get_run(self._id).data.metrics
        found = {
            (metric.step, key)
            for key in keys
            for metric in self._client.get_metric_history(self._id, key)
        }
        for record in kept:
            step = int(record["step"])
            lacking = {
                key: value
                for key, value in record.items()
                if (step, metric_name(key)) not in found and key != "step"
            }
            if lacking:
                self._log(step, lacking)
        self._last = max([last, *(step for step, _ in found)])

    def close(self, failed: bool) -> None:
        """Say that the run has ended."""
        self._keep_description()
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")

    @property
    def _run_directory(self) -> Path:
        """Of a file store."""
        assert self._files is not None
        return next(self._files.glob(f"*/{self._id}"))

    def _keep_description(self) -> None:
        """A file store empties the run's description before it writes it anew: who is killed in
        between has a copy."""
        if self._files is not None:
            description = self._run_directory / "meta.yaml"
            copy = description.with_suffix(".before")
            if not description.read_text() and copy.exists():
                write_file(description, copy.read_text())
            write_file(copy, description.read_text())

    def _create(self, config: Config) -> str:
        settings = config.logging.mlflow
        found = self._client.get_experiment_by_name(settings.experiment)
        experiment = (
            self._client.create_experiment(settings.experiment)
            if found is None
            else found.experiment_id
        )
        tags = {key: str(value) for key, value in settings.tags.items()}
        return str(
            self._client.create_run(experiment, run_name=config.run.name, tags=tags).info.run_id
        )

    def _add_parameters(self, config: Config) -> None:
        """The configuration. MLflow's parameters never change: of a resumed run they are those that
        it was begun with."""
        from mlflow.entities import Param

        known = self._client.get_run(self._id).data.params
        parameters = [
            Param(key, str(value)) for key, value in _flat(shown(config)) if key not in known
        ]
        for start in range(0, len(parameters), _PARAMETERS_AT_ONCE):
            self._client.log_batch(self._id, params=parameters[start : start + _PARAMETERS_AT_ONCE])

    def _log(self, step: int, record: Record) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        self._client.log_batch(
            self._id, [Metric(metric_name(key), value, now, step) for key, value in record.items()]
        )


def metric_name(key: str) -> str:
    """What a metric is called in MLflow, which takes no other characters: `eval/pass@1` is
    `eval/pass_1`."""
    return re.sub(r"[^\w\-. :/]", "_", key)


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, entry in value.items():
        if isinstance(entry, dict) and entry:
            yield from _flat(entry, f"{prefix}{key}.")
        else:
            yield metric_name(f"{prefix}{key}"), entry


def _local_directory(uri: str) -> Path | None:
    """The directory of a file store; None for another."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme or uri == "databricks" else Path(uri)


def _cut_after(directory: Path, step: int) -> None:
    """Drop what a file store has of later steps: its clients cannot. A line is a time, a value and
    a step."""
    for file in [path for path in directory.rglob("*") if path.is_file()]:
        lines = file.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and int(line.split()[2]) <= step]
        if kept:
            write_file(file, "".join(kept))
        else:
            file.unlink()
