"""Measure what the size of the data costs: time of a start, and memory of a trainer rank.

    python -m benchmarks.data conversations --records 300000 --peer trl --json
    python -m benchmarks.data prompts --records 1000000 --json

`conversations` runs supervised fine-tuning, `prompts` runs GRPO, each for two steps with default
settings and a small model. Times are those of the whole command `aligner launch`:

- `first`: the cache is empty
- `later`: another run with the same data
- `resume`: the run of `first` continues for two more steps

Each is also measured with 100 records of the same kind (`..._of_100_s`). `rank_memory_mib` is the
largest peak of the resident memory of a trainer rank in later runs.

The peer is TRL's SFTTrainer in its own environment, which is installed the first time. It tokenizes
with as many processes as the machine has cores. `trl_later` reads the cache that `trl_first` has
written. Figures are medians over --repeats; every repetition runs both sides with empty caches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import psutil

from benchmarks.data_files import write_chat_model, write_conversations, write_prompts
from benchmarks.peer_environment import peer_python
from benchmarks.runs import REPOSITORY, python_path

SMALL = 100
STEPS = 2
MAX_TOKENS = 2048
SETTINGS = {
    "conversations": [
        "algorithm=sft",
        f"data.max_prompt_tokens={MAX_TOKENS}",
        f"data.max_response_tokens={MAX_TOKENS}",
    ],
    "prompts": ["algorithm=grpo", "reward.function=exact_match", "rollout.max_response_tokens=16"],
}
_POLL_S = 0.2
_TIMEOUT_S = 3600


def launch(
    kind: str, data: Path, model: Path, run: Path, cache: Path, steps: int = STEPS
) -> tuple[float, float]:
    """Launch a run, and return its time in seconds and the peak memory of a trainer rank in MiB."""
    command = [
        *(sys.executable, "-m", "aligner", "launch"),
        *("model.source=directory", f"model.path={model}", f"data.path={data}", f"run.dir={run}"),
        *(*SETTINGS[kind], f"run.steps={steps}", "run.resume=auto"),
    ]
    environment = {**os.environ, "PYTHONPATH": python_path(), "ALIGNER_CACHE": str(cache)}
    began = time.perf_counter()
    memory = 0.0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=run.parent, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            memory = max(memory, measure_rank_memory(process.pid))
            time.sleep(_POLL_S)
            assert time.perf_counter() - began < _TIMEOUT_S
        output.seek(0)
        assert process.returncode == 0, output.read()
    return time.perf_counter() - began, memory


def measure_rank_memory(launcher: int) -> float:
    """Return the largest peak of the resident memory of the trainer's ranks in MiB; 0 without
    ranks."""
    peaks = [0.0]
    with contextlib.suppress(psutil.Error, OSError):
        for process in psutil.Process(launcher).children(recursive=True):
            if "train" in " ".join(process.cmdline()).split():
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
                peaks += [int(peak) / 1024 for peak in re.findall(r"VmHWM:\s+(\d+) kB", status)]
    return max(peaks)


def launch_trl(data: Path, model: Path, place: Path) -> float:
    """Run TRL's SFTTrainer, and return the time in seconds."""
    work = {
        "file": str(data),
        "model": str(model),
        "directory": str(place / "trl_output"),
        "steps": STEPS,
        "batch_size": 32,
        "max_tokens": MAX_TOKENS,
        "processes": os.cpu_count(),
    }
    environment = {**os.environ, "HF_HOME": str(place / "trl_cache"), "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    subprocess.run(
        [peer_python("trl"), "-m", "benchmarks.data_trl", json.dumps(work)],
        cwd=REPOSITORY,
        env=environment,
        check=True,
        capture_output=True,
        timeout=_TIMEOUT_S,
    )
    return time.perf_counter() - began


def measure(kind: str, data: Path, small: Path, model: Path, *, with_trl: bool) -> dict[str, float]:
    """Return the figures of one repetition with empty caches."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        cache = place / "cache"
        figures["first_s"], _ = launch(kind, data, model, place / "first", cache)
        figures["later_s"], figures["rank_memory_mib"] = launch(
            kind, data, model, place / "later", cache
        )
        figures["resume_s"], _ = launch(kind, data, model, place / "first", cache, 2 * STEPS)

        figures["first_of_100_s"], _ = launch(kind, small, model, place / "small", cache)
        figures["later_of_100_s"], figures["rank_memory_of_100_mib"] = launch(
            kind, small, model, place / "later_small", cache
        )
        figures["resume_of_100_s"], _ = launch(
            kind, small, model, place / "small", cache, 2 * STEPS
        )
        if with_trl:
            figures["trl_first_s"] = launch_trl(data, model, place)
            figures["trl_later_s"] = launch_trl(data, model, place)
            figures["trl_first_over_ours"] = figures["trl_first_s"] / figures["first_s"]
    return figures


def summarize(repetitions: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return median, minimum and maximum of each figure."""
    values: dict[str, list[float]] = defaultdict(list)
    for figures in repetitions:
        for name, value in figures.items():
            values[name].append(value)
    result = {}
    for name, measured in values.items():
        result[name] = median(measured)
        if len(measured) > 1:
            result |= {f"{name}_least": min(measured), f"{name}_most": max(measured)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("kind", choices=SETTINGS)
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--peer", choices=["trl"], help="only with conversations")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.peer and arguments.kind != "conversations":
        parser.error("--peer: is supported only with conversations")

    write = {"conversations": write_conversations, "prompts": write_prompts}[arguments.kind]
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        data, small, model = place / "data.jsonl", place / "small.jsonl", place / "model"
        model.mkdir()
        write(data, arguments.records)
        write(small, SMALL)
        write_chat_model(model)
        repetitions = []
        for repeat in range(arguments.repeats):
            repetitions.append(
                measure(arguments.kind, data, small, model, with_trl=bool(arguments.peer))
            )
            print(f"repetition {repeat + 1}: {repetitions[-1]}", file=sys.stderr)
    figures = {"records": arguments.records, **summarize(repetitions)}
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:28} {value:10.1f}")


if __name__ == "__main__":
    main()
