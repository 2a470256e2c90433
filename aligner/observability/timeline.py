"""Timing of a run: the spans of each process, the phases of a step, and the stages of the start.

- `Timeline` appends the spans of a process to `timeline/<role>-<rank>.jsonl`.
- `PhaseTimer` sums the seconds of each phase of a step.
- While a role starts, `report_stage` writes its current stage to a file. `StageWatch` reports the
  stages that take long.

The timeline reads the machine's wall clock (CLOCK_REALTIME) once, when a process opens its file;
afterwards it counts with the process's monotonic clock. `clock_offset_us`, the offset to the clock
of the trainer's rank 0, is not measured: it is always 0.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.files import append_to_file, read_newer_half, write_file
from aligner.observability.logs import set_log_step
from aligner.paths import RunPaths, get_run_paths
from aligner.schema import Config

PHASE_SPAN_NAMES = {"reshard": "publish", "server_wait": "wait"}
"""Names in the timeline of those trainer phases that have another name in the metrics."""

TRUNCATION_MARK = b'{"cut": true}'
"""First line of a file whose older half was deleted."""

# Minimum duration of a reported stage in seconds.
_LONG_STAGE_S = 2.0
# Stage that is reported during each phase of the first step.
_FIRST_STEP_STAGES = {
    "generate": "generating the first samples",
    "server_wait": "waiting for the first results from the servers",
    "logprobs": "computing the first log-probs",
    "train": "training the first step",
    "reshard": "syncing the new weights to the engine",
    "evaluate": "evaluating the initial model",
}

# Number of bytes at the end of a file that are searched for the last line break.
_TAIL_BYTES = 1 << 20


class Timeline:
    """Spans of one process. Each thread's spans are nested or disjoint.

    Spans are buffered until `flush`; a killed process loses its buffered spans.
    """

    def __init__(
        self,
        path: Path | None,
        span_names: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
        limit: int = sys.maxsize,
    ) -> None:
        """Open the timeline; an existing file is continued.

        Args:
            path: File of the spans; None writes nothing.
            span_names: Name of a span in the file by the name that `add` or `span` gets. A name
                that is missing here stays unchanged.
            clock: Monotonic clock that returns seconds.
            wall_clock: Clock that returns seconds since the epoch.
            limit: Size in bytes above which the older half of the file is deleted.
        """
        self._path = path
        self._span_names = dict(span_names or {})
        self._clock = clock
        self._limit = limit
        self._step: int | None = None
        self._pending: deque[dict[str, Any]] = deque()
        self._origin = clock()
        self._origin_us = round(wall_clock() * 1e6)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _truncate_unfinished_line(path)
            self._pending.append({"opened": self._origin_us, "clock_offset_us": 0})
            self.flush()

    def add(self, name: str, start: float, end: float, **attributes: Any) -> None:
        """Add a span. May be called from any thread.

        Args:
            name: Name of the span.
            start: Start of the span in seconds of the clock.
            end: End of the span in seconds of the clock.
            attributes: Further properties of the span, as JSON values.
        """
        if self._path is None:
            return
        start_us = self._microseconds(start)
        end_us = self._microseconds(end)
        span: dict[str, Any] = {
            "name": self._span_names.get(name, name),
            "start": start_us,
            "us": end_us - start_us,
        }
        if self._step is not None:
            span["step"] = self._step
        if threading.current_thread() is not threading.main_thread():
            span["thread"] = threading.current_thread().name
        self._pending.append(span | attributes)

    @contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[None]:
        """Add a span of the time inside the block, even if the block raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, start, self._clock(), **attributes)

    def begin_run(self, completed_steps: int) -> None:
        """Record that a trainer starts or resumes after `completed_steps` steps.

        Readers ignore earlier spans of later steps, because the resumed run repeats these steps.
        """
        if self._path is not None:
            self._pending.append({"steps_done": completed_steps})
            self.flush()

    def begin_step(self, step: int) -> None:
        """Write the buffered spans, and set the step of all following spans and log records."""
        self.flush()
        self._step = step
        set_log_step(step)

    def flush(self) -> None:
        """Write the buffered spans."""
        lines = ""
        # Pop the spans one by one, because other threads may add spans at the same time.
        while self._pending:
            lines += json.dumps(self._pending.popleft()) + "\n"
        if lines and self._path is not None:
            append_to_file(self._path, lines)
            with self._path.open("rb") as file:
                remaining = read_newer_half(file, self._limit)
            if remaining is not None:
                write_file(self._path, TRUNCATION_MARK + b"\n" + remaining)

    def _microseconds(self, seconds: float) -> int:
        """Convert seconds of the clock to microseconds since the epoch.

        The conversion is monotonic, so that nested spans are still nested after rounding.
        """
        return self._origin_us + round((seconds - self._origin) * 1e6)


class PhaseTimer:
    """Timer that sums the seconds of each phase over a step; different phases may overlap."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        on_end: Callable[[str, float, float], None] | None = None,
        on_begin: Callable[[str], None] | None = None,
        open_range: Callable[[str], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> None:
        """Create the timer.

        Args:
            clock: Monotonic clock that returns seconds.
            on_end: Function that is called at the end of each `phase` block with the phase's name,
                and the block's start and end in seconds of the clock.
            on_begin: Function that is called at the start of each `phase` block with the phase's
                name.
            open_range: Function that returns a context for each `phase` block, which marks the
                phase for a profiler.
        """
        self.on_begin = on_begin
        self._open_range = open_range or contextlib.nullcontext
        self._clock = clock
        self._on_end = on_end
        self._open: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._since = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the block to the phase `name`.

        Raises:
            ValueError: If the name is "step", or the phase is already being timed.
        """
        if name == "step":
            raise ValueError("the phase name 'step' is reserved for the time of the whole step")
        if name in self._open:
            raise ValueError(f"phase {name!r} is already being timed")
        self._open.add(name)
        if self.on_begin is not None:
            self.on_begin(name)
        start = self._clock()
        try:
            with self._open_range(name):
                yield
        finally:
            end = self._clock()
            self._open.remove(name)
            self._seconds[name] = self._seconds.get(name, 0.0) + end - start
            if self._on_end is not None:
                self._on_end(name, start, end)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call by metric name, `time/<phase>` and `time/step`,
        and reset the timer.

        Raises:
            ValueError: If a phase is still being timed.
        """
        if self._open:
            raise ValueError(f"phases still being timed: {', '.join(sorted(self._open))}")
        now = self._clock()
        seconds = {
            "time/step": now - self._since,
            **{f"time/{name}": duration for name, duration in self._seconds.items()},
        }
        self._seconds = {}
        self._since = now
        return seconds


def open_timeline(
    config: Config, role: str, rank: int, span_names: Mapping[str, str] = PHASE_SPAN_NAMES
) -> Timeline:
    """Open the timeline of a rank of a role or server group; with `logging.timeline=false`, it
    writes nothing."""
    path = get_run_paths(config).timeline / f"{role}-{rank}.jsonl"
    if role == "trainer" and config.engine.placement == "server":
        # The generator role generates the samples, while the trainer waits.
        span_names = {**span_names, "generate": "wait"}
    return Timeline(
        path if config.logging.timeline else None, span_names, limit=config.logging.file_mib << 20
    )


def _truncate_unfinished_line(path: Path) -> None:
    """Delete the unfinished last line that a killed writer may have written."""
    if not path.exists():
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - _TAIL_BYTES)
        file.seek(start)
        complete_size = start + file.read().rfind(b"\n") + 1
    if complete_size < size:
        os.truncate(path, complete_size)


def report_stage(config: Config, role: str, stage: str | None) -> None:
    """Write the current stage of a role to the role's file. Ranks other than 0 do nothing.

    Args:
        config: The run's configuration.
        role: Role or server group.
        stage: Current stage, for example "loading the weights"; None deletes the file, because the
            role has started.
    """
    if int(os.environ.get("RANK", "0")):
        return
    file = get_run_paths(config).stages / role
    # Ignore errors: a full disk also fails other writes, which raise.
    with contextlib.suppress(OSError):
        if stage is None:
            file.unlink(missing_ok=True)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(stage, encoding="utf-8")


def report_phase(config: Config, phase: str) -> None:
    """Report a phase of the trainer's first step as the trainer's stage."""
    if stage := _FIRST_STEP_STAGES.get(phase):
        report_stage(config, "trainer", stage)


def read_stages(paths: RunPaths) -> Mapping[str, str]:
    """Return the current stage of each role that is starting."""
    texts = {}
    for file in sorted(paths.stages.glob("*")):
        # OSError: the role has just deleted its file.
        with contextlib.suppress(OSError):
            texts[file.name] = file.read_text(encoding="utf-8")
    return {role: text for role, text in texts.items() if text}


def delete_stages(paths: RunPaths) -> None:
    """Delete the stage files of an earlier start."""
    for file in paths.stages.glob("*"):
        file.unlink(missing_ok=True)


@dataclass
class _Stage:
    """Current stage of a role."""

    text: str
    since: float
    """Time at which the stage was first seen, in seconds of the watch's clock."""
    is_reported: bool = False
    """Whether the stage has been reported because it takes long."""


class StageWatch:
    """Reports start stages that take 2 s or longer, and their duration when they end."""

    def __init__(
        self,
        paths: RunPaths,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the watch.

        Args:
            paths: The run's paths.
            report: Function that is called with the text of each report.
            clock: Monotonic clock that returns seconds.
        """
        self._paths = paths
        self._report = report
        self._clock = clock
        self._stages: dict[str, _Stage] = {}

    def poll(self) -> None:
        """Read the stage files. Report the stages that have taken long since their first poll, and
        the end of each stage that was reported before."""
        now = self._clock()
        texts = read_stages(self._paths)
        for role in [role for role, stage in self._stages.items() if texts.get(role) != stage.text]:
            stage = self._stages.pop(role)
            if stage.is_reported:
                self._report(f"{role}: {stage.text} took {now - stage.since:.0f} s")
        for role, text in texts.items():
            stage = self._stages.setdefault(role, _Stage(text, now))
            if not stage.is_reported and now - stage.since >= _LONG_STAGE_S:
                stage.is_reported = True
                self._report(f"{role}: {text} …")
