"""Preferences out of the policy's own samples: of each prompt's the best and the worst, or every two. Nothing is learned."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from aligner.algorithms.score_shaping import ScoreShaping
from aligner.algorithms.selections import PAIRS
from aligner.data.claim import writing
from aligner.data.tokenizer import Tokenizer
from aligner.errors import AlignerError
from aligner.observability.metrics import RecordWriter, read_metrics
from aligner.observability.timeline import PhaseTimer
from aligner.paths import RunPaths, run_paths
from aligner.resharding.weight_update import WeightPublisher
from aligner.rollout.rollout_builder import RolloutBatch, RolloutBuilder
from aligner.rollout.services import Services
from aligner.schema.reward_sources import source_names
from aligner.training.loop import StepResult, TrainingLoop
from aligner.training.run_checkpoints import TrainingState
from aligner.training.step_metrics import rollout_metrics
from aligner.training.step_samples import StepSamples

Record = dict[str, Any]


def preferences(
    rollout: RolloutBatch, scores: Tensor, samples_per_prompt: int, tokenizer: Tokenizer, pairs: str = "best_and_worst"
) -> tuple[list[Record], int]:
    """Records with `prompt`, `chosen`, `rejected`, the tokens that they were given and drawn as, both `scores` and their
    difference, the `margin`; and how many prompts gave none, for want of two texts of which one is better.

    `scores` [B] are those of the rollout's samples, each prompt's in a row; `pairs` is `algorithm.pairs`.
    """
    chosen = PAIRS[pairs](scores, samples_per_prompt).view(-1, 2).tolist()
    records, with_pair = [], set[int]()
    for best, worst in chosen:
        drawn = [rollout.samples[row].response for row in (best, worst)]
        texts = [tokenizer.decode(response) for response in drawn]
        # Scorers of tokens may tell responses apart whose texts are the same, or are nothing at all.
        if texts[0] == texts[1] or not all(text.strip() for text in texts):
            continue
        both = [float(scores[best]), float(scores[worst])]
        pair = {"chosen": texts[0], "rejected": texts[1], "margin": both[0] - both[1], "scores": both}
        given = {"prompt_tokens": rollout.prompts[best].tokens.tolist()}
        tokens = given | {"chosen_tokens": drawn[0].tolist(), "rejected_tokens": drawn[1].tolist()}
        records.append({"prompt": rollout.prompts[best].text, **pair, **tokens})
        with_pair.add(best // samples_per_prompt)
    return records, len(scores) // samples_per_prompt - len(with_pair)


@dataclass
class PairWriter:
    """The run's `preferences.jsonl` and, of all samples that are not empty, `responses.jsonl`.

    They are written under other names, and get theirs when the run has ended.
    """

    paths: RunPaths
    tokenizer: Tokenizer

    @writing()
    def resume(self, step: int) -> None:
        """Forget what came after a step."""
        for path in (self.paths.preferences, self.paths.responses):
            if path.exists():
                path.rename(_unfinished(path))
            RecordWriter(_unfinished(path)).truncate_after(step)

    def write(self, step: int, records: list[Record], rollout: RolloutBatch, scores: Tensor) -> None:
        """Record a step's."""
        texts = [self.tokenizer.decode(sample.response) for sample in rollout.samples]
        responses = [
            {
                "prompt": prompt.text,
                "response": text,
                "prompt_tokens": prompt.tokens.tolist(),
                "response_tokens": sample.response.tolist(),
                "reward": float(score),
            }
            for prompt, sample, text, score in zip(rollout.prompts, rollout.samples, texts, scores, strict=True)
            if text.strip()
        ]
        RecordWriter(_unfinished(self.paths.preferences)).write(step, records)
        RecordWriter(_unfinished(self.paths.responses)).write(step, responses)

    @writing()
    def finish(self) -> None:
        """Give the files their names. Raises AlignerError where there is not one pair."""
        if not _unfinished(self.paths.preferences).stat().st_size:
            raise AlignerError(
                "not one prompt had two samples of which one is better: every prompt's scores are equal, or its texts empty;"
                " draw more samples (rollout.samples_per_prompt), at a higher temperature, or choose another reward"
            )
        for path in (self.paths.preferences, self.paths.responses):
            _unfinished(path).replace(path)


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.unfinished")


@dataclass(kw_only=True)
class PreferenceSampler(TrainingLoop):
    """Nothing is learned, and no checkpoint is kept: a run goes on behind the last step whose metrics are written."""

    publisher: WeightPublisher
    builder: RolloutBuilder
    services: Services
    shaping: ScoreShaping
    writer: PairWriter | None
    """Rank 0's."""

    def resume(self, saved: Sequence[TrainingState]) -> int:
        """Go on where the metrics end: they are written last."""
        self.services.start(self.config.server.start_timeout_s)
        done = read_metrics(run_paths(self.config).metrics) if self.config.run.resumes else []
        first = int(done[-1]["step"]) if done else 0
        self.builder.position = first * self.config.rollout.prompts_per_step
        if self.writer is not None:
            self.writer.resume(first)
        return first

    def begin(self, first: int) -> None:
        """Have the engine serve the policy."""
        self.timeline.begin_step(first + 1)
        with self.timeline.span("publish"):
            self.publisher.publish(version=0)

    def step(self, step: int, timer: PhaseTimer) -> StepResult:
        """Sample, and write down the pairs."""
        with timer.phase("generate"):
            drawn = rollout = self.builder.take()
        with timer.phase("server_wait"):
            rollout = rollout.scored()
            metrics = rollout_metrics(rollout, self.config.rollout, source_names(self.config.reward))
            scores = rollout.scores.result()
        self.services.assert_settled()
        if self.writer is not None:
            shaped = self.shaping(scores, rollout.samples)
            each, pairs = self.config.rollout.samples_per_prompt, self.config.algorithm.pairs
            records, without = preferences(rollout, shaped, each, self.writer.tokenizer, pairs)
            self.writer.write(step + 1, records, rollout, scores)
            metrics |= {"preferences/pairs": float(len(records)), "preferences/without_pair": float(without)}
            if records:
                metrics["preferences/margin"] = sum(record["margin"] for record in records) / len(records)
        sampled = StepSamples.of(drawn)
        return StepResult(metrics, {"samples": len(rollout.samples)}, rollout, scores, sampled)

    def finish(self) -> None:
        """Give the files their names, once all steps are done."""
        if self.writer is not None and self.stop.last == self.config.run.steps and not self.stop.is_early:
            self.writer.finish()

    def close(self) -> None:
        """Shut the engine down."""
        self.builder.close()
