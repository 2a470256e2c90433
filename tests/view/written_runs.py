"""Writes run directories with the files of a real run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from aligner.config.compose import compose_config, save_config
from aligner.launcher.run_directory import LauncherState, RoleState
from aligner.observability.metrics import MetricsWriter
from aligner.observability.timeline import Timeline
from aligner.paths import RunPaths

STEPS = 30
HOSTILE = "</td><script>alert('sample')</script><img src=x onerror=alert(1)>\x1b[2J\u202e\x00"
PHASES = {"generate": 0.5, "logprobs": 0.2, "server_wait": 0.1, "train": 0.6, "reshard": 0.05}
SHARES = (
    {"staleness/share_0": 1.0},
    {"staleness/share_0": 0.25, "staleness/share_1": 0.5, "staleness/share_10": 0.25},
)
LENGTHS = (
    {"response/generated_to_2": 3.0, "response/trained_to_2": 3.0},
    {"response/generated_to_8": 2.0},
)
"""SHARES and LENGTHS alternate between steps: a key that a step lacks must count as 0."""

_NUMBERS = ("engine_logprob", "trainer_logprob", "reference_logprob", "advantage")
_SAMPLES = pa.schema(
    [
        *(
            (name, pa.int32())
            for name in ("step", "group", "sample", "branch", "prompt_tokens", "response_tokens")
        ),
        *((name, pa.int32()) for name in ("drawn_tokens", "version_first", "version_last")),
        ("prompt_index", pa.int64()),
        *((name, pa.string()) for name in ("prompt", "response", "messages", "metadata")),
        *((name, pa.float32()) for name in ("score", "advantage")),
        ("score_parts", pa.map_(pa.string(), pa.float32())),
        ("cut", pa.bool_()),
    ]
)
_TOKENS = pa.schema(
    [
        *((name, pa.int32()) for name in ("step", "group", "sample", "branch")),
        *((name, pa.list_(pa.float32())) for name in _NUMBERS),
        ("token_id", pa.list_(pa.int32())),
        ("version", pa.list_(pa.int32())),
        ("text", pa.list_(pa.string())),
        ("drawn", pa.list_(pa.bool_())),
    ]
)


def begin(root: Path, *overrides: str, name: str = "run") -> RunPaths:
    """Create a run directory with its configuration."""
    paths = RunPaths(root)
    root.mkdir(parents=True)
    paths.logs.mkdir()
    config = compose_config([*overrides, f"run.dir={root}", f"run.steps={STEPS}"])
    save_config(replace(config, run=replace(config.run, name=name)), paths.config)
    return paths


def end(paths: RunPaths, exit_code: int = 0, reason: str | None = None) -> None:
    """Write the launcher's final state of the run."""
    roles = {"trainer": RoleState(1, True), "critic": RoleState(1, True, restarts=2)}
    LauncherState(
        1, 1, "elsewhere", 1.7e9, roles, ended=1.7e9 + 60, exit_code=exit_code, reason=reason
    ).write(paths.status)


def write_metrics(paths: RunPaths, keys: Sequence[str], steps: int = STEPS) -> None:
    """Write a sine wave for each metric, and the times of the phases."""
    writer = MetricsWriter(paths)
    for step in range(1, steps + 1):
        stats = {key: 0.5 + 0.4 * math.sin(step / 5 + place) for place, key in enumerate(keys)}
        stats |= {f"time/{phase}": seconds for phase, seconds in PHASES.items()} | {
            "time/step": 1.5
        }
        writer.write(
            step,
            stats | ({**SHARES[step % 2], **LENGTHS[step % 2]} if "staleness/max" in keys else {}),
        )


def write_timeline(paths: RunPaths, steps: int) -> None:
    """Write the timelines of two trainers, of a critic that computes values while the trainers wait
    for samples, and of a generator that runs during training."""
    times = iter(range(10_000))
    files = [
        paths.timeline / f"{rank}.jsonl"
        for rank in ("trainer-0", "trainer-1", "critic-0", "generator-0")
    ]
    first, second, critic, generator = (
        Timeline(file, clock=lambda: 0.0, wall_clock=lambda: 1.7e9) for file in files
    )
    for step in range(1, steps + 1):
        for trainer in (first, second):
            trainer.begin_step(step)
        for name in ("generate", "logprobs", "wait", "train", "publish"):
            now = next(times)
            for trainer in (first, second):
                trainer.add(name, now, now + 1)
            if name in ("generate", "train"):
                critic.add(
                    {"generate": "values", "train": "critic_train"}[name],
                    now + 0.5,
                    now + 1,
                    rows=8,
                )
            if name in ("train", "publish"):
                generator.add(
                    {"train": "generate", "publish": "receive"}[name], now, now + 1, rows=8
                )
    for timeline in (first, second, critic, generator):
        timeline.flush()


def write_samples(
    paths: RunPaths, step: int, rows: Sequence[Mapping[str, Any]], *, tokens: bool = True
) -> None:
    """Write the sample files of a step, with one token per word of a response."""
    directory = paths.root / "samples"
    directory.mkdir(exist_ok=True)
    whole, by_token = [], []
    for place, row in enumerate(rows):
        texts = row["response"].split(" ")
        counts = dict.fromkeys(("response_tokens", "drawn_tokens"), len(texts))
        own = {
            "step": step,
            "group": place // 2,
            "sample": place % 2,
            "branch": 0,
            "prompt_index": place // 2,
        }
        whole.append(
            {
                **own,
                **counts,
                "version_first": step - 1,
                "version_last": step - 1,
                "cut": False,
                **row,
            }
        )
        lists = {
            "text": texts,
            "token_id": [*range(len(texts))],
            "version": [step - 1] * len(texts),
        }
        lists |= {"drawn": [bool(number) for number in range(len(texts))]}
        numbers = {
            name: [-0.5 * number - at for number in range(len(texts))]
            for at, name in enumerate(_NUMBERS)
        }
        by_token.append(
            {
                **{name: whole[-1][name] for name in ("step", "group", "sample", "branch")},
                **lists,
                **numbers,
            }
        )
    if tokens:
        pq.write_table(
            pa.Table.from_pylist(by_token, schema=_TOKENS), directory / f"tokens_{step:06d}.parquet"
        )
    pq.write_table(
        pa.Table.from_pylist(whole, schema=_SAMPLES), directory / f"step_{step:06d}.parquet"
    )
