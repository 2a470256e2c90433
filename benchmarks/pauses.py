"""Suspend a run, suspend the helper processes of its Tritons, and step its clock: none of these may
cost a restart or change a result.

`benchmarks.faults --campaign pauses` runs this. The clock is stepped for the run's processes only,
by a library that is compiled with `cc` and preloaded (`stepped_clock.c`).
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from aligner.paths import replace_environment
from benchmarks.leftovers import Leftovers
from benchmarks.runs import (
    Finished,
    Launch,
    checkpoint_differences,
    repeatable,
    run_to_end,
)

RUN, STUBS, CLOCK = "pause run", "pause stubs", "step clock"
COUNTS = {RUN: 25, STUBS: 10, CLOCK: 10}
"""Number of faults of each kind in a campaign."""
RUN_PAUSE_S, STUBS_PAUSE_S, CLOCK_STEP_S = 5.0, 1.5, 2.0
_STARTING = 3
"""Number of pauses of the whole run while it starts."""
_STARTING_EVERY_S = 4.0
_STUB = "triton_python_backend_stub"
_SOURCE = Path(__file__).with_name("stepped_clock.c")
_CLOCK_FILE = "ALIGNER_STEPPED_CLOCK"
_RESTART, _TRITON_RESTART = "; restarting ", "; restarting Triton"
_TIMEOUT_S = 3600.0


class SteppedClock:
    """A wall clock for the processes of one run, which can be set forward and back."""

    def __init__(self, directory: Path) -> None:
        """Compile the library into `directory`. Raises FileNotFoundError without a C compiler."""
        self._file, self._library = directory / "clock", directory / "stepped_clock.so"
        self._offset_s = 0.0
        self._file.write_bytes(struct.pack("q", 0))
        command = ["cc", "-O2", "-shared", "-fPIC", str(_SOURCE), "-o", str(self._library)]
        subprocess.run([*command, "-ldl", "-lpthread"], check=True)

    def variables(self) -> dict[str, str]:
        """Return the environment variables with which a process uses this clock."""
        return {_CLOCK_FILE: str(self._file), "LD_PRELOAD": str(self._library)}

    def step(self, seconds: float) -> None:
        """Set the clock forward by `seconds`, or back if `seconds` is negative."""
        self._offset_s += seconds
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", int(self._offset_s * 1e9)))


@dataclass(frozen=True)
class Disturbance:
    """A fault that is injected into a run after a step."""

    kind: str
    delay_s: float
    """Delay after the preceding step in seconds."""
    step_s: float = 0.0
    """Change of the clock in seconds."""


def disturbances(seed: int, counts: Mapping[str, int], step_s: float) -> list[Disturbance]:
    """Return the faults of a run in random order, each at a random moment of a step of about
    `step_s` seconds."""
    draw = random.Random(seed)
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    draw.shuffle(kinds)
    steps = iter([CLOCK_STEP_S, -CLOCK_STEP_S] * len(kinds))
    return [
        Disturbance(kind, draw.uniform(0, step_s), next(steps) if kind == CLOCK else 0.0)
        for kind in kinds
    ]


def suspend_all(list_processes: Callable[[], Sequence[psutil.Process]]) -> list[psutil.Process]:
    """Suspend all processes of a run, including those that start meanwhile."""
    suspended: list[psutil.Process] = []
    while new := [each for each in list_processes() if each not in suspended]:
        for process in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
            suspended.append(process)
    return suspended


def resume(processes: Sequence[psutil.Process]) -> None:
    """Resume the processes that still exist."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def stubs(launch: Launch) -> list[psutil.Process]:
    """Return the helper processes of all Tritons of a run that execute models."""
    found = []
    for process in launch.processes():
        with contextlib.suppress(psutil.Error):
            if _STUB in " ".join(process.cmdline()[:1]):
                found.append(process)
    return found


def disturb(launch: Launch, clock: SteppedClock, fault: Disturbance) -> None:
    """Inject a fault, and end it."""
    if fault.kind == CLOCK:
        clock.step(fault.step_s)
        return
    is_whole = fault.kind == RUN
    paused = suspend_all(launch.processes if is_whole else lambda: stubs(launch))
    time.sleep(RUN_PAUSE_S if is_whole else STUBS_PAUSE_S)
    resume(paused)


def run_paused(
    directory: Path,
    clock: SteppedClock,
    faults: Sequence[Disturbance],
    overrides: Sequence[str],
    report: Callable[[str], None],
    starting: int = 0,
) -> tuple[Finished, Counter[str]]:
    """Run an experiment with faults, and return the run and the number of injected faults of each
    kind.

    `starting` is the number of additional pauses of the whole run while it starts.
    """
    done = Counter[str]()
    with replace_environment({**os.environ, **clock.variables()}):
        launch = Launch(directory, *overrides)
    with launch:
        for _ in range(starting):
            time.sleep(_STARTING_EVERY_S)
            disturb(launch, clock, Disturbance(RUN, 0.0))
            done[RUN] += 1
            report(f"{RUN} while the run starts")
        for fault in faults:
            launch.wait_for_step_or_end(launch.steps + 1, _TIMEOUT_S)
            if launch.has_ended:
                break
            time.sleep(fault.delay_s)
            disturb(launch, clock, fault)
            done[fault.kind] += 1
            report(f"{fault.kind} after step {launch.steps}")
        return launch.finish(_TIMEOUT_S), done


def log_lines(run: Finished, words: str) -> Iterator[str]:
    """Yield the lines of a run's logs that contain these words."""
    for log in sorted((run.paths.root / "logs").glob("*.log")):
        yield from (line for line in log.read_text().splitlines() if words in line)


def measure_pauses(
    directory: Path,
    overrides: Sequence[str],
    steps: int,
    show: Callable[[dict[str, Any]], None],
    report: Callable[[str], None],
    counts: Mapping[str, int] = COUNTS,
    seed: int = 0,
) -> bool:
    """Return whether a run with all faults had no restart and the results of an undisturbed run.

    `steps` is the number of steps of the runs, at least one more than the number of faults after
    the start.
    """
    directory.mkdir(exist_ok=True)
    clock = SteppedClock(directory)
    expected = run_to_end(directory / "undisturbed", *overrides, timeout_s=_TIMEOUT_S)
    step_s = expected.metrics[-1]["time/step"]
    report(f"undisturbed run: {steps} steps of about {step_s:.1f} s")
    starting = min(_STARTING, counts.get(RUN, 0))
    later = {**counts, RUN: counts.get(RUN, 0) - starting}
    faults, started = disturbances(seed, later, step_s), time.monotonic()
    with Leftovers(directory / "paused") as leftovers:
        run, done = run_paused(directory / "paused", clock, faults, overrides, report, starting)
    differences = [] if run.code else checkpoint_differences(expected.paths, run.paths, steps)
    figures: dict[str, Any] = {
        "injected": dict(done),
        "restarts": run.out.count(_RESTART),
        "triton_restarts": sum(1 for _ in log_lines(run, _TRITON_RESTART)),
        "exit_code": run.code,
        "seconds": time.monotonic() - started,
        "metrics_identical": repeatable(run.metrics) == repeatable(expected.metrics),
        "different_files": differences,
        "left": leftovers.left(),
    }
    is_good = (
        run.code == 0
        and done == Counter(counts)
        and not figures["restarts"]
        and figures["metrics_identical"]
        and not differences
        and not figures["left"]
    )
    figures["outcome"] = "identical" if is_good else "FAILED"
    if not is_good:
        report(run.report())
    show(figures)
    return is_good
