"""What each process of a run does when: a step's phases, and spans of time appended to
`timeline/<role>-<rank>.jsonl`.

The clock is the machine's wall clock (CLOCK_REALTIME), read once when a process opens its file;
from there its monotonic clock counts. `clock_offset_us`, what would make it the clock of the
trainer's rank 0, is not measured, and 0.
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

from aligner.files import append, newer_half, write_file
from aligner.observability.logs import at_step
from aligner.paths import RunPaths, run_paths
from aligner.schema import Config

_LONG_S = 2.0
"""What takes less is not told: nobody has begun to wonder."""
_FIRST_STEP = {
    "generate": "generating the first samples",
    "server_wait": "waiting for the first results from the servers",
    "logprobs": "computing the first log-probs",
    "train": "training the first step",
    "reshard": "syncing the new weights to the engine",
    "evaluate": "evaluating the initial model",
}
"""What phases of a step are called before one has ended."""


def tell_stage(config: Config, role: str, stage: str | None) -> None:
    """The first rank of a role, or server group, is at this now; None: it has started. Other ranks
    say nothing."""
    if int(os.environ.get("RANK", "0")):
        return
    file = run_paths(config).stages / role
    with contextlib.suppress(OSError):  # of a full disk others tell
        if stage is None:
            file.unlink(missing_ok=True)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(stage, encoding="utf-8")


def tell_phase(config: Config, phase: str) -> None:
    """The trainer begins a phase of its first step."""
    if stage := _FIRST_STEP.get(phase):
        tell_stage(config, "trainer", stage)


def forget_stages(paths: RunPaths) -> None:
    """Drop what an earlier start has left."""
    for file in paths.stages.glob("*"):
        file.unlink(missing_ok=True)


@dataclass
class _Stage:
    text: str
    since: float
    is_told: bool = False


class StageWatch:
    """Tells what each role is at, once that has taken a while, and how long it took."""

    def __init__(
        self,
        paths: RunPaths,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._tell, self._clock = paths.stages, tell, clock
        self._now: dict[str, _Stage] = {}

    def poll(self) -> None:
        """Look, and tell what is to be told."""
        now, found = self._clock(), self._read()
        for role in [role for role, stage in self._now.items() if found.get(role) != stage.text]:
            stage = self._now.pop(role)
            if stage.is_told:
                self._tell(f"{role}: {stage.text} took {now - stage.since:.0f} s")
        for role, text in found.items():
            stage = self._now.setdefault(role, _Stage(text, now))
            if not stage.is_told and now - stage.since >= _LONG_S:
                stage.is_told = True
                self._tell(f"{role}: {text} …")

    def _read(self) -> Mapping[str, str]:
        found = {}
        for file in sorted(self._directory.glob("*")):
            with contextlib.suppress(OSError):
                found[file.name] = file.read_text(encoding="utf-8")
        return {role: text for role, text in found.items() if text}


PHASES = {"reshard": "publish", "server_wait": "wait"}
"""What the trainer's phases are called in the timeline, where they are not called as in the
metrics."""

CUT = b'{"cut": true}'
"""The first line of a file whose older half was dropped."""

_TAIL_BYTES = 1 << 20


class Timeline:
    """One process's spans, kept until `flush`: what a killed process had not flushed is lost. Those
    of one thread nest."""

    def __init__(
        self,
        path: Path | None,
        names: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
        limit: int = sys.maxsize,
    ) -> None:
        """Goes on in an existing file; writes nothing where `path` is None. `names`: what the file
        calls some spans.

        The older half of a file of more than `limit` bytes is dropped.
        """
        self._path, self._names, self._clock, self._limit = path, dict(names or {}), clock, limit
        self._step: int | None = None
        self._pending: deque[dict[str, Any]] = deque()
        self._origin, self._origin_us = clock(), round(wall_clock() * 1e6)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_unfinished_line(path)
            self._pending.append({"opened": self._origin_us, "clock_offset_us": 0})
            self.flush()

    def add(self, name: str, start: float, end: float, **about: Any) -> None:
        """A span from `start` to `end`, in seconds of the clock; `about` must be JSON values. From
        any thread."""
        if self._path is None:
            return
        began, ended = self._microseconds(start), self._microseconds(end)
        span: dict[str, Any] = {
            "name": self._names.get(name, name),
            "start": began,
            "us": ended - began,
        }
        if self._step is not None:
            span["step"] = self._step
        if threading.current_thread() is not threading.main_thread():
            span["thread"] = threading.current_thread().name
        self._pending.append(span | about)

    @contextmanager
    def span(self, name: str, **about: Any) -> Iterator[None]:
        """The time inside the block, also when it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, start, self._clock(), **about)

    def begin_run(self, steps_done: int) -> None:
        """A trainer is about to do what comes after so many steps: what was done after them before
        does not count."""
        if self._path is not None:
            self._pending.append({"steps_done": steps_done})
            self.flush()

    def begin_step(self, step: int) -> None:
        """What is added, and logged, from now on belongs to `step`; what was added before is
        written."""
        self.flush()
        self._step = step
        at_step(step)

    def flush(self) -> None:
        """Write what was added."""
        lines = ""
        while self._pending:  # one by one: other threads may add meanwhile
            lines += json.dumps(self._pending.popleft()) + "\n"
        if lines and self._path is not None:
            append(self._path, lines)
            with self._path.open("rb") as file:
                kept = newer_half(file, self._limit)
            if kept is not None:
                write_file(self._path, CUT + b"\n" + kept)

    def _microseconds(self, seconds: float) -> int:
        """Since the epoch. Monotone, so that spans which nest still do so when they are rounded."""
        return self._origin_us + round((seconds - self._origin) * 1e6)


class PhaseTimer:
    """Adds up seconds by phase over a step; different phases may overlap. `listener` gets each
    block's name and times."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        listener: Callable[[str, float, float], None] | None = None,
        begins: Callable[[str], None] | None = None,
    ) -> None:
        self.begins = begins
        """Is told the name of each block at its start."""
        self._clock, self._listener = clock, listener
        self._open: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._since = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block as phase `name`; several blocks of a step add up."""
        if name == "step":
            raise ValueError("the phase name 'step' is reserved for the time of the whole step")
        if name in self._open:
            raise ValueError(f"phase {name!r} is already being timed")
        self._open.add(name)
        if self.begins is not None:
            self.begins(name)
        start = self._clock()
        try:
            yield
        finally:
            end = self._clock()
            self._open.remove(name)
            self._seconds[name] = self._seconds.get(name, 0.0) + end - start
            if self._listener is not None:
                self._listener(name, start, end)

    def take(self) -> dict[str, float]:
        """Seconds by metric name, `time/<phase>` and `time/step` since the last take; counting
        starts anew."""
        if self._open:
            raise ValueError(f"phases still being timed: {', '.join(sorted(self._open))}")
        now = self._clock()
        taken = {
            "time/step": now - self._since,
            **{f"time/{name}": spent for name, spent in self._seconds.items()},
        }
        self._seconds, self._since = {}, now
        return taken


def open_timeline(
    config: Config, role: str, rank: int, names: Mapping[str, str] = PHASES
) -> Timeline:
    """The timeline of a rank of a role or server group; nothing is written with
    `logging.timeline=false`."""
    path = run_paths(config).timeline / f"{role}-{rank}.jsonl"
    if role == "trainer" and config.engine.placement == "server":
        names = {**names, "generate": "wait"}
    return Timeline(
        path if config.logging.timeline else None, names, limit=config.logging.file_mib << 20
    )


def _cut_unfinished_line(path: Path) -> None:
    """Drop what a killed writer may have left after the last whole line."""
    if not path.exists():
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - _TAIL_BYTES)
        file.seek(start)
        whole = start + file.read().rfind(b"\n") + 1
    if whole < size:
        os.truncate(path, whole)
