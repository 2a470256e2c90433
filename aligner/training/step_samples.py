"""All samples of a step as rows and columns, and the thread that writes them beside the next
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
from aligner.rollout.rollout_builder import RolloutBatch


@dataclass(frozen=True)
class StepSamples:
    """What a step has drawn, and what it has learned from."""

    rollout: RolloutBatch
    """Also what has no score, and what was not selected."""
    scores: Tensor
    """float32 [N] of its samples and, behind them, those that it has replaced, as the reward gave
    them; else not a number"""
    score_parts: Tensor | None = None
    """float32 [N, P]: what each source of the reward has given; None with one"""
    experience: Experience | None = None
    """Of the rows that were learned from, whose `row_ids` are rows of the rollout's batch; None:
    nothing was"""

    @staticmethod
    def of(rollout: RolloutBatch, experience: Experience | None = None) -> "StepSamples":
        """With their scores, once these are there. Collective; raises AlignerError on every
        rank."""
        scores, parts, chosen = (
            rollout.all_scores.result(),
            rollout.all_scores.parts(),
            rollout.scores.chosen,
        )
        if chosen is not None:
            others = torch.ones(len(scores), dtype=torch.bool).index_fill_(0, chosen, False)
            order = torch.cat([chosen, others.nonzero()[:, 0]])
            scores, parts = scores[order], None if parts is None else parts[order]
        return StepSamples(rollout, scores, parts, experience)

    def all(self, pad_token_id: int) -> tuple[list[Prompt], list[Sample], SampleBatch]:
        """The samples with their prompts, those that were replaced last; as rows, and behind them
        their branches'."""
        rollout = self.rollout
        replaced = [(one.prompt, sample) for one in rollout.replaced for sample in one.samples]
        if not replaced:
            return rollout.prompts, rollout.samples, rollout.batch
        prompts = [*rollout.prompts, *(prompt for prompt, _ in replaced)]
        samples = [*rollout.samples, *(sample for _, sample in replaced)]
        return prompts, samples, collate_episodes(samples, pad_token_id)

    def draws(self, origin: PromptLocator, threshold: float | None) -> list[PromptOutcome]:
        """What came of each prompt, as `pass_rates.draws`. Drawn ahead, rank 0 alone knows those
        that were replaced."""
        others = (one.prompt.id for one in self.rollout.replaced for _ in one.samples)
        ids = [*(prompt.id for prompt in self.rollout.prompts), *others]
        return collect_outcomes(ids, self.scores[: len(ids)], origin, threshold)

    def learned(self, rows: int, width: int) -> dict[str, NDArray]:
        """What is known of tokens that were learned from, float32 [rows, width] of the rows of
        `all`; else not a number."""
        experience, own = self.experience, len(self.rollout.samples)
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
        ids, columns = experience.row_ids.numpy(), {}
        # branches are behind all samples
        ids = np.where(ids < own, ids, ids + rows - len(self.rollout.batch.tokens))
        for name, values in quantities.items():
            if values is not None:
                columns[name] = np.full((rows, width), np.nan, dtype=np.float32)
                columns[name][ids, : values.shape[1]] = np.where(
                    experience.mask.numpy(), values.numpy(), np.nan
                )
        return columns


class SampleRecorder:
    """Has every step's samples written; rank 0's."""

    def __init__(
        self,
        files: SampleFiles,
        tokenizer: Tokenizer,
        origin: PromptLocator,
        sources: Sequence[str],
    ) -> None:
        """`sources` are the names of the reward's."""
        self._files, self._tokenizer, self._origin, self._sources = (
            files,
            tokenizer,
            origin,
            tuple(sources),
        )
        self._pieces: dict[int, str] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._written: tuple[int, Future[None]] | None = None
        """The last step whose samples were handed over."""

    def write(self, step: int, samples: StepSamples) -> None:
        """Begin to write a step's, once those before it are written. Raises as `settle`."""
        self.settle(step)
        self._written = step, self._worker.submit(self._write, step, samples)

    def settle(self, step: int) -> None:
        """Return once the files of all steps up to this one are there. Raises what kept them from
        being written."""
        if self._written is not None and self._written[0] <= step:
            self._written[1].result()

    def truncate_after(self, step: int) -> None:
        """Forget what a resumed run is about to do again."""
        self._files.truncate_after(step)

    def _write(self, step: int, samples: StepSamples) -> None:
        prompts, drawn_samples, batch = samples.all(self._tokenizer.pad_token_id)
        learned, rows = samples.learned(*batch.mask.shape), list(_rows(prompts, drawn_samples))
        places = [each.row for each in rows]
        numbers, tokens = (
            _number_columns(batch, places),
            self._token_columns(batch, learned, places),
        )
        columns = {
            **numbers,
            **self._text_columns(rows),
            **self._score_columns(samples, rows),
            **({"advantage": _means(learned["advantage"][places])} if learned else {}),
        }
        self._files.write(step, columns, tokens)

    def _text_columns(self, rows: Sequence["_Row"]) -> dict[str, Column]:
        prompts = {id(row.prompt): row.prompt for row in rows}
        known = {key: self._prompt_columns(prompt) for key, prompt in prompts.items()}
        of_prompts = [known[id(row.prompt)] for row in rows]
        return {
            **{
                name: [each[name] for each in of_prompts]
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
        about = {name: value for name, value in prompt.metadata.items() if name != "messages"}
        return {
            "prompt_index": index,
            "epoch": epoch,
            "metadata": json.dumps(about, ensure_ascii=False) if about else None,
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
        numbers = torch.where(samples.scores.isfinite(), samples.scores, torch.nan)
        scores = numbers.numpy()[[row.place for row in rows]]
        if samples.score_parts is None:
            return {"score": scores}
        given = samples.score_parts.tolist()
        parts = [self._named_parts(given[row.place], row.whole.rewards) for row in rows]
        return {
            "score": scores,
            "score_parts": [
                None if nan else each for each, nan in zip(parts, np.isnan(scores), strict=True)
            ],
        }

    def _named_parts(self, given: Sequence[float], environment: Tensor | None) -> dict[str, float]:
        named = dict(zip(self._sources, given, strict=True))
        return named if environment is None else named | {"environment": float(environment.sum())}

    @cached_property
    def _tool_format(self) -> ToolFormat | None:
        try:
            return detect_tool_format(self._tokenizer)
        except ConfigError:  # it has no chat template
            return None

    def _token_columns(
        self, batch: SampleBatch, learned: Mapping[str, NDArray], rows: Sequence[int]
    ) -> dict[str, NDArray]:
        """Of the response tokens of these rows of the batch, one row's behind the other's."""
        inside = build_response_mask(
            batch.lengths, batch.prompt_lengths, batch.tokens.shape[1]
        ).numpy()[rows]
        drawn, ids = batch.mask.numpy()[rows][inside], batch.tokens[:, 1:].numpy()[rows][inside]
        known, place = np.unique(ids, return_inverse=True)
        for token in known.tolist():
            if token not in self._pieces:
                self._pieces[token] = self._tokenizer.decode_token(token)
        return {
            "token_id": ids,
            "text": np.array([self._pieces[token] for token in known.tolist()], dtype=object)[
                place
            ],
            "drawn": drawn,
            "engine_logprob": np.where(drawn, batch.engine_logprobs.numpy()[rows][inside], np.nan),
            "version": np.ma.MaskedArray(batch.weight_versions.numpy()[rows][inside], ~drawn),
            **{name: values[rows][inside] for name, values in learned.items()},
        }


@dataclass(frozen=True)
class _Row:
    """A sample, or a branch of one."""

    row: int
    """Of the batch."""
    place: int
    """Of the sample that it is of, among all."""
    prompt: Prompt
    sample: Sample
    whole: Sample
    """The sample that it is, or is a branch of."""
    branch: int
    """0: the sample itself"""


def _rows(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Iterator[_Row]:
    """The samples, each with its branches behind it; those have the batch's last rows."""
    further = itertools.count(len(samples))
    for place, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        for branch, own in enumerate((sample, *sample.branches)):
            yield _Row(next(further) if branch else place, place, prompt, own, sample, branch)


def _number_columns(batch: SampleBatch, rows: Sequence[int]) -> dict[str, NDArray]:
    """Of these rows of the batch: the prompt's number, lengths, and which weights drew its first
    and its last token."""
    drawn, prompt_tokens = batch.mask.numpy()[rows], batch.prompt_lengths.numpy()[rows]
    counts = drawn.sum(axis=1)
    ends, none = np.cumsum(counts), counts == 0
    # one more, for rows without any
    versions = np.append(batch.weight_versions.numpy()[rows][drawn], 0)
    return {
        "group": batch.groups.numpy()[rows],
        "prompt_tokens": prompt_tokens,
        "response_tokens": batch.lengths.numpy()[rows] - prompt_tokens,
        "drawn_tokens": counts,
        "version_first": np.ma.MaskedArray(versions[ends - counts], none),
        "version_last": np.ma.MaskedArray(versions[ends - 1], none),
    }


def _means(values: NDArray) -> NDArray:
    """float32 [N]: of those of each row [N, S] that are numbers; not a number where none is."""
    there = ~np.isnan(values)
    counts = there.sum(axis=1)
    means = np.sum(values, axis=1, where=there, dtype=np.float64) / np.maximum(counts, 1)
    return np.where(counts > 0, means, np.nan).astype(np.float32)
