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
    score_parts: Tensor | None = None
    """Scores of each reward source, float32 [N, P]; None with one source."""
    experience: Experience | None = None
    """Rows that were trained on, whose `row_ids` index the rows of the rollout's batch; None if
    nothing was trained."""

    @staticmethod
    def of(rollout: RolloutBatch, experience: Experience | None = None) -> "StepSamples":
        """Build the object and wait for the scores. Collective.

        Raises:
            AlignerError: Scoring failed; raised on every rank.
        """
        scores = rollout.all_scores.result()
        parts = rollout.all_scores.parts()
        chosen = rollout.scores.chosen
        if chosen is not None:
            # Move the scores of the samples that dynamic sampling replaced to the end.
            is_replaced = torch.ones(len(scores), dtype=torch.bool).index_fill_(0, chosen, False)
            order = torch.cat([chosen, is_replaced.nonzero()[:, 0]])
            scores = scores[order]
            parts = None if parts is None else parts[order]
        return StepSamples(rollout, scores, parts, experience)

    def all(self, pad_token_id: int) -> tuple[list[Prompt], list[Sample], SampleBatch]:
        """Return all samples with their prompts and as a batch.

        Replaced samples follow the others. The rows of the batch are the samples, followed by their
        branches.
        """
        rollout = self.rollout
        replaced = [
            (straggler.prompt, sample)
            for straggler in rollout.replaced
            for sample in straggler.samples
        ]
        if not replaced:
            return rollout.prompts, rollout.samples, rollout.batch
        prompts = [*rollout.prompts, *(prompt for prompt, _ in replaced)]
        samples = [*rollout.samples, *(sample for _, sample in replaced)]
        return prompts, samples, collate_episodes(samples, pad_token_id)

    def draws(self, origin: PromptLocator, threshold: float | None) -> list[PromptOutcome]:
        """Return the outcome of each prompt; see `collect_outcomes`.

        If samples are generated ahead of training, only rank 0 knows the replaced samples.
        """
        replaced_ids = (
            straggler.prompt.id for straggler in self.rollout.replaced for _ in straggler.samples
        )
        ids = [*(prompt.id for prompt in self.rollout.prompts), *replaced_ids]
        return collect_outcomes(ids, self.scores[: len(ids)], origin, threshold)

    def learned(self, rows: int, width: int) -> dict[str, NDArray]:
        """Return the quantities of the tokens that were trained on, by column name.

        Args:
            rows: Number of rows of the batch of `all`.
            width: Number of columns of that batch's masks.

        Returns:
            Arrays float32 [rows, width]; NaN for tokens that were not trained on.
        """
        experience = self.experience
        sample_count = len(self.rollout.samples)
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

        ids = experience.row_ids.numpy()
        columns = {}
        # Rows of branches follow those of all samples, replaced samples included.
        ids = np.where(ids < sample_count, ids, ids + rows - len(self.rollout.batch.tokens))
        for name, values in quantities.items():
            if values is not None:
                columns[name] = np.full((rows, width), np.nan, dtype=np.float32)
                columns[name][ids, : values.shape[1]] = np.where(
                    experience.mask.numpy(), values.numpy(), np.nan
                )
        return columns


class SampleRecorder:
    """Writes the samples of every step to the sample files; used on rank 0."""

    def __init__(
        self,
        files: SampleFiles,
        tokenizer: Tokenizer,
        origin: PromptLocator,
        sources: Sequence[str],
    ) -> None:
        """Create the recorder.

        Args:
            files: Sample files of the run.
            tokenizer: Tokenizer of the policy.
            origin: Maps a prompt's id to its index and epoch.
            sources: Names of the reward's sources.
        """
        self._files = files
        self._tokenizer = tokenizer
        self._origin = origin
        self._sources = tuple(sources)
        self._pieces: dict[int, str] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._written: tuple[int, Future[None]] | None = None
        """Last step whose samples were submitted, with the pending write."""

    def write(self, step: int, samples: StepSamples) -> None:
        """Start to write the samples of a step, after those of earlier steps are written.

        Raises the errors of `settle`.
        """
        self.settle(step)
        self._written = step, self._worker.submit(self._write, step, samples)

    def settle(self, step: int) -> None:
        """Wait until the files of all steps up to `step` are written; raise the error if a write
        failed."""
        if self._written is not None and self._written[0] <= step:
            self._written[1].result()

    def truncate_after(self, step: int) -> None:
        """Delete the samples of steps that a resumed run repeats."""
        self._files.truncate_after(step)

    def _write(self, step: int, samples: StepSamples) -> None:
        prompts, drawn_samples, batch = samples.all(self._tokenizer.pad_token_id)
        learned = samples.learned(*batch.mask.shape)
        rows = list(_rows(prompts, drawn_samples))
        row_indices = [row.row for row in rows]
        number_columns = _number_columns(batch, row_indices)
        token_columns = self._token_columns(batch, learned, row_indices)

        columns = {
            **number_columns,
            **self._text_columns(rows),
            **self._score_columns(samples, rows),
            **({"advantage": _means(learned["advantage"][row_indices])} if learned else {}),
        }
        self._files.write(step, columns, token_columns)

    def _text_columns(self, rows: Sequence["_Row"]) -> dict[str, Column]:
        # Samples that share a Prompt object share its columns, which are computed once.
        prompts = {id(row.prompt): row.prompt for row in rows}
        columns_by_prompt = {key: self._prompt_columns(prompt) for key, prompt in prompts.items()}
        prompt_columns = [columns_by_prompt[id(row.prompt)] for row in rows]
        return {
            **{
                name: [columns[name] for columns in prompt_columns]
                for name in ("prompt_index", "epoch", "metadata")
            },
            "prompt": [self._prompt_text(row) for row in rows],
            "response": [decode_response(row.sample, self._tokenizer) for row in rows],
            "messages": [self._messages(row) for row in rows],
            "sample": [row.whole.sample_index for row in rows],
            "branch": [row.branch for row in rows],
            "cut": [row.sample.finish_reason != "stop" for row in rows],
        }

    def _prompt_columns(self, prompt: Prompt) -> dict[str, Any]:
        index, epoch = self._origin(prompt.id)
        metadata = {name: value for name, value in prompt.metadata.items() if name != "messages"}
        return {
            "prompt_index": index,
            "epoch": epoch,
            "metadata": json.dumps(metadata, ensure_ascii=False) if metadata else None,
        }

    def _prompt_text(self, row: "_Row") -> str:
        return (
            self._tokenizer.decode(row.sample.tokens[: row.sample.prompt_length])
            if row.branch
            else row.prompt.text
        )

    def _messages(self, row: "_Row") -> str | None:
        if row.branch or (row.sample.drawn is None and "messages" not in row.prompt.metadata):
            return None
        messages = build_messages(row.sample, row.prompt, self._tool_format, self._tokenizer)
        return json.dumps(messages, ensure_ascii=False)

    def _score_columns(self, samples: StepSamples, rows: Sequence["_Row"]) -> dict[str, Column]:
        finite_scores = torch.where(samples.scores.isfinite(), samples.scores, torch.nan)
        scores = finite_scores.numpy()[[row.place for row in rows]]
        if samples.score_parts is None:
            return {"score": scores}
        source_scores = samples.score_parts.tolist()
        parts = [self._named_parts(source_scores[row.place], row.whole.rewards) for row in rows]
        return {
            "score": scores,
            "score_parts": [
                None if is_missing else named
                for named, is_missing in zip(parts, np.isnan(scores), strict=True)
            ],
        }

    def _named_parts(self, given: Sequence[float], environment: Tensor | None) -> dict[str, float]:
        named = dict(zip(self._sources, given, strict=True))
        return named if environment is None else named | {"environment": float(environment.sum())}

    @cached_property
    def _tool_format(self) -> ToolFormat | None:
        try:
            return detect_tool_format(self._tokenizer)
        except ConfigError:  # the tokenizer has no chat template
            return None

    def _token_columns(
        self, batch: SampleBatch, learned: Mapping[str, NDArray], rows: Sequence[int]
    ) -> dict[str, NDArray]:
        """Return the columns of the response tokens of these rows, concatenated over the rows."""
        is_response = build_response_mask(
            batch.lengths, batch.prompt_lengths, batch.tokens.shape[1]
        ).numpy()[rows]
        is_generated = batch.mask.numpy()[rows][is_response]
        ids = batch.tokens[:, 1:].numpy()[rows][is_response]
        # `_pieces` caches the text of each token id across steps.
        distinct_ids, inverse = np.unique(ids, return_inverse=True)
        for token in distinct_ids.tolist():
            if token not in self._pieces:
                self._pieces[token] = self._tokenizer.decode_token(token)
        return {
            "token_id": ids,
            "text": np.array(
                [self._pieces[token] for token in distinct_ids.tolist()], dtype=object
            )[inverse],
            "drawn": is_generated,
            "engine_logprob": np.where(
                is_generated, batch.engine_logprobs.numpy()[rows][is_response], np.nan
            ),
            "version": np.ma.MaskedArray(
                batch.weight_versions.numpy()[rows][is_response], ~is_generated
            ),
            **{name: values[rows][is_response] for name, values in learned.items()},
        }


@dataclass(frozen=True)
class _Row:
    """A sample, or one of its branches."""

    row: int
    """Row of the batch."""
    place: int
    """Index of the sample among all samples."""
    prompt: Prompt
    sample: Sample
    """The sample or the branch."""
    whole: Sample
    """The sample itself, or the sample that the branch belongs to."""
    branch: int
    """Number of the branch; 0 for the sample itself."""


def _rows(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Iterator[_Row]:
    """Yield the samples, each followed by its branches; branches have the last rows of the
    batch."""
    branch_rows = itertools.count(len(samples))
    for index, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        for branch, sequence in enumerate((sample, *sample.branches)):
            yield _Row(
                next(branch_rows) if branch else index, index, prompt, sequence, sample, branch
            )


def _number_columns(batch: SampleBatch, rows: Sequence[int]) -> dict[str, NDArray]:
    """Return the numeric columns of these rows of the batch.

    These are the prompt's group, the lengths in tokens, and the weight versions of the first and
    the last generated token.
    """
    is_generated = batch.mask.numpy()[rows]
    prompt_tokens = batch.prompt_lengths.numpy()[rows]
    counts = is_generated.sum(axis=1)
    end_offsets = np.cumsum(counts)
    is_empty = counts == 0
    # Append an entry so that the indices of rows without generated tokens are valid.
    versions = np.append(batch.weight_versions.numpy()[rows][is_generated], 0)
    return {
        "group": batch.groups.numpy()[rows],
        "prompt_tokens": prompt_tokens,
        "response_tokens": batch.lengths.numpy()[rows] - prompt_tokens,
        "drawn_tokens": counts,
        "version_first": np.ma.MaskedArray(versions[end_offsets - counts], is_empty),
        "version_last": np.ma.MaskedArray(versions[end_offsets - 1], is_empty),
    }


def _means(values: NDArray) -> NDArray:
    """Return the mean of each row [N, S] without NaN, float32 [N]; NaN for a row of NaN."""
    is_number = ~np.isnan(values)
    counts = is_number.sum(axis=1)
    means = np.sum(values, axis=1, where=is_number, dtype=np.float64) / np.maximum(counts, 1)
    return np.where(counts > 0, means, np.nan).astype(np.float32)
