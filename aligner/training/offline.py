"""The offline trainer: learning from a file's demonstrations, preferences or labeled steps."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from aligner.data.claim import writing
from aligner.data.streams import ExampleStream
from aligner.data.types import Rows
from aligner.files import write_file
from aligner.observability.timeline import PhaseTimer
from aligner.paths import run_paths
from aligner.training.loop import TrainingLoop, is_due
from aligner.training.offline_tasks import OfflineTask
from aligner.training.recorder import StepResult
from aligner.training.run_checkpoints import TrainingState

_log = logging.getLogger(__name__)
_OF_EVERY_UPDATE = ("entropy", "grad_norm", "lr", "skipped", "skipped_total")


@dataclass(kw_only=True)
class OfflineTrainer(TrainingLoop):
    """What a task says is learned from the examples, which every rank has."""

    task: OfflineTask
    examples: ExampleStream[Any]
    held_out: Sequence[Any]
    """Examples that are evaluated on and never trained on."""
    _position: int = field(default=0, init=False)
    """Examples taken so far."""
    _companions: Mapping[str, Any] = field(default_factory=dict, init=False)
    """What belongs beside the model in the checkpoint that is being written."""

    def resume(self, saved: Sequence[TrainingState]) -> int:
        """Restore the model and the place in the data."""
        first = 0
        if saved:
            first, self._position = saved[-1].step, saved[-1].position
            self.task.model.load(
                run_paths(self.config).checkpoint(first, self.task.part), verified=True
            )
        if self.recorder is not None:
            _log.info("%s", self._announcement(first))
        return first

    def step(self, step: int, timer: PhaseTimer) -> StepResult:
        """An optimizer step on the next examples."""
        size = self.config.data.batch_size
        with timer.phase("batch"):
            rows = self.task.rows(self.examples.take(self._position, size))
        self._position += size
        with timer.phase("train"):
            stats = self.task.train(rows)
        prefixed = {
            f"{'policy' if name in _OF_EVERY_UPDATE else self.task.name}/{name}": stats[name]
            for name in stats
        }
        return StepResult(prefixed, {"samples": size, "tokens": int(rows.lengths.sum())})

    def is_evaluated(self, step: int, *, saves: bool) -> bool:
        """At every checkpoint, and every so many steps."""
        return bool(self.held_out) and (saves or is_due(self.config.evaluation.every, step))

    def evaluate(self, step: int) -> dict[str, float]:
        """The loss and its statistics on the held-out examples."""
        denominator = sum(map(self.task.count, self._held_out_rows))
        found = [self.task.evaluate(rows, denominator) for rows in self._held_out_rows]
        return {f"eval/{name}": sum(float(stats[name]) for stats in found) for name in found[0]}

    @cached_property
    def _held_out_rows(self) -> list[Rows]:
        """The held-out examples, as many at a time as a step takes."""
        size = self.config.data.batch_size
        return [
            self.task.rows(self.held_out[start : start + size])
            for start in range(0, len(self.held_out), size)
        ]

    def _announcement(self, first: int) -> str:
        data, steps = self.config.data, self.config.run.steps
        rows, size = len(self.examples), data.batch_size
        resumed = f"; resumed after step {first}" if first else ""
        return (
            f"{self.task.name}: {rows} rows, {len(self.held_out)} held out; {size} rows per step,"
            f" {rows / size:.1f} steps per epoch; run.steps={steps} is"
            f" {steps * size / rows:.2f} epochs{resumed}"
        )

    def begin_save(self, step: int) -> TrainingState:
        """The model, and what belongs beside it."""
        self.task.model.begin_save(run_paths(self.config).checkpoint(step, self.task.part))
        self._companions = self.task.companions()
        return TrainingState(step, kl_coefficient=0.0, critic_updates=0, position=self._position)

    def finish_save(self, state: TrainingState) -> TrainingState:
        """Companions go where the model then is."""
        self.task.model.finish_save()
        if self.recorder is not None:
            directory = run_paths(self.config).checkpoint(state.step, self.task.part)
            for name, content in self._companions.items():
                with writing():
                    write_file(directory / name, json.dumps(content, indent=1) + "\n")
        return state
