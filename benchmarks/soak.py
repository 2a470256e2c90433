"""Check for resource leaks in a long run of many small steps, whose trainer is killed once.

    python -m benchmarks.soak --minutes 30 --json

The run is `tiny_ppo` with a checkpoint every 500 steps; its trainer is killed in the middle. Every
`--every` seconds a line shows the memory of the run's processes, their open files, the shared
memory of its servers, and its files on disk. `disk_mib` does not include metrics, samples and
TensorBoard files (`record_mib`), which a run keeps. The last line has the growth of each figure per
1,000 steps: the larger of the slopes before and after the kill, each over the second half of that
period.

The exit code is 1 if the run failed, if memory grew by 1% or more per 1,000 steps, or if open files
or shared memory (MiB) grew by 1 or more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.runs import Launch

_PROCESSES = (
    "fork_server",
    "gateway",
    "tritonserver",
    "role=critic",
    "role=reward",
    "train",
    "launch",
)
"""Groups of processes whose memory and files are reported separately, by a part of their command
lines."""
_RECORD = ("metrics.jsonl", "samples.jsonl", "tensorboard")


def observed(launch: Launch) -> dict[str, float]:
    """Return the resources that a run uses now."""
    processes, figures = (
        launch.processes(),
        {
            "step": float(launch.steps),
            "memory_mib": 0.0,
            "files": 0.0,
            "shared_mib": 0.0,
        },
    )
    for process in processes:
        with contextlib.suppress(psutil.Error):
            memory = process.memory_info()
            own = (memory.rss - memory.shared) / 2**20
            name = next(
                (name for name in _PROCESSES if any(name in part for part in process.cmdline())),
                "others",
            )
            figures["memory_mib"] += own
            figures[f"memory_mib/{name}"] = figures.get(f"memory_mib/{name}", 0.0) + own
            figures["files"] += (files := process.num_fds())
            figures[f"files/{name}"] = figures.get(f"files/{name}", 0.0) + files
            segments = Path("/dev/shm").glob(f"pytrtion{process.pid}-*")
            figures["shared_mib"] += sum(file.stat().st_blocks * 512 for file in segments) / 2**20
    sizes = {"record_mib": 0, "disk_mib": 0}
    for file in launch.paths.root.rglob("*"):
        with contextlib.suppress(OSError):
            if file.is_file():
                kind = (
                    "record_mib"
                    if file.relative_to(launch.paths.root).parts[0] in _RECORD
                    else "disk_mib"
                )
                sizes[kind] += file.stat().st_size
    return figures | {name: size / 2**20 for name, size in sizes.items()}


def growth(lines: list[dict[str, float]], name: str) -> float:
    """Return the growth of a figure per 1,000 steps: the least-squares slope over the second half
    of `lines`."""
    later = lines[len(lines) // 2 :]
    steps = [line["step"] for line in later]
    if len({*steps}) < 2:
        return 0.0
    return 1000 * statistics.linear_regression(steps, [line.get(name, 0.0) for line in later]).slope


def soak(
    directory: Path,
    steps: int,
    seconds: float,
    every_s: float,
    show: Callable[[dict[str, Any]], None],
) -> bool:
    """Run the soak test, and return whether the run succeeded and no resource grew."""
    lives: list[list[dict[str, float]]] = [[], []]
    given = (f"run.steps={steps}", "checkpoint.every=500", "logging.file_mib=1", "run.name=run")
    with Launch(directory / "run", *given) as launch:
        launch.wait_for_step(1)
        started, killed_at = time.monotonic(), None
        while (passed := time.monotonic() - started) < seconds and launch.steps < steps:
            time.sleep(every_s)
            if killed_at is None and (passed > seconds / 2 or launch.steps > steps / 2):
                killed_at = launch.steps
                launch.rank("trainer", 0).kill()
                launch.wait_for_step(killed_at + 1, timeout_s=300)
            line = observed(launch)
            lives[killed_at is not None].append(line)
            show(line)
        launch.interrupt(signal.SIGUSR1)
        run = launch.finish(300)
    names = [name for name in lives[1][-1] if name not in ("step", "record_mib")]
    grown = {name: max(growth(life, name) for life in lives) for name in names}
    show(
        {
            "steps": len(run.metrics),
            "exit_code": run.code,
            "killed_at": killed_at,
            "grown_per_1000_steps": grown,
        }
    )
    size = statistics.median(line["memory_mib"] for line in lives[1])
    return (
        run.code in (0, 75)
        and grown["memory_mib"] < size / 100
        and max(grown["files"], grown["shared_mib"]) < 1
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000, help="steps of the run (20000)")
    parser.add_argument(
        "--minutes", type=float, default=30, help="minutes after which the run is stopped (30)"
    )
    parser.add_argument("--every", type=float, default=20, help="seconds between lines (20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    arguments = parser.parse_args()

    def show(figures: dict[str, Any]) -> None:
        rounded = {
            name: round(value, 2) if isinstance(value, float) else value
            for name, value in figures.items()
        }
        told = "  ".join(f"{name}={value}" for name, value in rounded.items())
        print(json.dumps({"benchmark": "soak", **rounded}) if arguments.json else told, flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        is_bounded = soak(
            Path(temporary), arguments.steps, 60 * arguments.minutes, arguments.every, show
        )
    raise SystemExit(not is_bounded)


if __name__ == "__main__":
    main()
