"""A teacher's distributions at each token of demonstrations, kept for whoever learns from them.
Nothing is learned."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.data.claim import writing
from aligner.data.examples import Demonstration
from aligner.data.teacher_scores import complete, part_name, write_part
from aligner.errors import ConfigError
from aligner.megatron.policy import FrozenPolicy
from aligner.observability.metrics import read_metrics
from aligner.observability.timeline import PhaseTimer
from aligner.paths import run_paths
from aligner.training.loop import TrainingLoop
from aligner.training.offline_tasks import demonstration_rows
from aligner.training.recorder import StepResult
from aligner.training.run_checkpoints import TrainingState


@dataclass(kw_only=True)
class TeacherScorer(TrainingLoop):
    """All demonstrations once, each step one of `run.steps` equal parts of them, and a file.

    No checkpoint is kept: a run goes on behind the last step whose metrics are written.
    """

    model: FrozenPolicy
    demonstrations: Sequence[Demonstration]
    pad_token_id: int
    vocabulary: int
    """Only ids below it are told."""
    tokenizer_file: Path

    def resume(self, saved: Sequence[TrainingState]) -> int:
        """Go on where the metrics end: they are written last. Raises ConfigError for a run that was
        cut into other parts."""
        done = read_metrics(run_paths(self.config).metrics) if self.config.run.resumes else []
        first = int(done[-1]["step"]) if done else 0
        for step in range(first):
            if not self._part(step).is_file():
                raise ConfigError(
                    f"run.steps={self.config.run.steps}: the run was started with another value of"
                    " run.steps; resume with the original value"
                )
        return first

    def step(self, step: int, timer: PhaseTimer) -> StepResult:
        """Score a part, and write it down."""
        steps, count = self.config.run.steps, len(self.demonstrations)
        part = self.demonstrations[step * count // steps : (step + 1) * count // steps]
        with timer.phase("score"):
            rows = demonstration_rows(part, self.pad_token_id)
            asked: dict[str, Any] = {"mask": rows.mask, "temperature": 1.0}
            taught = self.model.taught(
                rows.tokens, rows.lengths, self.config.teacher.top_k, self.vocabulary, **asked
            )
        if self.recorder is not None:
            with writing():
                self._part(step).parent.mkdir(exist_ok=True)
                write_part(self._part(step), rows, taught)
        covered = 1 - taught.outcomes[rows.mask][:, -1].exp()
        metrics = {
            "teacher_scores/loss": -float(taught.logprobs[rows.mask].mean()),
            "teacher_scores/covered": float(covered.mean()),
        }
        return StepResult(metrics, {"samples": len(part), "tokens": int(rows.lengths.sum())})

    def finish(self) -> None:
        """Complete the directory, once all parts are there."""
        steps, top = self.config.run.steps, min(self.config.teacher.top_k, self.vocabulary)
        if self.recorder is not None and self.stop.last == steps and not self.stop.is_early:
            with writing():
                complete(
                    run_paths(self.config).teacher_scores,
                    steps,
                    top,
                    self.vocabulary,
                    self.tokenizer_file,
                )

    def _part(self, step: int) -> Path:
        return run_paths(self.config).teacher_scores / part_name(step + 1, self.config.run.steps)
