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
from aligner.paths import RunPaths, get_run_paths
from aligner.resharding.weight_update import WeightPublisher
from aligner.schema.reward_sources import list_source_names
from aligner.training.loop import TrainingLoop
from aligner.training.rollout_builder import RolloutBatch, RolloutBuilder
from aligner.training.run_checkpoints import TrainingState
from aligner.training.services import Services
from aligner.training.step_metrics import StepResult, compute_rollout_metrics
from aligner.training.step_samples import StepSamples

Record = dict[str, Any]
_Pair = tuple[int, list[int], list[int], Record]
"""Row of a sample of the prompt, token ids of the chosen and of the rejected answer, and the other
fields of the record."""


def build_preferences(
    rollout: RolloutBatch,
    scores: Tensor,
    samples_per_prompt: int,
    tokenizer: Tokenizer,
    pair_selection: str = "best_and_worst",
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
        pair_selection: Value of `algorithm.pairs`.
    """
    if pair_selection == "demonstration":
        candidates = _pair_with_demonstrations(rollout, scores)
    else:
        select_pairs = PAIRS[pair_selection]
        pair_rows = select_pairs(scores, samples_per_prompt).view(-1, 2).tolist()  # [pairs, 2]
        candidates = _pair_samples(rollout, scores, pair_rows)

    records = []
    paired_prompts = set[int]()
    for row, chosen, rejected, fields in candidates:
        prompt = rollout.prompts[row]
        texts = [
            tokenizer.decode_after(prompt.tokens, token_ids) for token_ids in (chosen, rejected)
        ]
        # A scorer that reads token ids can give different scores to equal or to empty texts.
        if texts[0] == texts[1] or not all(text.strip() for text in texts):
            continue

        # The token ids as well: the text, tokenized again, may have other tokens than the policy
        # generated.
        tokens = {
            "prompt_tokens": prompt.tokens.tolist(),
            "chosen_tokens": chosen,
            "rejected_tokens": rejected,
        }
        records.append(
            {"prompt": prompt.text, "chosen": texts[0], "rejected": texts[1], **fields, **tokens}
        )
        paired_prompts.add(row // samples_per_prompt)

    # A prompt without any score is not counted: it was skipped, or the reward function abstained.
    scored_prompts = int(scores.isfinite().view(-1, samples_per_prompt).any(1).sum())
    return records, scored_prompts - len(paired_prompts)


def _pair_samples(
    rollout: RolloutBatch, scores: Tensor, pair_rows: Sequence[Sequence[int]]
) -> Iterator[_Pair]:
    """Yield the pairs of these rows, which are the rows of the better and of the worse sample."""
    for better, worse in pair_rows:
        pair_scores = [float(scores[better]), float(scores[worse])]
        chosen = rollout.samples[better].response.tolist()
        rejected = rollout.samples[worse].response.tolist()
        margin = pair_scores[0] - pair_scores[1]
        yield better, chosen, rejected, {"margin": margin, "scores": pair_scores}


def _pair_with_demonstrations(rollout: RolloutBatch, scores: Tensor) -> Iterator[_Pair]:
    """Yield pairs that prefer the answer of a prompt's record over each sample (SPIN: Chen et al.
    2024).

    The pairs have no margin, because the demonstrations have no score.
    """
    for row in scores.isfinite().nonzero()[:, 0].tolist():
        demonstration = rollout.prompts[row].metadata["response_tokens"]
        yield row, demonstration, rollout.samples[row].response.tolist(), {}


@dataclass
class PairWriter:
    """Writes the preference pairs and the responses of a run.

    Pairs are written to `preferences.jsonl`, nonempty samples to `responses.jsonl`. The files have
    temporary names until the run has ended.
    """

    paths: RunPaths
    tokenizer: Tokenizer
    has_pairs: bool = True
    """Whether the run writes pairs."""
    kept_fields: Sequence[str] = ()
    """Fields of the prompts' records that the responses also receive."""

    @fenced_write()
    def resume(self, step: int) -> None:
        """Delete the records of steps after `step`."""
        for path in self._paths:
            if path.exists():
                # The run had ended before it was resumed.
                path.rename(_unfinished_path(path))
            RecordWriter(_unfinished_path(path)).truncate_after(step)

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
        selected_rows = range(len(scores)) if rows is None else rows
        # The branches of an episode are responses of their own, with the score of the episode.
        sequences = [
            (row, sequence) for row in selected_rows for sequence in rollout.samples[row].sequences
        ]
        responses = [
            self._build_response_record(rollout.prompts[row], sequence, float(scores[row]))
            for row, sequence in sequences
        ]
        responses = [response for response in responses if response["response"].strip()]

        if self.has_pairs:
            RecordWriter(_unfinished_path(self.paths.preferences)).write(step, records)
        RecordWriter(_unfinished_path(self.paths.responses)).write(step, responses)
        return len(responses)

    def _build_response_record(self, prompt: Prompt, sample: Sample, score: float) -> Record:
        """Return the record of a sample or of one of its branches: prompt, response and their token
        ids.

        The record of an episode also states which tokens the policy generated.
        """
        prompt_tokens = sample.tokens[: sample.prompt_length]
        # A branch has another context than the prompt; its text is decoded from its tokens.
        has_original_prompt = torch.equal(prompt_tokens, prompt.tokens)
        prompt_text = prompt.text
        if not has_original_prompt:
            prompt_text = self.tokenizer.decode(prompt_tokens, skip_special_tokens=False)

        record: Record = {name: prompt.metadata[name] for name in self.kept_fields}
        record |= {
            "prompt": prompt_text,
            "response": decode_response(sample, self.tokenizer),
            "prompt_tokens": prompt_tokens.tolist(),
            "response_tokens": sample.response.tolist(),
        }
        if sample.generated_mask is not None:
            record["drawn"] = sample.generated_mask.int().tolist()
        record["reward"] = score
        return record

    @fenced_write()
    def finish(self) -> None:
        """Give the files their final names.

        Raises:
            AlignerError: There is no pair, or no response at all.
        """
        if self.has_pairs and not _unfinished_path(self.paths.preferences).stat().st_size:
            raise AlignerError(
                "no preference pairs: for every prompt, all scores are equal, or the responses are"
                " empty or identical; generate more samples per prompt"
                " (rollout.samples_per_prompt), raise rollout.temperature, or use another reward"
            )
        if not self.has_pairs and not _unfinished_path(self.paths.responses).stat().st_size:
            raise AlignerError(
                "no samples to write: all samples are empty or score below algorithm.min_score;"
                " lower algorithm.min_score"
            )
        for path in self._paths:
            _unfinished_path(path).replace(path)

    @property
    def _paths(self) -> tuple[Path, ...]:
        if self.has_pairs:
            return (self.paths.preferences, self.paths.responses)
        return (self.paths.responses,)


def _unfinished_path(path: Path) -> Path:
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

    def resume(self, states: Sequence[TrainingState]) -> int:
        """Return the number of completed steps, according to the metrics, which are written
        last."""
        self.services.start(self.config.server.start_timeout_s)
        records = (
            read_metrics(get_run_paths(self.config).metrics)
            if self.config.run.should_resume
            else []
        )
        completed_steps = int(records[-1]["step"]) if records else 0
        # Every completed step took the same number of prompts, so no checkpoint is needed.
        self.builder.position = completed_steps * self.config.rollout.prompts_per_step
        if self.writer is not None:
            self.writer.resume(completed_steps)
        return completed_steps

    def begin(self, first_step: int) -> None:
        """Publish the policy's weights to the engine."""
        self.timeline.begin_step(first_step + 1)
        with self.timeline.span("publish"):
            self.publisher.publish(version=0)

    def step(self, step: int, timer: PhaseTimer) -> StepResult:
        """Generate and score samples, and write the pairs."""
        with timer.phase("generate"):
            full_rollout = self.builder.take()
        with timer.phase("server_wait"):
            rollout = full_rollout.drop_unscored()
            metrics = compute_rollout_metrics(
                rollout, self.config.rollout, list_source_names(self.config.reward)
            )
            scores = rollout.scores.result()
            all_scores = full_rollout.scores.result()

        self.services.assert_settled()
        if self.writer is not None:
            metrics |= self._write_records(self.writer, step + 1, full_rollout, all_scores)
        step_samples = StepSamples.from_rollout(full_rollout)
        return StepResult(metrics, {"samples": len(rollout.samples)}, rollout, scores, step_samples)

    def _write_records(
        self, writer: PairWriter, step: int, rollout: RolloutBatch, scores: Tensor
    ) -> dict[str, float]:
        """Write the records of a step and return their metrics."""
        settings = self.config.algorithm
        samples_per_prompt = self.config.rollout.samples_per_prompt
        # Pairs and their margins use the shaped scores; the `reward` of a response is not shaped.
        shaped_scores = self.shaping(scores, rollout.samples)
        metrics = dict[str, float]()
        records = list[Record]()

        if writer.has_pairs:
            records, prompts_without_pair = build_preferences(
                rollout, shaped_scores, samples_per_prompt, writer.tokenizer, settings.pairs
            )
            metrics = {
                "preferences/pairs": float(len(records)),
                "preferences/without_pair": float(prompts_without_pair),
            }
        if margins := [record["margin"] for record in records if "margin" in record]:
            metrics["preferences/margin"] = sum(margins) / len(margins)

        response_rows = rejection_sampled_rows(
            shaped_scores, samples_per_prompt, settings.responses, settings.min_score
        ).tolist()
        response_count = writer.write(step, records, rollout, scores, response_rows)
        return metrics | {"preferences/responses": float(response_count)}

    def finish(self) -> None:
        """Give the files their final names after all steps are completed."""
        if (
            self.writer is not None
            and self.stop_condition.last_step == self.config.run.steps
            and not self.stop_condition.is_early
        ):
            self.writer.finish()

    def close(self) -> None:
        """Close the engine."""
        self.builder.close()
