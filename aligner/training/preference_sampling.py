"""Builds preference pairs and responses from samples of the policy; trains nothing."""

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
from aligner.schema.reward_sources import source_names
from aligner.training.loop import TrainingLoop
from aligner.training.rollout_builder import RolloutBatch, RolloutBuilder
from aligner.training.run_checkpoints import TrainingState
from aligner.training.services import Services
from aligner.training.step_metrics import StepResult, rollout_metrics
from aligner.training.step_samples import StepSamples

Record = dict[str, Any]
_Pair = tuple[int, list[int], list[int], Record]
"""Row of a sample of the prompt, token ids of the chosen and of the rejected answer, and the other
fields of the record."""


def preferences(
    rollout: RolloutBatch,
    scores: Tensor,
    samples_per_prompt: int,
    tokenizer: Tokenizer,
    pairs: str = "best_and_worst",
) -> tuple[list[Record], int]:
    """Return preference records of a rollout, and the number of prompts without a pair.

    A record has `prompt`, `chosen`, `rejected` and their token ids; a pair of two samples also has
    both `scores` and their difference, the `margin`. A prompt has no pair if no two of its texts
    differ in both content and score.

    Args:
        rollout: Samples of a step.
        scores: Scores of the samples [B], consecutive for each prompt. A sample whose score is not
            finite is in no pair.
        samples_per_prompt: Number of samples per prompt.
        tokenizer: Tokenizer of the policy.
        pairs: Value of `algorithm.pairs`.
    """
    if pairs == "demonstration":
        candidates = _against_demonstrations(rollout, scores)
    else:
        candidates = _between_samples(
            rollout, scores, PAIRS[pairs](scores, samples_per_prompt).view(-1, 2).tolist()
        )
    records = []
    with_pair = set[int]()
    for row, chosen, rejected, fields in candidates:
        prompt = rollout.prompts[row]
        texts = [
            tokenizer.decode_after(prompt.tokens, token_ids) for token_ids in (chosen, rejected)
        ]
        # A scorer that reads token ids can give different scores to equal or to empty texts.
        if texts[0] == texts[1] or not all(text.strip() for text in texts):
            continue
        tokens = {
            "prompt_tokens": prompt.tokens.tolist(),
            "chosen_tokens": chosen,
            "rejected_tokens": rejected,
        }
        records.append(
            {"prompt": prompt.text, "chosen": texts[0], "rejected": texts[1], **fields, **tokens}
        )
        with_pair.add(row // samples_per_prompt)

    scored_prompts = int(scores.isfinite().view(-1, samples_per_prompt).any(1).sum())
    return records, scored_prompts - len(with_pair)


def _between_samples(
    rollout: RolloutBatch, scores: Tensor, rows: Sequence[Sequence[int]]
) -> Iterator[_Pair]:
    """Yield the pairs of these rows, each the row of the best and of the worst sample of a
    prompt."""
    for best, worst in rows:
        both = [float(scores[best]), float(scores[worst])]
        chosen, rejected = (rollout.samples[row].response.tolist() for row in (best, worst))
        yield best, chosen, rejected, {"margin": both[0] - both[1], "scores": both}


def _against_demonstrations(rollout: RolloutBatch, scores: Tensor) -> Iterator[_Pair]:
    """Yield pairs that prefer the answer of a prompt's record over each sample (SPIN).

    The pairs have no margin, because the demonstrations have no score.
    """
    for row in scores.isfinite().nonzero()[:, 0].tolist():
        demonstration = rollout.prompts[row].metadata["response_tokens"]
        yield row, demonstration, rollout.samples[row].response.tolist(), {}


@dataclass
class PairWriter:
    """Writes `preferences.jsonl`, if the run has pairs, and `responses.jsonl` with the nonempty
    samples.

    The files have temporary names until the run has ended.
    """

    paths: RunPaths
    tokenizer: Tokenizer
    has_pairs: bool = True
    kept_fields: Sequence[str] = ()
    """Fields of the prompts' records that the responses also receive."""

    @fenced_write()
    def resume(self, step: int) -> None:
        """Delete the records of steps after `step`."""
        for path in self._files:
            if path.exists():
                # The run had ended before it was resumed.
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
        """Write the records of a step.

        Args:
            step: Number of the step.
            records: Preference records.
            rollout: Samples of the step.
            scores: Scores of the samples [B].
            rows: Samples to write as responses; None for all.

        Returns:
            The number of responses that were written.
        """
        selected = range(len(scores)) if rows is None else rows
        sequences = [
            (row, sequence) for row in selected for sequence in rollout.samples[row].sequences
        ]
        responses = [
            self._response(rollout.prompts[row], sequence, float(scores[row]))
            for row, sequence in sequences
        ]
        responses = [response for response in responses if response["response"].strip()]

        if self.has_pairs:
            RecordWriter(_unfinished(self.paths.preferences)).write(step, records)
        RecordWriter(_unfinished(self.paths.responses)).write(step, responses)
        return len(responses)

    def _response(self, prompt: Prompt, sample: Sample, score: float) -> Record:
        """Return the record of a sample or of one of its branches: prompt, response and their token
        ids.

        The record of an episode also states which tokens the policy generated.
        """
        prompt_tokens = sample.tokens[: sample.prompt_length]
        response = sample.response
        has_original_prompt = torch.equal(prompt_tokens, prompt.tokens)
        return {
            **{name: prompt.metadata[name] for name in self.kept_fields},
            "prompt": (
                prompt.text
                if has_original_prompt
                else self.tokenizer.decode(prompt_tokens, skip_special_tokens=False)
            ),
            "response": decode_response(sample, self.tokenizer),
            "prompt_tokens": prompt_tokens.tolist(),
            "response_tokens": response.tolist(),
            **({} if sample.drawn is None else {"drawn": sample.drawn.int().tolist()}),
            "reward": score,
        }

    @fenced_write()
    def finish(self) -> None:
        """Give the files their final names.

        Raises:
            AlignerError: There is no pair, or no response at all.
        """
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
    """Training loop that writes preference pairs and responses and trains nothing.

    The run saves no checkpoints: it resumes after the last step whose metrics are written.
    """

    publisher: WeightPublisher
    builder: RolloutBuilder
    services: Services
    shaping: ScoreShaping
    writer: PairWriter | None
    """Writer of the files; None on ranks other than 0."""

    def resume(self, saved: Sequence[TrainingState]) -> int:
        """Return the number of completed steps, according to the metrics, which are written
        last."""
        self.services.start(self.config.server.start_timeout_s)
        done = read_metrics(run_paths(self.config).metrics) if self.config.run.resumes else []
        first = int(done[-1]["step"]) if done else 0
        # Every completed step took the same number of prompts, so no checkpoint is needed.
        self.builder.position = first * self.config.rollout.prompts_per_step
        if self.writer is not None:
            self.writer.resume(first)
        return first

    def begin(self, first: int) -> None:
        """Publish the policy's weights to the engine."""
        self.timeline.begin_step(first + 1)
        with self.timeline.span("publish"):
            self.publisher.publish(version=0)

    def step(self, step: int, timer: PhaseTimer) -> StepResult:
        """Generate and score samples, and write the pairs."""
        with timer.phase("generate"):
            all_samples = rollout = self.builder.take()
        with timer.phase("server_wait"):
            rollout = rollout.scored()
            metrics = rollout_metrics(
                rollout, self.config.rollout, source_names(self.config.reward)
            )
            scores = rollout.scores.result()
            all_scores = all_samples.scores.result()

        self.services.assert_settled()
        if self.writer is not None:
            metrics |= self._write(self.writer, step + 1, all_samples, all_scores)
        sampled = StepSamples.of(all_samples)
        return StepResult(metrics, {"samples": len(rollout.samples)}, rollout, scores, sampled)

    def _write(
        self, writer: PairWriter, step: int, rollout: RolloutBatch, scores: Tensor
    ) -> dict[str, float]:
        """Write the records of a step and return their metrics."""
        settings = self.config.algorithm
        samples_per_prompt = self.config.rollout.samples_per_prompt
        shaped = self.shaping(scores, rollout.samples)
        metrics = dict[str, float]()
        records = list[Record]()

        if writer.has_pairs:
            records, prompts_without_pair = preferences(
                rollout, shaped, samples_per_prompt, writer.tokenizer, settings.pairs
            )
            metrics = {
                "preferences/pairs": float(len(records)),
                "preferences/without_pair": float(prompts_without_pair),
            }
        if margins := [record["margin"] for record in records if "margin" in record]:
            metrics["preferences/margin"] = sum(margins) / len(margins)

        response_rows = rejection_sampled_rows(
            shaped, samples_per_prompt, settings.responses, settings.min_score
        ).tolist()
        return metrics | {
            "preferences/responses": float(
                writer.write(step, records, rollout, scores, response_rows)
            )
        }

    def finish(self) -> None:
        """Give the files their final names after all steps are completed."""
        if (
            self.writer is not None
            and self.stop.last == self.config.run.steps
            and not self.stop.is_early
        ):
            self.writer.finish()

    def close(self) -> None:
        """Close the engine."""
        self.builder.close()
