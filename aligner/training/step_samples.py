"""Sample files: all samples of a step as table columns, written by a thread during the next
step."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aligner.data.conversations import build_messages, decode_response
from aligner.data.pass_rates import PromptLocator, PromptOutcome, collect_outcomes
from aligner.data.tokenizer import Tokenizer
from aligner.data.tool_calls import ToolFormat, detect_tool_format
from aligner.data.types import (
    Experience,
    Prompt,
    Sample,
    SampleBatch,
    build_response_mask,
    collate_episodes,
)
from aligner.errors import ConfigError
from aligner.observability.sample_files import Column, SampleFiles
from aligner.training.rollout_builder import RolloutBatch


@dataclass(frozen=True)
class StepSamples:
    """All samples that a step generated, and the experience that it trained on."""

    rollout: RolloutBatch
    """Samples of the step, including those without a score and those that were not selected."""
    scores: Tensor
    """Scores before shaping, float32 [N], of the rollout's samples and then of the replaced ones;
    not finite for a sample without a score."""
    source_scores: Tensor | None = None
    """Scores of each reward source, float32 [N, P]; None with one source."""
    experience: Experience | None = None
    """Rows that were trained on, whose `row_ids` index the rows of the rollout's batch; None if
    nothing was trained."""

    @staticmethod
    def from_rollout(rollout: RolloutBatch, experience: Experience | None = None) -> "StepSamples":
        """Build the object and wait for the scores. Collective.

        Raises:
            AlignerError: Scoring failed; raised on every rank.
        """
        scores = rollout.all_scores.result()
        source_scores = rollout.all_scores.get_source_scores()
        selected_rows = rollout.scores.selected_rows
        if selected_rows is not None:
            # Move the scores of the samples that dynamic sampling replaced to the end.
            is_replaced = torch.ones(len(scores), dtype=torch.bool)
            is_replaced.index_fill_(0, selected_rows, False)
            order = torch.cat([selected_rows, is_replaced.nonzero()[:, 0]])
            scores = scores[order]
            source_scores = None if source_scores is None else source_scores[order]
        return StepSamples(rollout, scores, source_scores, experience)

    def collect(self, pad_token_id: int) -> tuple[list[Prompt], list[Sample], SampleBatch]:
        """Return all samples with their prompts and as a batch.

        Replaced samples follow the others. The rows of the batch are the samples, followed by their
        branches.
        """
        rollout = self.rollout
        replaced = [
            (partial_rollout.prompt, sample)
            for partial_rollout in rollout.replaced
            for sample in partial_rollout.samples
        ]
        if not replaced:
            return rollout.prompts, rollout.samples, rollout.batch

        # The batch ends with the rows of branches, so samples cannot be appended to it.
        prompts = [*rollout.prompts, *(prompt for prompt, _ in replaced)]
        samples = [*rollout.samples, *(sample for _, sample in replaced)]
        return prompts, samples, collate_episodes(samples, pad_token_id)

    def collect_outcomes(
        self, locate_prompt: PromptLocator, threshold: float | None
    ) -> list[PromptOutcome]:
        """Return the outcome of each prompt; see `pass_rates.collect_outcomes`.

        If samples are generated ahead of training, only rank 0 knows the replaced samples.
        """
        replaced_ids = (
            partial_rollout.prompt.id
            for partial_rollout in self.rollout.replaced
            for _ in partial_rollout.samples
        )
        ids = [*(prompt.id for prompt in self.rollout.prompts), *replaced_ids]
        # Ranks without the replaced samples have their scores, which are the last ones: skip them.
        return collect_outcomes(ids, self.scores[: len(ids)], locate_prompt, threshold)

    def build_training_columns(self, row_count: int, width: int) -> dict[str, NDArray]:
        """Return the quantities of the tokens that were trained on, by column name.

        Args:
            row_count: Number of rows of the batch of `collect`.
            width: Number of columns of that batch's masks.

        Returns:
            Arrays float32 [row_count, width]; NaN for tokens that were not trained on.
        """
        experience = self.experience
        if experience is None or experience.row_ids is None:
            return {}
        quantities = {
            "trainer_logprob": experience.old_logprobs,
            "reference_logprob": experience.reference_logprobs,
            "advantage": experience.advantages,
            "entropy": experience.entropies,
            "value": experience.values,
            "return": experience.returns,
        }

        row_ids = experience.row_ids.numpy()
        sample_count = len(self.rollout.samples)
        # Rows of branches follow those of all samples, so the rows that `collect` adds for the
        # replaced samples shift them.
        added_rows = row_count - len(self.rollout.batch.tokens)
        row_ids = np.where(row_ids < sample_count, row_ids, row_ids + added_rows)

        mask = experience.mask.numpy()
        columns = {}
        for name, values in quantities.items():
            if values is not None:
                column = np.full((row_count, width), np.nan, dtype=np.float32)
                # The rows that were trained on may be narrower than the whole batch.
                column[row_ids, : values.shape[1]] = np.where(mask, values.numpy(), np.nan)
                columns[name] = column
        return columns


class SampleRecorder:
    """Writes the samples of every step to the sample files; used on rank 0."""

    def __init__(
        self,
        files: SampleFiles,
        tokenizer: Tokenizer,
        locate_prompt: PromptLocator,
        source_names: Sequence[str],
    ) -> None:
        """Create the recorder.

        Args:
            files: Sample files of the run.
            tokenizer: Tokenizer of the policy.
            locate_prompt: Maps a prompt's id to its index and epoch.
            source_names: Names of the reward's sources.
        """
        self._files = files
        self._tokenizer = tokenizer
        self._locate_prompt = locate_prompt
        self._source_names = tuple(source_names)
        self._token_texts: dict[int, str] = {}
        """Text of each token id that was written so far."""
        # One thread: the files of a step are written after those of the step before.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._last_write: tuple[int, Future[None]] | None = None
        """Last step whose samples were submitted, with the pending write."""

    def write(self, step: int, samples: StepSamples) -> None:
        """Start to write the samples of a step, after those of earlier steps are written.

        Raises the errors of `wait_until_written`.
        """
        self.wait_until_written(step)
        self._last_write = step, self._worker.submit(self._write, step, samples)

    def wait_until_written(self, step: int) -> None:
        """Wait until the files of all steps up to `step` are written; raise the error if a write
        failed."""
        if self._last_write is not None and self._last_write[0] <= step:
            self._last_write[1].result()

    def truncate_after(self, step: int) -> None:
        """Delete the samples of steps that a resumed run repeats."""
        self._files.truncate_after(step)

    def _write(self, step: int, samples: StepSamples) -> None:
        # This runs in a thread during the next step, which must not change these tensors in place.
        prompts, all_samples, batch = samples.collect(self._tokenizer.pad_token_id)
        training_columns = samples.build_training_columns(*batch.mask.shape)
        rows = list(_expand_branches(prompts, all_samples))
        # In the files a branch follows its sample; in the batch all branches are last.
        batch_rows = [row.batch_row for row in rows]
        number_columns = _build_number_columns(batch, batch_rows)
        token_columns = self._build_token_columns(batch, training_columns, batch_rows)

        columns: dict[str, Column] = {
            **number_columns,
            **self._build_text_columns(rows),
            **self._build_score_columns(samples, rows),
        }
        if training_columns:
            columns["advantage"] = _compute_row_means(training_columns["advantage"][batch_rows])
        self._files.write(step, columns, token_columns)

    def _build_text_columns(self, rows: Sequence["_Row"]) -> dict[str, Column]:
        # Samples that share a Prompt object share its columns, which are computed once.
        prompts = {id(row.prompt): row.prompt for row in rows}
        columns_by_prompt = {
            key: self._build_prompt_columns(prompt) for key, prompt in prompts.items()
        }
        prompt_columns = [columns_by_prompt[id(row.prompt)] for row in rows]
        return {
            **{
                name: [columns[name] for columns in prompt_columns]
                for name in ("prompt_index", "epoch", "metadata")
            },
            "prompt": [self._get_prompt_text(row) for row in rows],
            "response": [decode_response(row.sample, self._tokenizer) for row in rows],
            "messages": [self._render_messages(row) for row in rows],
            "sample": [row.root_sample.sample_index for row in rows],
            "branch": [row.branch for row in rows],
            "cut": [row.sample.finish_reason != "stop" for row in rows],
        }

    def _build_prompt_columns(self, prompt: Prompt) -> dict[str, Any]:
        index, epoch = self._locate_prompt(prompt.id)
        metadata = {name: value for name, value in prompt.metadata.items() if name != "messages"}
        return {
            "prompt_index": index,
            "epoch": epoch,
            "metadata": json.dumps(metadata, ensure_ascii=False) if metadata else None,
        }

    def _get_prompt_text(self, row: "_Row") -> str:
        if not row.branch:
            return row.prompt.text
        return self._tokenizer.decode(row.sample.tokens[: row.sample.prompt_length])

    def _render_messages(self, row: "_Row") -> str | None:
        # A branch starts within an episode, and a single response to a text has no messages.
        if row.branch or (
            row.sample.generated_mask is None and "messages" not in row.prompt.metadata
        ):
            return None
        messages = build_messages(row.sample, row.prompt, self._tool_format, self._tokenizer)
        return json.dumps(messages, ensure_ascii=False)

    def _build_score_columns(
        self, samples: StepSamples, rows: Sequence["_Row"]
    ) -> dict[str, Column]:
        # The files contain null for NaN: for samples without a score, whatever the reason.
        finite_scores = torch.where(samples.scores.isfinite(), samples.scores, torch.nan)
        scores = finite_scores.numpy()[[row.score_index for row in rows]]
        if samples.source_scores is None:
            return {"score": scores}

        source_scores = samples.source_scores.tolist()  # [N, P]
        parts = [
            self._name_parts(source_scores[row.score_index], row.root_sample.rewards)
            for row in rows
        ]
        return {
            "score": scores,
            "score_parts": [
                None if is_missing else named_parts
                for named_parts, is_missing in zip(parts, np.isnan(scores), strict=True)
            ],
        }

    def _name_parts(
        self, source_scores: Sequence[float], environment_rewards: Tensor | None
    ) -> dict[str, float]:
        named_parts = dict(zip(self._source_names, source_scores, strict=True))
        if environment_rewards is None:
            return named_parts
        return named_parts | {"environment": float(environment_rewards.sum())}

    @cached_property
    def _tool_format(self) -> ToolFormat | None:
        try:
            return detect_tool_format(self._tokenizer)
        except ConfigError:  # the tokenizer has no chat template
            return None

    def _build_token_columns(
        self, batch: SampleBatch, training_columns: Mapping[str, NDArray], batch_rows: Sequence[int]
    ) -> dict[str, NDArray]:
        """Return the columns of the response tokens of these rows, concatenated over the rows."""
        is_response = build_response_mask(
            batch.lengths, batch.prompt_lengths, batch.tokens.shape[1]
        ).numpy()[batch_rows]  # [N, S-1]; entry t belongs to token t+1, like those of the mask

        def read_responses(values: NDArray) -> NDArray:
            return values[batch_rows][is_response]

        is_generated = read_responses(batch.mask.numpy())
        ids = read_responses(batch.tokens[:, 1:].numpy())
        logprobs = read_responses(batch.engine_logprobs.numpy())
        versions = read_responses(batch.weight_versions.numpy())

        # Decode each distinct token id once; `inverse` maps each token to its entry.
        distinct_ids, inverse = np.unique(ids, return_inverse=True)
        for token in distinct_ids.tolist():
            if token not in self._token_texts:
                self._token_texts[token] = self._tokenizer.decode_token(token)
        distinct_texts = [self._token_texts[token] for token in distinct_ids.tolist()]
        return {
            "token_id": ids,
            "text": np.array(distinct_texts, dtype=object)[inverse],
            "drawn": is_generated,
            # Observation tokens have neither a log-prob nor a version.
            "engine_logprob": np.where(is_generated, logprobs, np.nan),
            "version": np.ma.MaskedArray(versions, ~is_generated),
            **{name: read_responses(values) for name, values in training_columns.items()},
        }


@dataclass(frozen=True)
class _Row:
    """A sample, or one of its branches."""

    batch_row: int
    """Row of the batch."""
    score_index: int
    """Index of the sample among all samples, and of its score."""
    prompt: Prompt
    sample: Sample
    """The sample or the branch."""
    root_sample: Sample
    """The sample itself, or the sample that the branch belongs to."""
    branch: int
    """Number of the branch; 0 for the sample itself."""


def _expand_branches(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Iterator[_Row]:
    """Yield the samples, each followed by its branches; branches have the last rows of the
    batch."""
    # `collate_episodes` appends the branches of all samples, in the order of the samples.
    branch_rows = itertools.count(len(samples))
    for index, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        for branch, sequence in enumerate((sample, *sample.branches)):
            batch_row = next(branch_rows) if branch else index
            yield _Row(batch_row, index, prompt, sequence, sample, branch)


def _build_number_columns(batch: SampleBatch, batch_rows: Sequence[int]) -> dict[str, NDArray]:
    """Return the numeric columns of these rows of the batch.

    These are the prompt's group, the lengths in tokens, and the weight versions of the first and
    the last generated token.
    """
    is_generated = batch.mask.numpy()[batch_rows]
    prompt_tokens = batch.prompt_lengths.numpy()[batch_rows]
    counts = is_generated.sum(axis=1)
    # The versions of all rows are concatenated; those of row i end before end_offsets[i].
    end_offsets = np.cumsum(counts)
    is_empty = counts == 0
    # Append an entry so that the indices of rows without generated tokens are valid.
    versions = np.append(batch.weight_versions.numpy()[batch_rows][is_generated], 0)
    return {
        "group": batch.groups.numpy()[batch_rows],
        "prompt_tokens": prompt_tokens,
        "response_tokens": batch.lengths.numpy()[batch_rows] - prompt_tokens,
        "drawn_tokens": counts,
        "version_first": np.ma.MaskedArray(versions[end_offsets - counts], is_empty),
        "version_last": np.ma.MaskedArray(versions[end_offsets - 1], is_empty),
    }


def _compute_row_means(values: NDArray) -> NDArray:
    """Return the mean of each row [N, S] without NaN, float32 [N]; NaN for a row of NaN."""
    is_number = ~np.isnan(values)
    counts = is_number.sum(axis=1)
    # float32 sums of long rows would lose precision.
    totals = np.sum(values, axis=1, where=is_number, dtype=np.float64)
    means = totals / np.maximum(counts, 1)
    return np.where(counts > 0, means, np.nan).astype(np.float32)
