"""A long run of many small steps, whose trainer is killed in the middle: does what it takes of the
machine stay bounded?

    python -m benchmarks.soak --minutes 30 --json

`tiny_ppo`, with a checkpoint every 500 steps, to its end or until the time is over. So often as
`--every` says there is a line with the memory of its processes, their open files, the shared memory
of its servers and its files on disk. The last line has what each grew by in a thousand steps, over
the second half of either life of the trainer; disk but for the record of its steps (metrics,
samples, TensorBoard), which a run keeps. Exits 1 where memory grew by more than a hundredth in a
thousand steps, or files or shared memory at all.
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
"""By a part of their command lines, those whose memory and files are told apart."""
_RECORD = ("metrics.jsonl", "samples.jsonl", "tensorboard")


def observed(launch: Launch) -> dict[str, float]:
    """What a run takes of the machine now."""
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
    """In a thousand steps, over the second half of what was observed: a least-squares line."""
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
    """Whether nothing grew."""
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=30, help="the run is told to stop then")
    parser.add_argument("--every", type=float, default=20, help="seconds between two lines")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
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
