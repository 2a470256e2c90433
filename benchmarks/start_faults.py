"""Suspend the ranks of a run while they start: each must be replaced, or the run must fail with the
rank's name, within two heartbeat deadlines.

`benchmarks.faults --campaign start` runs this. Each role is suspended at ten moments: before its
first heartbeat (at once after its process appears) and after it, at the first start and after
restarts. Each run suspends every role twice, at its first and its second start.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.leftovers import Leftovers
from benchmarks.runs import (
    Finished,
    Launch,
    checkpoint_differences,
    repeatable,
    run_to_end,
)

DEADLINE_S = 10.0
"""Heartbeat timeout of all roles in seconds."""
ROLES = ("prepare", "generator", "critic", "reward", "trainer")
RANKS = {"critic": 2, "trainer": 2}
"""Number of ranks of the roles that have more than one."""
STEPS = 24
_MOMENTS_S = (0.0, 4.0, 0.0, 2.0, 0.005, 1.0, 0.02, 0.5, 0.1, 6.0)
"""Times of suspensions in seconds after the start of a process; 0 is before its first heartbeat."""
_PREPARE_MOMENTS_S = (0.0, 0.03, 0.0, 0.05, 0.005, 0.04, 0.0, 0.02, 0.01, 0.06)
"""The same for the role `prepare`, whose process lives for only some tenths of a second."""
_STARTS_PER_RUN = 2
_MOST_RUNS = 12
_TIMEOUT_S = 1200.0
_LONGEST_S = 3600.0
_LOOK_S = 0.001
_RESTART = re.compile(r"restarting \S+ \(restart \d+ of this launch\)")


@dataclass(frozen=True)
class Moment:
    """Time at which a rank of a role is suspended."""

    role: str
    rank: int
    after_s: float
    """Delay after the start of the rank's process in seconds."""


@dataclass
class Stop:
    """A rank that was suspended."""

    moment: Moment
    start: int
    """Number of this start of the rank in the run, from 1."""
    before_heartbeat: bool
    process: psutil.Process
    stopped_at: float
    killed_after_s: float | None = None
    """Time from the suspension to the end of the process in seconds; None while the process
    exists."""

    def describe(self) -> str:
        """Return a description of the suspension in one line."""
        place = "before" if self.before_heartbeat else "after"
        killed_s = self.killed_after_s
        end = "not killed" if killed_s is None else f"killed after {killed_s:.1f} s"
        return (
            f"{self.moment.role} rank {self.moment.rank}, start {self.start},"
            f" {self.moment.after_s:g} s, {place} its first heartbeat: {end}"
        )


class StartWatch:
    """Suspends ranks of a run at given moments, from a thread.

    The thread suspends each new child of the launcher at once, identifies it by the log that the
    launcher has created for it, and resumes it if its moment has not come yet. Each start of a role
    uses the next of its `moments`.
    """

    def __init__(self, launch: Launch, moments: Mapping[str, Sequence[Moment]]) -> None:
        self._launch, self._launcher = launch, launch.process_id
        self._moments = {role: list(each) for role, each in moments.items()}
        self._starts: dict[tuple[str, int], int] = defaultdict(int)
        self._used: dict[str, int] = defaultdict(int)
        """Number of the last start of each role for which a moment was used."""
        self._children: set[int] = set()
        self._due: list[tuple[float, Moment, int, psutil.Process]] = []
        self.stops: list[Stop] = []
        self.missed: list[Moment] = []
        """Moments before which the process ended."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="start-watch", daemon=True)

    def __enter__(self) -> StartWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    @property
    def left(self) -> list[Moment]:
        """Missed moments, and moments of starts that did not happen."""
        return [*self.missed, *(moment for each in self._moments.values() for moment in each)]

    def _watch(self) -> None:
        while not self._ends.wait(_LOOK_S):
            for pid in sorted(self._new_children()):
                if self._is_copy_of_launcher(pid):
                    continue
                self._children.add(pid)
                # The first two children are the orphan watcher and the fork server.
                if len(self._children) > 2:
                    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                        self._handle_start(pid)
            self._suspend_due()
            self._note_ends()
        self.missed += [moment for _, moment, _, _ in self._due]

    def _new_children(self) -> set[int]:
        found: set[int] = set()
        for file in Path(f"/proc/{self._launcher}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found.update(map(int, file.read_text().split()))
        return found - self._children

    def _is_copy_of_launcher(self, pid: int) -> bool:
        """Return whether a child does not execute its own program yet.

        The launcher waits for this, so suspending the child would suspend the launcher too.
        """
        try:
            own = Path(f"/proc/{self._launcher}/cmdline").read_bytes()
            return Path(f"/proc/{pid}/cmdline").read_bytes() == own
        except OSError:
            return False

    def _handle_start(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        now, process = time.monotonic(), psutil.Process(pid)
        place = self._identify()
        if place is None:
            os.kill(pid, signal.SIGCONT)
            return
        role, rank = place
        self._starts[place] += 1
        waiting = self._moments.get(role, [])
        is_next = self._starts[place] > self._used[role]
        if not waiting or waiting[0].rank != rank or not is_next:
            os.kill(pid, signal.SIGCONT)
            return
        moment = waiting.pop(0)
        self._used[role] = self._starts[place]
        if moment.after_s == 0:
            log = self._launch.paths.log(role, rank)
            # Before it forks the rank, the launcher first touches the heartbeat file and then
            # creates the log. The rank's first heartbeat is therefore newer than the log.
            heartbeat = self._launch.paths.heartbeat(role, rank)
            has_sent = heartbeat.stat().st_mtime_ns > log.stat().st_mtime_ns
            self.stops.append(Stop(moment, self._starts[place], not has_sent, process, now))
            return
        os.kill(pid, signal.SIGCONT)
        self._due.append((now + moment.after_s, moment, self._starts[place], process))

    def _identify(self) -> tuple[str, int] | None:
        """Return role and rank of the newest start. They follow from the log that has one more
        start than the thread has counted."""
        for log in (self._launch.paths.root / "logs").glob("*-*.log"):
            role, _, number = log.stem.rpartition("-")
            if role not in ROLES or not number.isdecimal():
                continue
            starts = 1 + len(_RESTART.findall(log.read_text(errors="replace")))
            if starts > self._starts[role, int(number)]:
                return role, int(number)
        return None

    def _suspend_due(self) -> None:
        now = time.monotonic()
        for entry in [entry for entry in self._due if entry[0] <= now]:
            self._due.remove(entry)
            _, moment, start, process = entry
            file = self._launch.paths.heartbeat(moment.role, moment.rank)
            try:
                process.suspend()
                is_over = process.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                is_over = True
            if is_over:
                self.missed.append(moment)
                continue
            began = process.create_time()
            has_sent = file.exists() and file.stat().st_mtime > began + 0.01
            self.stops.append(Stop(moment, start, not has_sent, process, time.monotonic()))

    def _note_ends(self) -> None:
        for stop in self.stops:
            if stop.killed_after_s is not None:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                if stop.process.is_running() and stop.process.status() != psutil.STATUS_ZOMBIE:
                    continue
            stop.killed_after_s = time.monotonic() - stop.stopped_at


def start_overrides() -> list[str]:
    """Return the overrides of a run with all roles, whose heartbeat deadlines are short."""
    return [
        *("run.name=run", f"run.steps={STEPS}", "checkpoint.every=2", "logging.tensorboard=false"),
        *(f"server.health_timeout_s={DEADLINE_S:g}", "server.max_restarts=99"),
        *(f"cluster.heartbeat_timeout_s={DEADLINE_S:g}", "run.max_restarts=99"),
        *("cluster.stop_timeout_s=3", "server.request_timeout_s=900", "server.start_timeout_s=600"),
        *(f"critic.parallel.data={RANKS['critic']}", f"actor.parallel.data={RANKS['trainer']}"),
    ]


def all_moments(roles: Sequence[str]) -> dict[str, list[Moment]]:
    """Return the ten moments of each role; its ranks take turns."""
    return {
        role: [
            Moment(role, number // 2 % RANKS.get(role, 1), after_s)
            for number, after_s in enumerate(
                _PREPARE_MOMENTS_S if role == "prepare" else _MOMENTS_S
            )
        ]
        for role in roles
    }


def run_stopped(
    directory: Path, overrides: Sequence[str], moments: Mapping[str, Sequence[Moment]]
) -> tuple[Finished, StartWatch]:
    """Run an experiment whose ranks are suspended at these moments, and return the run and the
    result of each moment."""
    with Launch(directory, *overrides) as launch, StartWatch(launch, moments) as watch:
        return launch.finish(_TIMEOUT_S), watch


def problems(
    run: Finished, expected: Finished, stops: Sequence[Stop], left: Sequence[str]
) -> list[str]:
    """Return the problems of a run whose ranks were suspended; empty if there are none."""
    found = [f"left behind: {path}" for path in left]
    named = any(
        run.error.startswith(
            f"aligner: error: {stop.moment.role} rank {stop.moment.rank} sent no heartbeat"
        )
        for stop in stops
    )
    late = [
        stop
        for stop in stops
        if stop.killed_after_s is None or stop.killed_after_s > 2 * DEADLINE_S
    ]
    found += [f"not replaced in time: {stop.describe()}" for stop in late]
    if run.code:
        return found if named else [*found, f"exit code {run.code}: {run.error.strip()}"]
    if repeatable(run.metrics) != repeatable(expected.metrics):
        found.append("the metrics differ")
    different = checkpoint_differences(expected.paths, run.paths, STEPS)
    return [*found, *(f"different: {file}" for file in different)]


def measure_starts(
    directory: Path,
    overrides: Sequence[str],
    show: Callable[[dict[str, Any]], None],
    report: Callable[[str], None],
    roles: Sequence[str] = ROLES,
) -> bool:
    """Return whether every rank that was suspended was replaced in time, with the results of an
    undisturbed run."""
    directory.mkdir(exist_ok=True)
    expected = run_to_end(directory / "undisturbed", *overrides, timeout_s=_LONGEST_S)
    report(f"undisturbed run: {len(expected.metrics)} steps")
    waiting = all_moments(roles)
    is_good, stopped = True, dict.fromkeys(roles, 0)
    for number in range(1, _MOST_RUNS + 1):
        chosen = {role: each[:_STARTS_PER_RUN] for role, each in waiting.items() if each}
        if not chosen:
            break
        started, root = time.monotonic(), directory / f"run_{number}"
        with Leftovers(root) as leftovers:
            run, watch = run_stopped(root, overrides, chosen)
        wrong = problems(run, expected, watch.stops, leftovers.left())
        is_good &= not wrong
        for role, each in chosen.items():
            again = [moment for moment in watch.left if moment.role == role]
            # If a process ended before its moment, suspend it earlier at its next start.
            earlier = [
                replace(moment, after_s=moment.after_s / 2) if moment in watch.missed else moment
                for moment in again
            ]
            stopped[role] += len(each) - len(again)
            waiting[role] = [*earlier, *waiting[role][len(each) :]]
        if wrong:
            report(run.report())
        for stop in watch.stops:
            report(f"run {number}: {stop.describe()}")
        show(
            {
                "run": number,
                "stops": [stop.describe() for stop in watch.stops],
                "slowest_s": max((stop.killed_after_s or 0.0 for stop in watch.stops), default=0.0),
                "restarts": run.out.count("; restarting "),
                "exit_code": run.code,
                "seconds": time.monotonic() - started,
                "problems": wrong,
                "outcome": "FAILED" if wrong else "failed by name" if run.code else "identical",
            }
        )
    for role, each in waiting.items():
        report(f"{role}: suspended at {stopped[role]} moments")
        is_good &= not each
    return is_good
