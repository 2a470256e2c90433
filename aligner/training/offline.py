"""The offline trainer: learning from a file's demonstrations, preferences or labeled steps, as the loop reads."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from aligner.data.examples import LabeledSteps, RunData, open_run_data
from aligner.data.model_directory import read_shape
from aligner.data.streams import ExampleStream
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Rows, Stats
from aligner.files import write_file
from aligner.megatron import world as worlds
from aligner.megatron.policy import Policy
from aligner.megatron.value_model import build_initial_reward_model
from aligner.megatron.world import World
from aligner.models.model_source import model_directory
from aligner.observability.metrics import MetricsWriter, recording
from aligner.observability.sinks import open_sinks
from aligner.observability.timeline import PhaseTimer, Timeline, open_timeline
from aligner.paths import RunPaths, run_paths
from aligner.schema import Config
from aligner.training.offline_tasks import (
    DirectPreferenceOptimization,
    PairwiseRewardModel,
    ProcessRewardModel,
    SupervisedFineTuning,
    pair_members,
)
from aligner.training.run_checkpoints import RunCheckpoints, TrainingState
from aligner.training.stopping import StopCondition

_log = logging.getLogger(__name__)
_OF_EVERY_UPDATE = ("entropy", "grad_norm", "lr", "skipped", "skipped_total")


class CheckpointedModel(Protocol):
    """What the tasks train: checkpoints of it can be written and read."""

    def begin_save(self, directory: Path) -> None:
        """Copy weights, optimizer and schedule to host memory, and write them in the background."""
        ...

    def finish_save(self) -> None:
        """Wait until what `begin_save` began is complete."""
        ...

    def load(self, directory: Path) -> None:
        """Read what was saved, at whatever layout."""
        ...


class OfflineTask(Protocol):
    """What is learned, and from which kind of example. Every rank calls every method with the same."""

    @property
    def name(self) -> str:
        """What its metrics begin with."""
        ...

    @property
    def part(self) -> str:
        """The checkpoint's part that holds the model."""
        ...

    @property
    def model(self) -> CheckpointedModel:
        """What is trained."""
        ...

    def rows(self, examples: Sequence[Any]) -> Rows:
        """Examples as rows of tensors."""
        ...

    def count(self, rows: Any) -> float:
        """How many of what the loss is a mean over: tokens, or pairs."""
        ...

    def train(self, rows: Any) -> dict[str, float]:
        """One optimizer step; the loss's statistics, and those of every update."""
        ...

    def evaluate(self, rows: Any, denominator: float) -> Stats:
        """The loss's statistics as sums over `denominator`; nothing is trained."""
        ...

    def companions(self) -> Mapping[str, Any]:
        """JSON files that belong beside the model as it is now, by name."""
        ...


@dataclass
class OfflineTrainer:
    """One rank of the trainer. Every rank runs the same program on the same examples."""

    config: Config
    paths: RunPaths
    task: OfflineTask
    examples: ExampleStream[Any]
    held_out: Sequence[Any]
    """Examples that are evaluated on and never trained on."""
    checkpoints: RunCheckpoints
    saved: list[TrainingState]
    """The newest checkpoints; the run resumes from the last, and starts at the beginning without one."""
    metrics: MetricsWriter | None
    """Rank 0's."""
    timeline: Timeline
    ending: StopCondition
    _position: int = field(default=0, init=False)
    """Examples taken so far."""
    _saving: tuple[TrainingState, float | None, Mapping[str, Any]] | None = field(default=None, init=False)
    """A checkpoint that is being written, its metric, and what else belongs to it."""

    def run(self) -> None:
        """Train from where the run stands to its end."""
        first = self._resume()
        if self.ending.is_early_after(first):
            return
        timer = PhaseTimer(listener=self.timeline.add)
        if self._owes_evaluation:
            with timer.phase("evaluate"):
                evaluated = self.evaluate()
            if self.metrics is not None:
                self.metrics.amend(first, evaluated | {"time/evaluate": timer.take()["time/evaluate"]})
                self.checkpoints.settle(first, self.checkpoints.metric(evaluated))
        for step in range(first, self.ending.last):
            done = step + 1
            self.timeline.begin_step(done)
            stats, tokens = self.step(timer)
            ends = self.ending.is_after(done)
            saves = ends or _is_due(self.config.checkpoint.every, done)
            # What is left of a grace period is for the checkpoint.
            if self.held_out and not self.ending.is_early and (saves or _is_due(self.config.evaluation.every, done)):
                with timer.phase("evaluate"):
                    stats |= self.evaluate()
            self.checkpoints.check_metric(stats)
            self._record(done, stats, timer.take(), tokens)
            self._finish_save(timer)  # one that was begun a step ago
            if saves:
                self._begin_save(done, stats, timer)
            if ends:
                break
        self._finish_save(timer)
        self.timeline.flush()

    def step(self, timer: PhaseTimer) -> tuple[dict[str, float], int]:
        """One training step; its metrics, and the tokens of its rows."""
        size = self.config.data.batch_size
        with timer.phase("batch"):
            rows = self.task.rows(self.examples.take(self._position, size))
        self._position += size
        with timer.phase("train"):
            stats = self.task.train(rows)
        prefixed = {f"{'policy' if name in _OF_EVERY_UPDATE else self.task.name}/{name}": stats[name] for name in stats}
        return prefixed, int(rows.lengths.sum())

    def evaluate(self) -> dict[str, float]:
        """The loss and its statistics on the held-out examples."""
        denominator = sum(map(self.task.count, self._held_out_rows))
        found = [self.task.evaluate(rows, denominator) for rows in self._held_out_rows]
        return {f"eval/{name}": sum(float(stats[name]) for stats in found) for name in found[0]}

    @cached_property
    def _held_out_rows(self) -> list[Rows]:
        """The held-out examples, as many at a time as a step takes."""
        size = self.config.data.batch_size
        return [self.task.rows(self.held_out[start : start + size]) for start in range(0, len(self.held_out), size)]

    def _resume(self) -> int:
        """Restore the model where there is a checkpoint to start from; the first step to do."""
        first = 0
        if self.saved:
            first, self._position = self.saved[-1].step, self.saved[-1].position
            self.task.model.load(self.paths.checkpoint(first, self.task.part))
        if self.metrics is not None:
            self.metrics.truncate_after(first, amends=self._owes_evaluation)
            _log.info("%s", self._announcement(first))
        self.timeline.begin_run(first)
        return first

    @property
    def _owes_evaluation(self) -> bool:
        """Whether the checkpoint that the run resumes from is still to be evaluated."""
        return bool(self.held_out) and bool(self.saved) and self.saved[-1].owes_evaluation

    def _announcement(self, first: int) -> str:
        data, steps = self.config.data, self.config.run.steps
        rows, size = len(self.examples), data.batch_size
        resumed = f"; resumed after step {first}" if first else ""
        return (
            f"{self.task.name}: {rows} rows, {len(self.held_out)} held out; steps of {size} rows, {rows / size:.1f} an epoch;"
            f" the run's {steps} steps are {steps * size / rows:.2f} epochs{resumed}"
        )

    def _begin_save(self, step: int, stats: Mapping[str, float], timer: PhaseTimer) -> None:
        metric = self.checkpoints.metric(stats)
        with timer.phase("checkpoint"):
            self.task.model.begin_save(self.paths.checkpoint(step, self.task.part))
        owes = bool(self.held_out) and self.ending.is_early
        state = TrainingState(step, kl_coefficient=0.0, critic_updates=0, position=self._position, owes_evaluation=owes)
        self._saving = state, metric, self.task.companions()
        if not self.config.checkpoint.asynchronous:
            self._finish_save(timer)

    def _finish_save(self, timer: PhaseTimer) -> None:
        """Wait for the checkpoint that is being written, if any; it counts once all of it is there."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        state, metric, companions = saving
        with timer.phase("checkpoint"):
            self.task.model.finish_save()
            if self.metrics is not None:
                for name, content in companions.items():
                    write_file(self.paths.checkpoint(state.step, self.task.part) / name, json.dumps(content, indent=1) + "\n")
                self.checkpoints.commit(state, metric)
                self.checkpoints.prune()

    def _record(self, step: int, stats: Mapping[str, float], times: Mapping[str, float], tokens: int) -> None:
        if self.metrics is None:
            return
        seconds = times["time/step"]
        throughput = {
            "throughput/samples_per_s": self.config.data.batch_size / seconds,
            "throughput/tokens_per_s": tokens / seconds,
        }
        self.metrics.write(step, {**stats, **times, **throughput})


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def train_offline(config: Config) -> bool:
    """One trainer rank, from its start to the run's end; false when it was told to stop before its last step."""
    data = open_run_data(config, Tokenizer(model_directory(config)))
    world = worlds.initialize(config.actor.parallel, config.seed, config.cluster.collective_timeout_s)
    trainer = build_trainer(config, world, data)
    with recording(trainer.metrics, config.logging):
        trainer.run()
    worlds.shutdown()
    return not trainer.ending.is_early


def build_trainer(config: Config, world: World, data: RunData) -> OfflineTrainer:
    """Put the parts of a trainer rank together. Collective."""
    checkpoints, paths = RunCheckpoints(config), run_paths(config)
    return OfflineTrainer(
        config=config,
        paths=paths,
        task=build_task(config, world, data),
        examples=data.examples,
        held_out=data.held_out,
        checkpoints=checkpoints,
        metrics=MetricsWriter(paths, open_sinks(config, paths)) if world.rank == 0 else None,
        saved=checkpoints.newest() if config.run.resumes else [],
        timeline=open_timeline(config, "trainer", world.rank),
        ending=StopCondition(config.run, world),
    )


def build_task(config: Config, world: World, data: RunData) -> OfflineTask:
    """What `algorithm.trainer` says, from the run's initial model. Collective."""
    directory, trainer = model_directory(config), config.algorithm.trainer
    shape = read_shape(directory)
    if trainer == "reward_model":
        model = build_initial_reward_model(config, world)
        if isinstance(data.examples.take(0, 1)[0], LabeledSteps):
            return ProcessRewardModel(model, shape.pad_token_id)
        samples, count = data.samples, config.data.normalization_samples
        if samples is None:
            samples = pair_members(data.examples.take(0, min(len(data.examples), -(-count // 2))))[:count]
        return PairwiseRewardModel.start(model, shape.pad_token_id, samples)
    policy = Policy(
        shape,
        world,
        config.actor,
        directory,
        temperature=1.0,
        total_updates=config.run.steps,
        with_reference=trainer == "dpo",
    )
    if trainer == "dpo":
        return DirectPreferenceOptimization(policy, shape.pad_token_id, config.algorithm.preference)
    return SupervisedFineTuning(policy, shape.pad_token_id)
