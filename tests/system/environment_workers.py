"""The processes of a run that host its environments, or its agents."""

from __future__ import annotations

import contextlib

import psutil

from benchmarks.runs import Launch


def kill_environments(launch: Launch) -> int:
    """How many worker processes were killed."""
    killed = 0
    for process in launch.processes():
        with contextlib.suppress(psutil.Error):
            if "aligner.environments.environment_worker" in " ".join(process.cmdline()):
                process.kill()
                killed += 1
    return killed
