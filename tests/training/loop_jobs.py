"""Functions that worker ranks run for the tests of the training loop."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from aligner.errors import STOP_SIGNAL
from aligner.megatron import world as worlds
from aligner.observability.metrics import MetricsWriter, RecordWriter
from aligner.observability.timeline import PhaseTimer, Timeline
from aligner.paths import RunPaths, get_run_paths
from aligner.schema import CheckpointConfig, Config, ParallelConfig, RunConfig
from aligner.training.loop import StopCondition, TrainingLoop
from aligner.training.run_checkpoints import RunCheckpoints, TrainingState
from aligner.training.step_metrics import Recorder, StepResult


def saves(minutes: float) -> list[bool]:
    """Return for each of six steps whether a timed checkpoint is due; one collective per step."""
    world = worlds.initialize(ParallelConfig(data=2), seed=1, timeout_s=120)
    now = 0.0
    config = Config(run=RunConfig(steps=7), checkpoint=CheckpointConfig(every_minutes=minutes))
    stop, found, collectives = StopCondition(config, world, clock=lambda: now), [], 0
    reduce = dist.all_reduce

    def counting_reduce(*given: object, **named: object) -> object:
        nonlocal collectives
        collectives += 1
        return reduce(*given, **named)

    dist.all_reduce = counting_reduce
    try:
        for done in range(1, 7):
            now += 40.0 * world.rank
            assert not stop.should_stop(done)
            found.append(stop.is_timed_save_due)
            if stop.is_timed_save_due:
                stop.restart_save_interval()
    finally:
        dist.all_reduce = reduce
    assert collectives == 6
    worlds.shutdown()
    return found


@dataclass(kw_only=True)
class ScriptedLoop(TrainingLoop):
    """Training loop without training; its steps and evaluations return scripted metrics.

    Only rank 0 has the right values; the other ranks have their negatives.
    """

    rank: int
    kls: Sequence[float]
    """KL of steps 1, 2, …"""
    scores: Sequence[float]
    """Scores of the weights after steps 0, 1, …"""
    told_after: int | None
    """Step in which the process receives the stop signal; None: none."""
    beside: bool = False
    """Whether evaluations are asynchronous."""
    done: list[int] = field(default_factory=list)

    def resume(self, states: Sequence[TrainingState]) -> int:
        return states[-1].step if states else 0

    def step(self, step: int, timer: PhaseTimer) -> StepResult:
        if step + 1 == self.told_after:
            signal.raise_signal(STOP_SIGNAL)
        with timer.phase("generate"):
            self.done.append(step + 1)
        return StepResult({"kl/reference": self._known(self.kls[step])}, {"samples": 1})

    def should_evaluate(self, step: int, *, is_saved: bool) -> bool:
        return is_saved or step % 3 == 0 or step == self.config.run.steps

    def evaluate(self, step: int) -> dict[str, float]:
        return {"eval/score": self._known(self.scores[step])}

    def begin_evaluation(self, step: int) -> bool:
        return self.beside

    def begin_save(self, step: int) -> TrainingState:
        (get_run_paths(self.config).checkpoints / f"step_{step}").mkdir(parents=True, exist_ok=True)
        return TrainingState(step, kl_coefficient=0.0, critic_updates=0, position=0)

    def finish_save(self, state: TrainingState) -> TrainingState:
        return state

    def _known(self, value: float) -> float:
        return value if self.rank == 0 else -value


class TimelineReadingWriter(MetricsWriter):
    """Records which steps have spans in the timeline's file when metrics are written."""

    def __init__(self, paths: RunPaths, timeline: Path) -> None:
        super().__init__(paths)
        self._timeline = timeline
        self.steps_with_spans: dict[int, set[int]] = {}

    def write(self, step: int, stats: Mapping[str, float]) -> None:
        spans = [json.loads(line) for line in self._timeline.read_text().splitlines()]
        self.steps_with_spans[step] = {span["step"] for span in spans if "step" in span}
        super().write(step, stats)


def steps_with_spans(root: str) -> dict[int, set[int]]:
    """Run two steps; return for each the steps with spans when its metrics are written."""
    world = worlds.initialize(ParallelConfig(), seed=1, timeout_s=120)
    config = Config(run=RunConfig(name="timed", dir=root, steps=2))
    paths, file = get_run_paths(config), Path(root, "trainer-0.jsonl")
    writer = TimelineReadingWriter(paths, file)
    loop = ScriptedLoop(
        config=config,
        checkpoints=None,
        recorder=Recorder(writer, RecordWriter(paths.samples), tokenizer=None),  # type: ignore[arg-type]
        timeline=Timeline(file),
        stop_condition=StopCondition(config, world),
        rank=0,
        kls=[0.0, 0.0],
        scores=[0.0, 0.0, 0.0],
        told_after=None,
    )
    loop.run()
    worlds.shutdown()
    return writer.steps_with_spans


def scripted(
    root: str,
    kls: Sequence[float],
    scores: Sequence[float],
    told_after: int | None,
    run: dict[str, Any],
    *,
    beside: bool = False,
    **checkpoint: Any,
) -> list[int]:
    """Start or resume a run with scripted metrics; return the steps that it runs."""
    world = worlds.initialize(ParallelConfig(data=2), seed=1, timeout_s=120)
    config = Config(
        run=RunConfig(name="scripted", dir=root, steps=run.pop("steps", len(kls)), **run),
        checkpoint=CheckpointConfig(best_metric="eval/score", **checkpoint),
    )
    paths, recorder = get_run_paths(config), None
    if world.rank == 0:
        recorder = Recorder(MetricsWriter(paths), RecordWriter(paths.samples), tokenizer=None)  # type: ignore[arg-type]
    loop = ScriptedLoop(
        config=config,
        checkpoints=RunCheckpoints(config),
        recorder=recorder,
        timeline=Timeline(None),
        stop_condition=StopCondition(config, world),
        rank=world.rank,
        kls=kls,
        scores=scores,
        told_after=told_after,
        beside=beside,
    )
    loop.run()
    worlds.shutdown()
    return loop.done
