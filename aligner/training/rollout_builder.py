"""Generates a step's samples from prompts, and requests their scores, values and teacher
log-probs."""

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
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
from aligner.engines.engine_protocol import GenerationCounts, SamplingOptions
from aligner.engines.replicas import EarlyStopCondition
from aligner.errors import AlignerError
from aligner.schema import RolloutConfig
from aligner.servers.remote_client import RefusedError, RemoteFuture
from aligner.training.episode_metrics import compute_episode_metrics
from aligner.training.partial_rollouts import PartialRollout, split_complete
from aligner.training.samplers import Sampler
from aligner.training.services import PendingRows, Services
from aligner.user_code import report_skipped_prompt

_log = logging.getLogger(__name__)

ScoreTransform = Callable[[Tensor, Sequence[Sample]], Tensor]
"""Function from the scores [B] of samples to the numbers [B] that dynamic sampling compares."""


def _identity(scores: Tensor, samples: Sequence[Sample]) -> Tensor:
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
    removed_lengths: tuple[int, ...] = ()
    """Number of response tokens of each sample that dynamic sampling removed, or that has no
    score."""
    replaced: tuple[PartialRollout, ...] = ()
    """Prompts that dynamic sampling removed, with their samples; if samples are generated ahead of
    training, on rank 0 only."""
    counts: GenerationCounts = field(default_factory=GenerationCounts)
    """Counts of this rank's engine."""
    environment_s: float | None = None
    """Mean time in seconds that an episode of this rank waited for its environment; None without
    episodes."""
    episode_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of all episodes that were generated for the step; see `compute_episode_metrics`."""

    @property
    def all_scores(self) -> PendingRows:
        """Pending scores of all samples that were generated for the step, including those that
        dynamic sampling removed."""
        return replace(self.scores, selected_rows=None)

    def find_scored_rows(self, min_scores: int = 1) -> Tensor:
        """Return the rows, int64 [N], of the samples with a score. Collective.

        A sample has no score if its prompt could not be scored, or if the reward function
        abstained.

        Args:
            min_scores: Minimum number of scored samples of a prompt; samples of other prompts are
                left out.
        """
        is_scored = self.scores.result().isfinite()
        has_enough_scores = self._count_scored_per_prompt(is_scored) >= min_scores
        return (is_scored & has_enough_scores).nonzero()[:, 0]

    def _count_scored_per_prompt(self, is_scored: Tensor) -> Tensor:
        """Return for each sample the number of scored samples of its prompt, int64 [B].

        Args:
            is_scored: Whether each sample has a score, bool [B].
        """
        # The rows of branches follow those of the samples, and have no score of their own.
        groups = self.batch.groups[: len(self.samples)]
        _, prompt_indices = groups.unique_consecutive(return_inverse=True)

        # Entry p is the count of prompt p. The tensor has B entries, of which the first are used.
        counts = torch.zeros_like(prompt_indices).index_add(0, prompt_indices, is_scored.long())
        return counts[prompt_indices]

    def drop_unscored(self) -> "RolloutBatch":
        """Return the rollout without the samples that have no score. Collective."""
        rows = self.find_scored_rows()
        if len(rows) == len(self.samples):
            return self
        # The metrics of generated lengths must include these samples, too.
        removed_lengths = _compute_removed_lengths(self.samples, rows)
        return replace(self.select(rows), removed_lengths=(*self.removed_lengths, *removed_lengths))

    def select(self, rows: Tensor) -> "RolloutBatch":
        """Return the rollout with only these samples (int64 [N]), in this order."""
        sample_indices = rows.tolist()
        # Scores belong to samples; values and teacher log-probs belong to rows of the batch.
        batch_rows = self.batch.get_rows_with_branches(rows)
        return replace(
            self,
            prompts=[self.prompts[row] for row in sample_indices],
            samples=[self.samples[row] for row in sample_indices],
            batch=self.batch.select(batch_rows),
            scores=self.scores.select(rows),
            values=self.values.select(batch_rows),
            teacher_logprobs=self.teacher_logprobs.select(batch_rows),
        )

    def drop_branches(self) -> "RolloutBatch":
        """Return the rollout without the branches of its samples."""
        # The first rows of the batch are those of the samples.
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


def _compute_removed_lengths(samples: Sequence[Sample], rows: Tensor) -> tuple[int, ...]:
    """Return the number of response tokens of each sample that is not in `rows`, int64 [N]."""
    selected = set(rows.tolist())
    return tuple(
        sample.generated_token_count for row, sample in enumerate(samples) if row not in selected
    )


@dataclass
class _GeneratedSamples:
    """Samples generated so far for a step, with the pending requests to the servers."""

    prompts: list[Prompt] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    scores: list[RemoteFuture[Tensor]] = field(default_factory=list)
    values: list[RemoteFuture[Tensor]] = field(default_factory=list)
    teacher_logprobs: list[RemoteFuture[Tensor]] = field(default_factory=list)


class RolloutBuilder:
    """Generates the samples of each step.

    All new tokens come from the weights that the engine serves at that time; the earlier tokens of
    a partial rollout may come from older weights.

    Generation is split into micro-batches. The scores, values and teacher log-probs of a
    micro-batch are requested before the next micro-batch is generated.

    With `spare_prompts`, more prompts are in flight than the step needs. The step takes the first
    prompts that are complete and carries the others over: a later step continues these partial
    rollouts from their tokens. A prompt is carried over at most `max_deferrals` times; then the
    step waits for it. Which prompts are complete depends on the engine's decode steps. It depends
    on timing only for agents, and with an external engine.
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
        transform_scores: ScoreTransform = _identity,
        truncate_token: int | None = None,
        source_count: int | None = None,
        is_rank0_only: bool = False,
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
            transform_scores: Function that computes the numbers to compare from the scores.
            truncate_token: Token id after which responses are truncated; None truncates none.
            source_count: `PendingRows.source_count` of the scores.
            is_rank0_only: Whether rank 0 uses the builder without the other ranks, to generate
                samples ahead of training. It then requests no values, because these must come from
                the newest critic.
        """
        self._prompts = prompts
        self._sampler = sampler
        self._services = services
        self._settings = settings
        self._options = options
        self._pad_token_id = pad_token_id
        self._dynamic_sampling_rounds = dynamic_sampling_rounds
        self._transform_scores = transform_scores
        self._truncate_token = truncate_token
        self.source_count = source_count
        self._is_rank0_only = is_rank0_only
        self.position = 0
        """Number of prompts of the stream that were sampled or passed over so far. A resume
        restores it."""
        self._pass_rates: PassRates | None = None
        """Pass rates of the prompts for the current step."""
        self._partial_rollouts: tuple[PartialRollout, ...] = ()
        self._skipped = 0
        """Number of prompts of the current step whose generation failed."""

    @property
    def partial_rollouts(self) -> tuple[PartialRollout, ...]:
        """Prompts that the last step carried over, in the order of their admission. A resume
        restores them.

        Raises:
            AlignerError: On assignment, if a prompt has another number of samples than
                `rollout.samples_per_prompt`.
        """
        return self._partial_rollouts

    @partial_rollouts.setter
    def partial_rollouts(self, partial_rollouts: Sequence[PartialRollout]) -> None:
        """Set the partial rollouts of a checkpoint, which are resumed first.

        Raises:
            AlignerError: They have another number of samples per prompt than the run.
        """
        samples_per_prompt = self._settings.samples_per_prompt
        sample_counts = {len(rollout.samples) for rollout in partial_rollouts}
        # The samples of all prompts in flight are one flat list in groups of this size.
        if other_counts := (sample_counts - {samples_per_prompt}):
            raise AlignerError(
                f"rollout.samples_per_prompt={samples_per_prompt}: the partial rollouts have"
                f" {max(other_counts)} samples per prompt; resume with"
                f" rollout.samples_per_prompt={max(other_counts)}"
            )
        self._partial_rollouts = tuple(partial_rollouts)

    def take(self, pass_rates: PassRates | None = None) -> RolloutBatch:
        """Generate the samples of the next training step, equal on every rank.

        Collective, unless `is_rank0_only`.

        Args:
            pass_rates: Pass rates, by which the curriculum selects prompts; None selects every
                prompt.

        Raises:
            AlignerError: Dynamic sampling or the stream did not provide enough prompts.
        """
        generated = _GeneratedSamples()
        self._skipped = 0
        self._pass_rates = pass_rates
        self._generate_and_request(generated, self._settings.prompts_per_step)

        if self._dynamic_sampling_rounds:
            rows = self._select_informative(generated)
        else:
            rows = torch.arange(len(generated.samples))

        # Deferrals count steps, so they increase here and not after each micro-batch.
        self._partial_rollouts = tuple(
            replace(rollout, deferrals=rollout.deferrals + 1) for rollout in self._partial_rollouts
        )
        # The engine may free its memory now, because a weight sync comes next.
        counts = self._sampler.end_generation()

        prompts = [generated.prompts[row] for row in rows.tolist()]
        samples = [generated.samples[row] for row in rows.tolist()]
        return RolloutBatch(
            prompts,
            samples,
            collate_episodes(samples, self._pad_token_id),
            self._get_scores(generated, rows),
            self._request_branch_values(generated, rows, samples),
            self._request_branch_teacher_logprobs(generated, rows, samples),
            deferred=len(self._partial_rollouts),
            skipped=self._skipped,
            removed_lengths=_compute_removed_lengths(generated.samples, rows),
            replaced=self._collect_replaced(generated, rows),
            counts=counts,
            environment_s=self._sampler.take_environment_wait_s(),
            episode_metrics=compute_episode_metrics(
                generated.samples, self._settings.samples_per_prompt
            ),
        )

    def _collect_replaced(
        self, generated: _GeneratedSamples, rows: Tensor
    ) -> tuple[PartialRollout, ...]:
        """Return the prompts that have no sample in `rows`, int64 [B], with their samples.

        The rows select whole prompts.
        """
        samples_per_prompt = self._settings.samples_per_prompt
        selected = set(rows.tolist())
        replaced = []
        for row in range(0, len(generated.samples), samples_per_prompt):
            if row not in selected:
                prompt_samples = tuple(generated.samples[row : row + samples_per_prompt])
                replaced.append(PartialRollout(generated.prompts[row], prompt_samples))
        return tuple(replaced)

    def _get_scores(self, generated: _GeneratedSamples, rows: Tensor | None = None) -> PendingRows:
        """Return the pending scores, including the rewards of the environments, of `rows`, int64
        [B], or of all samples."""
        environment_rewards = compute_environment_scores(
            generated.samples, self._settings.samples_per_prompt
        )
        return PendingRows(tuple(generated.scores), rows, environment_rewards, self.source_count)

    def _request_branch_values(
        self, generated: _GeneratedSamples, rows: Tensor, samples: Sequence[Sample]
    ) -> PendingRows:
        """Request the values of the samples' branches, and return them with the pending values of
        `rows`.

        Args:
            generated: Samples generated so far, whose values are already requested.
            rows: Rows of the selected samples, int64 [B].
            samples: The selected samples.
        """
        # If samples are generated ahead of training, the critic is updated before they are trained
        # on. The pipeline therefore requests the values when training takes the batch.
        if self._is_rank0_only:
            return PendingRows(())
        return self._request_for_branches(
            generated, rows, samples, generated.values, self._services.request_values
        )

    def _request_branch_teacher_logprobs(
        self, generated: _GeneratedSamples, rows: Tensor, samples: Sequence[Sample]
    ) -> PendingRows:
        """Request the teacher log-probs of the samples' branches, and return them with the pending
        teacher log-probs of `rows`.

        A builder with `is_rank0_only` requests them too, because the teacher does not change. For
        the arguments see `_request_branch_values`.
        """
        # A branch has the metadata of its sample's prompt.
        branch_metadata = []
        for row, sample in zip(rows.tolist(), samples, strict=True):
            branch_metadata += [generated.prompts[row].metadata] * len(sample.branches)
        request = functools.partial(
            self._services.request_teacher_logprobs, metadata=branch_metadata
        )
        return self._request_for_branches(
            generated, rows, samples, generated.teacher_logprobs, request
        )

    def _request_for_branches(
        self,
        generated: _GeneratedSamples,
        rows: Tensor,
        samples: Sequence[Sample],
        pending: Sequence[RemoteFuture[Tensor]],
        request: Callable[[SampleBatch], tuple[RemoteFuture[Tensor], ...]],
    ) -> PendingRows:
        """Send `request` for the branches of the samples, and return its answers with the pending
        answers for `rows`.

        Args:
            generated: Samples generated so far.
            rows: Rows of the selected samples, int64 [B].
            samples: The selected samples.
            pending: Pending answers for all generated samples.
            request: Function that requests the answers for a batch of branches.
        """
        branches = [branch for sample in samples for branch in sample.branches]
        if not branches:
            return PendingRows(tuple(pending), rows)
        branch_answers = request(collate(branches, self._pad_token_id))
        # The answers are the rows of all generated samples, followed by the rows of the branches.
        branch_rows = len(generated.samples) + torch.arange(len(branches))
        answer_rows = torch.cat((rows, branch_rows))
        return PendingRows((*pending, *branch_answers), answer_rows)

    def _generate_and_request(self, generated: _GeneratedSamples, count: int) -> None:
        """Generate the samples of `count` prompts, rounded up to whole micro-batches, and request
        their scores, values and teacher log-probs.

        The results are appended to `generated`.
        """
        settings = self._settings
        micro_batch_size = settings.prompts_per_micro_batch
        for _ in range(0, count, micro_batch_size):
            complete = self._complete_prompts(micro_batch_size)
            prompts = [rollout.prompt for rollout in complete for _ in rollout.samples]
            samples = self._truncate([sample for rollout in complete for sample in rollout.samples])
            batch = collate(samples, self._pad_token_id)
            metadata = [prompt.metadata for prompt in prompts]
            # If prompts may be skipped, a failed request is repeated prompt by prompt, so that only
            # the prompts that cause the failure have no score.
            retry_batch_rows = settings.samples_per_prompt if settings.skippable_prompts else None

            generated.prompts += prompts
            generated.samples += samples
            generated.teacher_logprobs += self._services.request_teacher_logprobs(batch, metadata)
            if self._is_rank0_only:
                generated.scores += self._services.request_scores(batch, metadata, retry_batch_rows)
                continue
            scores, values = self._services.request_scores_and_values(
                batch, metadata, retry_batch_rows
            )
            generated.scores += scores
            generated.values += values

    def _complete_prompts(self, count: int) -> list[PartialRollout]:
        """Return the next `count` complete prompts; others may remain in flight.

        If the generator refuses a request, each prompt is requested separately. Prompts that are
        refused again are skipped and replaced by others.
        """
        was_refused = False
        # Only a builder with `is_rank0_only` can skip prompts. If all ranks share the builder, a
        # refusal reaches them as a plain AlignerError, and ends the run.
        max_skipped = self._settings.skippable_prompts if self._is_rank0_only else 0
        while True:
            self._admit(count + self._settings.spare_prompts)
            try:
                partial_rollouts = self._continue_generation(self._partial_rollouts, count)
                break
            except RefusedError:
                if not max_skipped:
                    raise
                count_before = len(self._partial_rollouts)
                self._skip_refused()
                # Give up if too many prompts are skipped, or if the request is refused again
                # although no single prompt is.
                if self._skipped > max_skipped or (
                    was_refused and len(self._partial_rollouts) == count_before
                ):
                    raise
                was_refused = True

        complete, self._partial_rollouts = split_complete(
            partial_rollouts, count, self._settings.max_deferrals
        )
        return complete

    def _admit(self, count: int) -> None:
        """Admit prompts until at least `count` are in flight."""
        new_count = max(0, count - len(self._partial_rollouts))
        new_prompts, self.position = self._prompts.select(
            self.position, new_count, self._pass_rates
        )
        samples_per_prompt = self._settings.samples_per_prompt
        self._partial_rollouts += tuple(
            PartialRollout(prompt, tuple(create_empty_samples([prompt], samples_per_prompt)))
            for prompt in new_prompts
        )

    def _continue_generation(
        self, partial_rollouts: Sequence[PartialRollout], count: int
    ) -> list[PartialRollout]:
        """Continue generation until `count` prompts, and every prompt that must not be carried over
        again, are complete.

        Returns:
            All of the prompts, complete or partial, in the same order.
        """
        samples_per_prompt = self._settings.samples_per_prompt
        early_stop = None

        # With spare prompts, generation can stop before all prompts are complete.
        if count < len(partial_rollouts):
            limit = self._settings.max_deferrals
            required_prompts = tuple(
                index
                for index, rollout in enumerate(partial_rollouts)
                if rollout.deferrals >= limit
            )
            early_stop = EarlyStopCondition(count, required_prompts)

        samples = [sample for rollout in partial_rollouts for sample in rollout.samples]
        generated_samples = iter(
            self._sampler.sample(samples, samples_per_prompt, self._options, early_stop)
        )
        # The sampler keeps the order, so the next `samples_per_prompt` samples belong to the next
        # prompt.
        return [
            replace(rollout, samples=tuple(itertools.islice(generated_samples, samples_per_prompt)))
            for rollout in partial_rollouts
        ]

    def _skip_refused(self) -> None:
        """Request each prompt in flight separately, and remove those that the generator refuses."""
        accepted = []
        for rollout in self._partial_rollouts:
            # These samples are discarded. The next request generates the same ones, because the
            # random stream of a sample does not depend on the other samples of a request.
            try:
                self._continue_generation([rollout], 1)
                accepted.append(rollout)
            except RefusedError as error:
                _log.warning(
                    "prompt %s is skipped, because generation failed: %s",
                    rollout.prompt.id,
                    error,
                )
                report_skipped_prompt(error.message)
        self._skipped += len(self._partial_rollouts) - len(accepted)
        self._partial_rollouts = tuple(accepted)

    def _select_informative(self, generated: _GeneratedSamples) -> Tensor:
        """Return the rows, int64 [N], of the samples of `rollout.prompts_per_step` prompts whose
        scores are not all equal.

        If there are too few such prompts, generate more prompts, in up to
        `algorithm.dynamic_sampling_rounds` rounds.

        Raises:
            AlignerError: There are too few such prompts after all rounds.
        """
        prompts_per_step = self._settings.prompts_per_step
        samples_per_prompt = self._settings.samples_per_prompt
        for round_index in range(self._dynamic_sampling_rounds + 1):
            pending = self._get_scores(generated)
            if self._is_rank0_only:
                # [B] or [B, 1+P] with the scores of P sources; column 0 is the total score.
                scores = pending.result_on_rank0().view(len(generated.samples), -1)[:, 0]
            else:
                scores = pending.result()

            # Group-relative advantages of a prompt with equal scores are 0, so that its samples
            # would contribute no gradient (DAPO, section 3.2).
            compared_scores = self._transform_scores(scores, generated.samples)
            rows = select_informative(compared_scores, samples_per_prompt)
            informative_count = len(rows) // samples_per_prompt
            if informative_count >= prompts_per_step:
                return rows[: prompts_per_step * samples_per_prompt]
            if round_index < self._dynamic_sampling_rounds:
                self._generate_and_request(generated, prompts_per_step - informative_count)
        raise AlignerError(
            f"algorithm.dynamic_sampling_rounds={self._dynamic_sampling_rounds}: only"
            f" {informative_count} of"
            f" {len(generated.samples) // samples_per_prompt} prompts have samples with different"
            f" scores, but a step needs {prompts_per_step} such prompts. Allow more rounds,"
            f" generate more samples per prompt (rollout.samples_per_prompt={samples_per_prompt}),"
            " or use prompts that the policy solves sometimes but not always"
        )

    def drop_journal_before(self, first_prompt: int) -> None:
        """Drop the journal of the episodes of all prompts before position `first_prompt` of the
        stream."""
        self._sampler.drop_journal_before(first_prompt)

    def close(self) -> None:
        """Close the engine. Collective."""
        self._sampler.close()

    def generate(
        self, prompts: Sequence[Prompt], samples_per_prompt: int, options: SamplingOptions
    ) -> list[Sample]:
        """Generate samples of any prompts with the current weights, equal on every rank.

        Collective, unless `is_rank0_only`.

        Returns:
            The samples, consecutive for each prompt.
        """
        empty_samples = create_empty_samples(prompts, samples_per_prompt)
        return self._truncate(self._sampler.sample(empty_samples, samples_per_prompt, options))

    def _truncate(self, samples: list[Sample]) -> list[Sample]:
        """Truncate each complete sample after its first truncation token, if it has one."""
        if self._truncate_token is None:
            return samples
        return [
            truncate_response(sample, self._truncate_token, self._settings.truncate_after)
            for sample in samples
        ]


def compute_environment_scores(samples: Sequence[Sample], samples_per_prompt: int) -> Tensor | None:
    """Return the sum of each sample's environment rewards, branches included, float32 [B].

    If an episode was lost, the rewards of all samples of its prompt are NaN. Returns None if no
    sample has an environment reward.
    """
    rewards = [sample.environment_reward for sample in samples]
    if all(reward is None for reward in rewards):
        return None
    sums = torch.stack([torch.zeros(()) if reward is None else reward for reward in rewards])
    # The samples of a prompt are compared with each other, so without the reward of one of them the
    # rewards of the others are of no use.
    # [B] → [prompts, samples per prompt]
    groups = sums.view(-1, samples_per_prompt)
    return torch.where(groups.isnan().any(1, keepdim=True), torch.nan, groups).flatten()


def select_informative(scores: Tensor, samples_per_prompt: int) -> Tensor:
    """Return the rows, int64 [N], of the prompts whose scores [B] are not all equal.

    Samples without a score are not compared.
    """
    high, low = score_bounds(scores, samples_per_prompt)
    rows = torch.arange(len(scores)).view(-1, samples_per_prompt)
    return rows[high.amax(1) > low.amin(1)].flatten()


def truncate_response(sample: Sample, token_id: int, first_index: int) -> Sample:
    """Return the sample up to the first `token_id` among its response tokens from `first_index` on.

    A sample without this token is returned whole, with `finish_reason="length"`. Source: Huang et
    al. 2023, "The N Implementation Details of RLHF with PPO", detail 8.
    """
    candidates = sample.tokens[sample.prompt_length + first_index :]
    matches = (candidates == token_id).nonzero()
    if not len(matches):
        return replace(sample, finish_reason="length")

    # Number of response tokens, including the truncation token.
    length = first_index + int(matches[0]) + 1
    return sample.truncate(length, "stop")
