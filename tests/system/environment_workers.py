"""Kill the worker processes of a run's environments or agents."""

from __future__ import annotations

import contextlib

import psutil

from benchmarks.runs import Launch


def kill_environments(launch: Launch) -> int:
    """Kill all worker processes of a run, and return their number."""
    killed = 0
    for process in launch.processes():
        with contextlib.suppress(psutil.Error):
            if "aligner.agents.environment_worker" in " ".join(process.cmdline()):
                process.kill()
                killed += 1
    return killed
