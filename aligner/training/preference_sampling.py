"""Preferences and responses out of the policy's own samples. Nothing is learned."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.algorithms.score_shaping import ScoreShaping
from aligner.algorithms.selections import PAIRS, rejection_sampled_rows
from aligner.data.conversations import decode_response
from aligner.data.fencing import fenced_write
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Prompt, Sample
from aligner.errors import AlignerError
from aligner.observability.metrics import RecordWriter, read_metrics
from aligner.observability.timeline import PhaseTimer
from aligner.paths import RunPaths, run_paths
from aligner.resharding.weight_update import WeightPublisher
from aligner.rollout.rollout_builder import RolloutBatch, RolloutBuilder
from aligner.rollout.services import Services
from aligner.schema.reward_sources import source_names
from aligner.training.loop import TrainingLoop
from aligner.training.run_checkpoints import TrainingState
from aligner.training.step_metrics import StepResult, rollout_metrics
from aligner.training.step_samples import StepSamples

Record = dict[str, Any]
_Pair = tuple[int, list[int], list[int], Record]
"""The row of a sample of the prompt's, the tokens of the chosen and the rejected answer, and what
else is known of them."""


def preferences(
    rollout: RolloutBatch,
    scores: Tensor,
    samples_per_prompt: int,
    tokenizer: Tokenizer,
    pairs: str = "best_and_worst",
) -> tuple[list[Record], int]:
    """Records with `prompt`, `chosen`, `rejected`, the tokens that they were given and drawn as, of
    two samples both `scores` and their difference, the `margin`; and how many prompts gave none,
    for want of two texts of which one is better.

    `scores` [B] are those of the rollout's samples, each prompt's in a row; samples without a
    score, which is then not finite, are in no pair. `pairs` is `algorithm.pairs`.
    """
    if pairs == "demonstration":
        found = _against_demonstrations(rollout, scores)
    else:
        found = _between_samples(
            rollout, scores, PAIRS[pairs](scores, samples_per_prompt).view(-1, 2).tolist()
        )
    records, with_pair = [], set[int]()
    for row, chosen, rejected, known in found:
        prompt = rollout.prompts[row]
        texts = [tokenizer.decode_after(prompt.tokens, each) for each in (chosen, rejected)]
        # Scorers of tokens may tell responses apart whose texts are the same, or are nothing at
        # all.
        if texts[0] == texts[1] or not all(text.strip() for text in texts):
            continue
        tokens = {
            "prompt_tokens": prompt.tokens.tolist(),
            "chosen_tokens": chosen,
            "rejected_tokens": rejected,
        }
        records.append(
            {"prompt": prompt.text, "chosen": texts[0], "rejected": texts[1], **known, **tokens}
        )
        with_pair.add(row // samples_per_prompt)
    scored_prompts = int(scores.isfinite().view(-1, samples_per_prompt).any(1).sum())
    return records, scored_prompts - len(with_pair)


def _between_samples(
    rollout: RolloutBatch, scores: Tensor, rows: Sequence[Sequence[int]]
) -> Iterator[_Pair]:
    for best, worst in rows:
        both = [float(scores[best]), float(scores[worst])]
        chosen, rejected = (rollout.samples[row].response.tolist() for row in (best, worst))
        yield best, chosen, rejected, {"margin": both[0] - both[1], "scores": both}


def _against_demonstrations(rollout: RolloutBatch, scores: Tensor) -> Iterator[_Pair]:
    """The answer of each prompt's record over each sample (SPIN), which nothing says how much
    better it is."""
    for row in scores.isfinite().nonzero()[:, 0].tolist():
        demonstration = rollout.prompts[row].metadata["response_tokens"]
        yield row, demonstration, rollout.samples[row].response.tolist(), {}


@dataclass
class PairWriter:
    """The run's `preferences.jsonl`, unless it has none, and `responses.jsonl`, of samples that are
    not empty.

    They are written under other names, and get theirs when the run has ended.
    """

    paths: RunPaths
    tokenizer: Tokenizer
    has_pairs: bool = True
    kept_fields: Sequence[str] = ()
    """Of the prompts' records, which responses have too."""

    @fenced_write()
    def resume(self, step: int) -> None:
        """Forget what came after a step."""
        for path in self._files:
            if path.exists():
                path.rename(_unfinished(path))
            RecordWriter(_unfinished(path)).truncate_after(step)

    def write(
        self,
        step: int,
        records: list[Record],
        rollout: RolloutBatch,
        scores: Tensor,
        rows: Sequence[int] | None = None,
    ) -> int:
        """Record a step's; the responses are those of `rows`, of all samples where None. Returns
        how many are kept."""
        kept = range(len(scores)) if rows is None else rows
        found = [(row, sequence) for row in kept for sequence in rollout.samples[row].sequences]
        responses = [
            self._response(rollout.prompts[row], sequence, float(scores[row]))
            for row, sequence in found
        ]
        responses = [response for response in responses if response["response"].strip()]
        if self.has_pairs:
            RecordWriter(_unfinished(self.paths.preferences)).write(step, records)
        RecordWriter(_unfinished(self.paths.responses)).write(step, responses)
        return len(responses)

    def _response(self, prompt: Prompt, sample: Sample, score: float) -> Record:
        """A sample, or a branch of one, with what it was given, and of an episode what of it was
        drawn."""
        given, response = sample.tokens[: sample.prompt_length], sample.response
        is_asked = torch.equal(given, prompt.tokens)
        return {
            **{name: prompt.metadata[name] for name in self.kept_fields},
            "prompt": (
                prompt.text if is_asked else self.tokenizer.decode(given, skip_special_tokens=False)
            ),
            "response": decode_response(sample, self.tokenizer),
            "prompt_tokens": given.tolist(),
            "response_tokens": response.tolist(),
            **({} if sample.drawn is None else {"drawn": sample.drawn.int().tolist()}),
            "reward": score,
        }

    @fenced_write()
    def finish(self) -> None:
        """Give the files their names. Raises AlignerError where there is not one pair, or nothing
        at all."""
        if self.has_pairs and not _unfinished(self.paths.preferences).stat().st_size:
            raise AlignerError(
                "no preference pairs: for every prompt, all scores are equal, or the responses are"
                " empty or identical; generate more samples per prompt"
                " (rollout.samples_per_prompt), raise rollout.temperature, or use another reward"
            )
        if not self.has_pairs and not _unfinished(self.paths.responses).stat().st_size:
            raise AlignerError(
                "no samples to write: all samples are empty or score below algorithm.min_score;"
                " lower algorithm.min_score"
            )
        for path in self._files:
            _unfinished(path).replace(path)

    @property
    def _files(self) -> tuple[Path, ...]:
        return (*([self.paths.preferences] if self.has_pairs else []), self.paths.responses)


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.unfinished")


@dataclass(kw_only=True)
class PreferenceSampler(TrainingLoop):
    """Nothing is learned, and no checkpoint is kept: a run goes on behind the last step whose
    metrics are written."""

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
            metrics = rollout_metrics(
                rollout, self.config.rollout, source_names(self.config.reward)
            )
            scores, all_scores = rollout.scores.result(), drawn.scores.result()
        self.services.assert_settled()
        if self.writer is not None:
            metrics |= self._write(self.writer, step + 1, drawn, all_scores)
        sampled = StepSamples.of(drawn)
        return StepResult(metrics, {"samples": len(rollout.samples)}, rollout, scores, sampled)

    def _write(
        self, writer: PairWriter, step: int, rollout: RolloutBatch, scores: Tensor
    ) -> dict[str, float]:
        """Write a step's records down, and tell what there is to measure of them."""
        settings, each = self.config.algorithm, self.config.rollout.samples_per_prompt
        shaped, metrics, records = (
            self.shaping(scores, rollout.samples),
            dict[str, float](),
            list[Record](),
        )
        if writer.has_pairs:
            records, without = preferences(rollout, shaped, each, writer.tokenizer, settings.pairs)
            metrics = {
                "preferences/pairs": float(len(records)),
                "preferences/without_pair": float(without),
            }
        if margins := [record["margin"] for record in records if "margin" in record]:
            metrics["preferences/margin"] = sum(margins) / len(margins)
        kept = rejection_sampled_rows(shaped, each, settings.responses, settings.min_score).tolist()
        return metrics | {
            "preferences/responses": float(writer.write(step, records, rollout, scores, kept))
        }

    def finish(self) -> None:
        """Give the files their names, once all steps are done."""
        if (
            self.writer is not None
            and self.stop.last == self.config.run.steps
            and not self.stop.is_early
        ):
            self.writer.finish()

    def close(self) -> None:
        """Shut the engine down."""
        self.builder.close()
