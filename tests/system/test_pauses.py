"""Tests of pauses, which cause no restart and change no result.

A pause is a suspended run, a suspended helper of Triton, or a step of the clock.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import pauses
from benchmarks.faults import pause_overrides

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

_WAITS = """
import sys, time
began, wall = time.monotonic(), time.time()
print("ready", flush=True)
sys.stdin.readline()
print(round(time.time() - wall - (time.monotonic() - began), 1))
"""


@needs_compiler
def test_clock_is_stepped_for_one_process_only(tmp_path: Path) -> None:
    clock = pauses.SteppedClock(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", _WAITS],
        env={**os.environ, **clock.variables()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        clock.step(2.0)
        out, _ = process.communicate("\n", timeout=20)
    assert float(out) == pytest.approx(2.0, abs=0.2)


@pytest.mark.promise("pauses-cost-no-restart")
@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_pauses_cost_no_restart_and_change_no_result(tmp_path: Path) -> None:
    counts = {pauses.RUN: 4, pauses.STUBS: 1, pauses.CLOCK: 2}
    steps = 3 * sum(counts.values())
    figures: list[dict[str, object]] = []
    reports: list[str] = []
    is_good = pauses.measure_pauses(
        tmp_path, pause_overrides(steps), steps, figures.append, reports.append, counts
    )
    assert is_good, "\n".join([str(figures), *reports])
