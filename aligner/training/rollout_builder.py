"""Generates a step's samples from prompts, and requests their scores, values and teacher
log-probs."""

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from aligner.algorithms.selections import score_bounds
from aligner.data.pass_rates import PassRates
from aligner.data.prompts import PromptStream
from aligner.data.types import (
    Prompt,
    Sample,
    SampleBatch,
    collate,
    collate_episodes,
    create_empty_samples,
)
from aligner.engines.engine_protocol import SamplingOptions
from aligner.engines.replicas import Enough
from aligner.errors import AlignerError
from aligner.schema import RolloutConfig
from aligner.servers.remote_client import RefusedError, RemoteFuture
from aligner.training.partial_rollouts import Straggler, divided
from aligner.training.samplers import Sampler
from aligner.training.services import PendingRows, Services

_log = logging.getLogger(__name__)

Compared = Callable[[Tensor, Sequence[Sample]], Tensor]
"""Function from the scores [B] of samples to the numbers [B] that dynamic sampling compares."""


def _as_they_are(scores: Tensor, samples: Sequence[Sample]) -> Tensor:
    return scores


@dataclass(frozen=True)
class RolloutBatch:
    """Samples of a step, consecutive for each prompt.

    Scores, values and teacher log-probs are pending server requests, whose answers arrive during
    other work.
    """

    prompts: list[Prompt]
    """Prompt of each sample."""
    samples: list[Sample]
    batch: SampleBatch
    """The samples as rows, followed by the rows of their branches."""
    scores: PendingRows
    """Pending scores [B] of the samples."""
    values: PendingRows
    """Pending values [B, S] of the batch's rows; empty without a critic."""
    teacher_logprobs: PendingRows = field(default_factory=lambda: PendingRows(()))
    """Pending teacher log-probs of the batch's rows: [B, S-1], or [B, S-1, 2+2k] with the teacher's
    top-k log-probs; empty without a teacher."""
    deferred: int = 0
    """Number of prompts in flight that are carried over, to be trained on in a later step."""
    skipped: int = 0
    """Number of prompts whose generation failed."""
    left_out: tuple[int, ...] = ()
    """Number of response tokens of each sample that dynamic sampling removed, or that has no
    score."""
    replaced: tuple[Straggler, ...] = ()
    """Prompts that dynamic sampling removed, with their samples; if samples are generated ahead of
    training, on rank 0 only."""
    guesses: tuple[int, int] = (0, 0)
    """Number of draft tokens of this rank's engine, and number of those that were accepted."""
    environment_s: float | None = None
    """Time in seconds, per episode of this rank, spent waiting for the environment; None without
    episodes."""

    @property
    def all_scores(self) -> PendingRows:
        """Pending scores of all samples that were generated for the step, including those that
        dynamic sampling removed."""
        return replace(self.scores, chosen=None)

    def scored_rows(self, least: int = 1) -> Tensor:
        """Return the rows, int64 [N], of the samples with a score. Collective.

        A sample has no score if its prompt could not be scored, or if the reward function
        abstained.

        Args:
            least: Minimum number of scored samples of a prompt; samples of other prompts are left
                out.
        """
        scored = self.scores.result().isfinite()
        return (scored & (self._scored_of_prompts(scored) >= least)).nonzero()[:, 0]

    def _scored_of_prompts(self, scored: Tensor) -> Tensor:
        """Return for each sample the number of scored samples of its prompt, int64 [B].

        Args:
            scored: Whether each sample has a score, bool [B].
        """
        groups = self.batch.groups[: len(self.samples)]
        _, prompt_indices = groups.unique_consecutive(return_inverse=True)
        return torch.zeros_like(prompt_indices).index_add(0, prompt_indices, scored.long())[
            prompt_indices
        ]

    def scored(self) -> "RolloutBatch":
        """Return the rollout without the samples that have no score. Collective."""
        rows = self.scored_rows()
        if len(rows) == len(self.samples):
            return self
        return replace(
            self.select(rows), left_out=(*self.left_out, *_lengths_without(self.samples, rows))
        )

    def select(self, rows: Tensor) -> "RolloutBatch":
        """Return the rollout with only these samples (int64 [N]), in this order."""
        sample_indices = rows.tolist()
        batch_rows = self.batch.with_branches(rows)
        return replace(
            self,
            prompts=[self.prompts[row] for row in sample_indices],
            samples=[self.samples[row] for row in sample_indices],
            batch=self.batch.select(batch_rows),
            scores=self.scores.select(rows),
            values=self.values.select(batch_rows),
            teacher_logprobs=self.teacher_logprobs.select(batch_rows),
        )

    def without_branches(self) -> "RolloutBatch":
        """Return the rollout without the branches of its samples."""
        rows = torch.arange(len(self.samples))
        samples = [replace(sample, branches=()) for sample in self.samples]
        values = self.values.select(rows)
        teacher_logprobs = self.teacher_logprobs.select(rows)
        return replace(
            self,
            samples=samples,
            batch=self.batch.select(rows),
            values=values,
            teacher_logprobs=teacher_logprobs,
        )


def _lengths_without(samples: Sequence[Sample], rows: Tensor) -> tuple[int, ...]:
    """Return the number of response tokens of each sample that is not in `rows`, int64 [N]."""
    selected = set(rows.tolist())
    return tuple(
        sample.generated_token_count for row, sample in enumerate(samples) if row not in selected
    )


@dataclass
class _Generated:
    """Samples generated so far for a step, with the pending requests to the servers."""

    prompts: list[Prompt] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    scores: list[RemoteFuture[Tensor]] = field(default_factory=list)
    values: list[RemoteFuture[Tensor]] = field(default_factory=list)
    teacher_logprobs: list[RemoteFuture[Tensor]] = field(default_factory=list)


class RolloutBuilder:
    """Generates the samples of each step synchronously: all samples come from the newest weights.

    Generation is split into micro-batches. The scores, values and teacher log-probs of a
    micro-batch are requested before the next micro-batch is generated.

    With `spare_prompts`, more prompts are in flight than the step needs. The step takes the first
    prompts that are complete and carries the others over: a later step continues these partial
    rollouts from their tokens. A prompt is carried over at most `max_deferrals` times; then the
    step waits for it. Which prompts are complete depends on the engine's decode steps, never on
    timing.
    """

    def __init__(
        self,
        prompts: PromptStream,
        sampler: Sampler,
        services: Services,
        settings: RolloutConfig,
        options: SamplingOptions,
        pad_token_id: int,
        *,
        dynamic_sampling_rounds: int = 0,
        compared: Compared = _as_they_are,
        truncate_token: int | None = None,
        score_parts: int | None = None,
        is_alone: bool = False,
    ) -> None:
        """Create the builder.

        Args:
            prompts: Stream of prompts.
            sampler: Access to the engine.
            services: Access to the reward, critic and teacher servers.
            settings: Section `rollout` of the configuration.
            options: Sampling options of training.
            pad_token_id: Token id that pads the rows of a batch.
            dynamic_sampling_rounds: Maximum number of rounds in which prompts whose samples all
                have the same score are replaced by other prompts (DAPO: Yu et al. 2025, section
                3.2); 0 replaces none.
            compared: Function that computes the numbers to compare from the scores.
            truncate_token: Token id after which responses are truncated; None truncates none.
            score_parts: `PendingRows.sources` of the scores.
            is_alone: Whether rank 0 uses the builder without the other ranks. It then requests no
                values, because these must come from the newest critic.
        """
        self._prompts = prompts
        self._sampler = sampler
        self._services = services
        self._settings = settings
        self._options = options
        self._pad_token_id = pad_token_id
        self._rounds = dynamic_sampling_rounds
        self._compared = compared
        self._truncate_token = truncate_token
        self.score_parts = score_parts
        self._is_alone = is_alone
        self.position = 0
        """Number of prompts of the stream that were sampled or passed over so far; set when a run
        resumes."""
        self._rates: PassRates | None = None
        """Pass rates of the prompts for the current step."""
        self._under_way: tuple[Straggler, ...] = ()
        self._skipped = 0
        """Number of prompts of the current step whose generation failed."""

    @property
    def under_way(self) -> tuple[Straggler, ...]:
        """Prompts that the last step carried over, in the order of their admission; set when a run
        resumes.

        Raises:
            AlignerError: On assignment, if a prompt has another number of samples than
                `rollout.samples_per_prompt`.
        """
        return self._under_way

    @under_way.setter
    def under_way(self, stragglers: Sequence[Straggler]) -> None:
        samples_per_prompt = self._settings.samples_per_prompt
        if other_counts := (
            {len(straggler.samples) for straggler in stragglers} - {samples_per_prompt}
        ):
            raise AlignerError(
                f"rollout.samples_per_prompt={samples_per_prompt}: the partial rollouts have"
                f" {max(other_counts)} samples per prompt; resume with"
                f" rollout.samples_per_prompt={max(other_counts)}"
            )
        self._under_way = tuple(stragglers)

    def take(self, rates: PassRates | None = None) -> RolloutBatch:
        """Generate the samples of the next training step, equal on every rank. Collective.

        Args:
            rates: Pass rates, by which the curriculum selects prompts; None selects every prompt.

        Raises:
            AlignerError: Dynamic sampling or the stream did not provide enough prompts.
        """
        generated = _Generated()
        self._skipped = 0
        self._rates = rates
        self._generate_and_ask(generated, self._settings.prompts_per_step)

        rows = (
            self._informative(generated) if self._rounds else torch.arange(len(generated.samples))
        )
        self._under_way = tuple(
            replace(straggler, deferrals=straggler.deferrals + 1) for straggler in self._under_way
        )
        guesses = (
            self._sampler.rest()
        )  # the engine may free its memory, because a weight sync comes next

        samples = [generated.samples[row] for row in rows.tolist()]
        return RolloutBatch(
            [generated.prompts[row] for row in rows.tolist()],
            samples,
            collate_episodes(samples, self._pad_token_id),
            self._scores(generated, rows),
            self._values(generated, rows, samples),
            self._teacher_logprobs(generated, rows, samples),
            deferred=len(self._under_way),
            skipped=self._skipped,
            left_out=_lengths_without(generated.samples, rows),
            replaced=self._others(generated, rows),
            guesses=guesses,
            environment_s=self._sampler.take_waits(),
        )

    def _others(self, generated: _Generated, rows: Tensor) -> tuple[Straggler, ...]:
        """Return the prompts that have no sample in `rows`, int64 [B], with their samples.

        The rows select whole prompts.
        """
        samples_per_prompt = self._settings.samples_per_prompt
        selected = set(rows.tolist())
        first_rows = [
            row
            for row in range(0, len(generated.samples), samples_per_prompt)
            if row not in selected
        ]
        return tuple(
            Straggler(
                generated.prompts[row], tuple(generated.samples[row : row + samples_per_prompt])
            )
            for row in first_rows
        )

    def _scores(self, generated: _Generated, rows: Tensor | None = None) -> PendingRows:
        """Return the pending scores, including the rewards of the environments, of `rows`, int64
        [B], or of all samples."""
        environment_rewards = environment_scores(
            generated.samples, self._settings.samples_per_prompt
        )
        return PendingRows(tuple(generated.scores), rows, environment_rewards, self.score_parts)

    def _values(
        self, generated: _Generated, rows: Tensor, samples: Sequence[Sample]
    ) -> PendingRows:
        """Return the pending values of `rows`, int64 [B], and of the branches of their samples.

        The values of branches are requested here.
        """
        if self._is_alone:
            return PendingRows(())
        return self._with_branches(
            generated, rows, samples, generated.values, self._services.ask_values
        )

    def _teacher_logprobs(
        self, generated: _Generated, rows: Tensor, samples: Sequence[Sample]
    ) -> PendingRows:
        """Return the pending teacher log-probs of `rows`, int64 [B], and of the branches of their
        samples.

        Unlike values, they are also requested by a builder that rank 0 uses alone, because the
        teacher does not change.
        """
        samples_by_row = zip(rows.tolist(), samples, strict=True)
        branch_metadata = [
            generated.prompts[row].metadata
            for row, sample in samples_by_row
            for _ in sample.branches
        ]
        ask = functools.partial(self._services.ask_teacher, metadata=branch_metadata)
        return self._with_branches(generated, rows, samples, generated.teacher_logprobs, ask)

    def _with_branches(
        self,
        generated: _Generated,
        rows: Tensor,
        samples: Sequence[Sample],
        asked: Sequence[RemoteFuture[Tensor]],
        ask: Callable[[SampleBatch], tuple[RemoteFuture[Tensor], ...]],
    ) -> PendingRows:
        """Request the answers for the branches, and return them with the pending answers for
        `rows`.

        Args:
            generated: Samples generated so far.
            rows: Rows of the selected samples, int64 [B].
            samples: The selected samples.
            asked: Pending answers for all generated samples.
            ask: Function that requests the answers for a batch of branches.
        """
        branches = [branch for sample in samples for branch in sample.branches]
        if not branches:
            return PendingRows(tuple(asked), rows)
        branch_answers = ask(collate(branches, self._pad_token_id))
        answer_rows = torch.cat((rows, len(generated.samples) + torch.arange(len(branches))))
        return PendingRows((*asked, *branch_answers), answer_rows)

    def _generate_and_ask(self, generated: _Generated, count: int) -> None:
        """Generate at least `count` prompts in whole micro-batches, and request their scores and
        values."""
        settings = self._settings
        size = settings.prompts_per_micro_batch
        for _ in range(0, count, size):
            complete = self._draw(size)
            prompts = [straggler.prompt for straggler in complete for _ in straggler.samples]
            samples = self._cut([sample for straggler in complete for sample in straggler.samples])
            batch = collate(samples, self._pad_token_id)
            metadata = [prompt.metadata for prompt in prompts]
            retry_batch_rows = settings.samples_per_prompt if settings.skippable_prompts else None

            generated.prompts += prompts
            generated.samples += samples
            generated.teacher_logprobs += self._services.ask_teacher(batch, metadata)
            if self._is_alone:
                generated.scores += self._services.ask_scores(batch, metadata, retry_batch_rows)
                continue
            scores, values = self._services.ask(batch, metadata, retry_batch_rows)
            generated.scores += scores
            generated.values += values

    def _draw(self, count: int) -> list[Straggler]:
        """Return the next `count` complete prompts; others may remain in flight.

        If the generator refuses a request, each prompt is requested separately. Prompts that are
        refused again are skipped and replaced by others.
        """
        was_refused = False
        may_skip = self._settings.skippable_prompts if self._is_alone else 0
        while True:
            self._admit(count + self._settings.spare_prompts)
            try:
                stragglers = self._taken_further(self._under_way, count)
                break
            except RefusedError:
                if not may_skip:
                    raise
                count_before = len(self._under_way)
                self._leave_out()
                # Give up if too many prompts are skipped, or if the request is refused again
                # although no single prompt is.
                if self._skipped > may_skip or (
                    was_refused and len(self._under_way) == count_before
                ):
                    raise
                was_refused = True
        complete, self._under_way = divided(stragglers, count, self._settings.max_deferrals)
        return complete

    def _admit(self, count: int) -> None:
        """Admit prompts until at least `count` are in flight."""
        new_prompts, self.position = self._prompts.select(
            self.position, max(0, count - len(self._under_way)), self._rates
        )
        samples_per_prompt = self._settings.samples_per_prompt
        self._under_way += tuple(
            Straggler(prompt, tuple(create_empty_samples([prompt], samples_per_prompt)))
            for prompt in new_prompts
        )

    def _taken_further(self, stragglers: Sequence[Straggler], count: int) -> list[Straggler]:
        """Continue generation until `count` prompts are complete, and all that may not be carried
        over again."""
        samples_per_prompt = self._settings.samples_per_prompt
        enough = None

        # With spare prompts, generation stops as soon as `count` prompts and all prompts that may
        # not be carried over again are complete.
        if count < len(stragglers):
            limit = self._settings.max_deferrals
            enough = Enough(
                count,
                tuple(
                    index
                    for index, straggler in enumerate(stragglers)
                    if straggler.deferrals >= limit
                ),
            )

        samples = [sample for straggler in stragglers for sample in straggler.samples]
        generated = iter(self._sampler.sample(samples, samples_per_prompt, self._options, enough))
        return [
            replace(straggler, samples=tuple(itertools.islice(generated, samples_per_prompt)))
            for straggler in stragglers
        ]

    def _leave_out(self) -> None:
        """Remove the prompts in flight that the generator refuses when requested separately."""
        accepted = []
        for straggler in self._under_way:
            try:
                self._taken_further([straggler], 1)
                accepted.append(straggler)
            except RefusedError as error:
                _log.warning(
                    "prompt %s is skipped, because generation failed: %s",
                    straggler.prompt.id,
                    error,
                )
        self._skipped += len(self._under_way) - len(accepted)
        self._under_way = tuple(accepted)

    def _informative(self, generated: _Generated) -> Tensor:
        """Return rows, int64 [N], of prompts whose scores are not all equal, after generating more
        if needed.

        Raises:
            AlignerError: There are too few such prompts after all rounds.
        """
        prompts_per_step = self._settings.prompts_per_step
        samples_per_prompt = self._settings.samples_per_prompt
        for round_index in range(self._rounds + 1):
            pending = self._scores(generated)
            scores = (
                pending.local().view(len(generated.samples), -1)[:, 0]
                if self._is_alone
                else pending.result()
            )
            rows = informative(self._compared(scores, generated.samples), samples_per_prompt)
            informative_count = len(rows) // samples_per_prompt
            if informative_count >= prompts_per_step:
                return rows[: prompts_per_step * samples_per_prompt]
            if round_index < self._rounds:
                self._generate_and_ask(generated, prompts_per_step - informative_count)
        raise AlignerError(
            f"algorithm.dynamic_sampling_rounds={self._rounds}: only {informative_count} of"
            f" {len(generated.samples) // samples_per_prompt} prompts have samples with different"
            f" scores, but a step needs {prompts_per_step} such prompts. Allow more rounds,"
            f" generate more samples per prompt (rollout.samples_per_prompt={samples_per_prompt}),"
            " or use prompts that the policy solves sometimes but not always"
        )

    def forget(self, first: int) -> None:
        """Declare that no episode of a prompt before position `first` of the stream will start
        again."""
        self._sampler.forget(first)

    def close(self) -> None:
        """Close the engine. Collective."""
        self._sampler.close()

    def generate(
        self, prompts: Sequence[Prompt], samples_per_prompt: int, options: SamplingOptions
    ) -> list[Sample]:
        """Generate samples of any prompts with the current weights, equal on every rank.
        Collective.

        Returns:
            The samples, consecutive for each prompt.
        """
        return self._cut(
            self._sampler.sample(
                create_empty_samples(prompts, samples_per_prompt), samples_per_prompt, options
            )
        )

    def _cut(self, samples: list[Sample]) -> list[Sample]:
        """Return complete samples, truncated after the first truncation token."""
        if self._truncate_token is None:
            return samples
        return [
            truncated(sample, self._truncate_token, self._settings.truncate_after)
            for sample in samples
        ]


def environment_scores(samples: Sequence[Sample], samples_per_prompt: int) -> Tensor | None:
    """Return the rewards of the samples' environments, branches included, float32 [B]; None without
    any.

    If an episode was lost, the rewards of all samples of its prompt are NaN.
    """
    rewards = [sample.environment_reward for sample in samples]
    if all(reward is None for reward in rewards):
        return None
    sums = torch.stack([torch.zeros(()) if reward is None else reward for reward in rewards])
    # The samples of a prompt are compared with each other, so all of them are lost with one.
    groups = sums.view(-1, samples_per_prompt)
    return torch.where(groups.isnan().any(1, keepdim=True), torch.nan, groups).flatten()


def informative(scores: Tensor, samples_per_prompt: int) -> Tensor:
    """Return the rows, int64 [N], of the prompts whose scores [B] are not all equal.

    Samples without a score are not compared.
    """
    high, low = score_bounds(scores, samples_per_prompt)
    rows = torch.arange(len(scores)).view(-1, samples_per_prompt)
    return rows[high.amax(1) > low.amin(1)].flatten()


def truncated(sample: Sample, token_id: int, after: int) -> Sample:
    """Return the sample up to the first `token_id` among its response tokens from index `after` on.

    A sample without this token is returned whole, with `finish_reason="length"`. Source: Huang et
    al. 2023, "The N Implementation Details of RLHF with PPO", detail 8.
    """
    matches = (sample.tokens[sample.prompt_length + after :] == token_id).nonzero()
    if not len(matches):
        return replace(sample, finish_reason="length")
    length = after + int(matches[0]) + 1
    return sample.truncate(length, "stop")
