"""Where a run's metrics go beside `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from aligner.observability.metrics import MetricsSink, Record, read_metrics
from aligner.observability.trackers import MlflowSink, WandbSink
from aligner.paths import RunPaths
from aligner.schema import Config

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
    return [BackgroundSink(name, opened, lambda: read_metrics(paths.metrics)) for name, chosen, opened in known if chosen]


class BackgroundSink:
    """A sink with a thread of its own: training never waits for a server, and does not end with it.

    The first failure is told as a warning; the sink is opened again after a while, and then gets all that it lacks.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], MetricsSink],
        recorded: Callable[[], Sequence[Record]],
        close_timeout_s: float = _CLOSE_TIMEOUT_S,
        retry_s: float = _RETRY_S,
    ) -> None:
        """`open_sink` is called in the thread, too; `recorded` gives what it should have got. `close` waits for so long."""
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
            self._waiting.put((lambda sink: sink.close(failed), True), timeout=self._close_timeout_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() or self._is_behind:
            _log.warning("%s failed %d times and lacks steps; metrics.jsonl has all", self._name, self.failures)

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
                if self._to_resume is not None:  # what was done after that point before would stay otherwise
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
                _log.warning("%s does not record the metrics, but the run goes on: %s", self._name, what)


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
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._events.flush()
        self._shown.add(step)

    def resume(self, kept: Sequence[Record]) -> None:
        """Tell TensorBoard to hide what was written from the first step on that it lacks, and write all from there again."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        steps = [int(record["step"]) for record in kept]
        after = steps[-1] + 1 if steps else 0
        start = next((step for step in steps if step not in self._shown), after)
        self._events.add_event(Event(wall_time=time.time(), step=start, session_log=SessionLog(status=SessionLog.START)))
        self._events.flush()
        self._shown = {step for step in self._shown if step < start}
        for step, record in zip(steps, kept, strict=True):
            self.write(step, {key: value for key, value in record.items() if key != "step"})

    def close(self, failed: bool) -> None:
        """Write out what the writer still holds."""
        self._events.close()


def _shown_steps(directory: Path) -> set[int]:
    """What TensorBoard shows of a directory's event files: from where a run started again, nothing of before."""
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
