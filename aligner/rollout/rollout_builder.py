"""From prompts to samples, with scores, values and a teacher's log-probs on their way."""

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
from aligner.rollout.samplers import Sampler
from aligner.rollout.services import PendingRows, Services
from aligner.rollout.stragglers import Straggler, divided
from aligner.schema import RolloutConfig
from aligner.servers.remote_client import RefusedError, RemoteFuture

_log = logging.getLogger(__name__)

Compared = Callable[[Tensor, Sequence[Sample]], Tensor]
"""From the scores [B] of samples to the numbers [B] by which dynamic sampling tells them apart."""


def _as_they_are(scores: Tensor, samples: Sequence[Sample]) -> Tensor:
    return scores


@dataclass(frozen=True)
class RolloutBatch:
    """A step's samples, each prompt's in a row; what the servers were asked about them arrives
    while other work goes on."""

    prompts: list[Prompt]
    """One a sample."""
    samples: list[Sample]
    batch: SampleBatch
    """Its rows are the samples, and behind them their branches."""
    scores: PendingRows
    """[B], of the samples."""
    values: PendingRows
    """[B, S] of the batch's rows; of none without a critic."""
    teacher_logprobs: PendingRows = field(default_factory=lambda: PendingRows(()))
    """[B, S-1], or with a teacher's most probable tokens [B, S-1, 2+2k], of the batch's rows; of
    none without a teacher."""
    deferred: int = 0
    """Prompts that were left behind, under way, to be trained on in a later step."""
    skipped: int = 0
    """Prompts that could not be drawn."""
    left_out: tuple[int, ...] = ()
    """Response tokens of each sample that dynamic sampling left out, or that has no score."""
    replaced: tuple[Straggler, ...] = ()
    """The prompts that dynamic sampling left out, with their samples; where these are drawn ahead
    rank 0's alone."""
    guesses: tuple[int, int] = (0, 0)
    """Tokens that this rank's engine guessed, and how many of those it drew."""
    environment_s: float | None = None
    """Seconds that an episode of this rank's waited for its environment; None without any."""

    @property
    def all_scores(self) -> PendingRows:
        """Of everything that was generated for these samples, what dynamic sampling left out
        included."""
        return replace(self.scores, chosen=None)

    def scored_rows(self, least: int = 1) -> Tensor:
        """Rows, int64 [N], of the samples that have a score, of prompts with at least `least` such
        samples. Collective.

        A sample has none if its prompt could not be scored, or if the reward function abstained.
        """
        scored = self.scores.result().isfinite()
        return (scored & (self._scored_of_prompts(scored) >= least)).nonzero()[:, 0]

    def _scored_of_prompts(self, scored: Tensor) -> Tensor:
        """For each sample, int64 [B], how many samples of its prompt are scored (bool [B])."""
        of_samples = self.batch.groups[: len(self.samples)]
        _, places = of_samples.unique_consecutive(return_inverse=True)
        return torch.zeros_like(places).index_add(0, places, scored.long())[places]

    def scored(self) -> "RolloutBatch":
        """Without the samples that have no score. Collective."""
        rows = self.scored_rows()
        if len(rows) == len(self.samples):
            return self
        return replace(
            self.select(rows), left_out=(*self.left_out, *_lengths_without(self.samples, rows))
        )

    def select(self, rows: Tensor) -> "RolloutBatch":
        """Some of the samples (int64 [N]), in that order."""
        chosen, with_branches = rows.tolist(), self.batch.with_branches(rows)
        return replace(
            self,
            prompts=[self.prompts[row] for row in chosen],
            samples=[self.samples[row] for row in chosen],
            batch=self.batch.select(with_branches),
            scores=self.scores.select(rows),
            values=self.values.select(with_branches),
            teacher_logprobs=self.teacher_logprobs.select(with_branches),
        )

    def without_branches(self) -> "RolloutBatch":
        """The samples alone."""
        rows = torch.arange(len(self.samples))
        samples = [replace(sample, branches=()) for sample in self.samples]
        values, teacher_logprobs = self.values.select(rows), self.teacher_logprobs.select(rows)
        return replace(
            self,
            samples=samples,
            batch=self.batch.select(rows),
            values=values,
            teacher_logprobs=teacher_logprobs,
        )


def _lengths_without(samples: Sequence[Sample], rows: Tensor) -> tuple[int, ...]:
    """Response tokens of each sample that is not among the rows, int64 [N]."""
    among = set(rows.tolist())
    return tuple(
        sample.generated_token_count for row, sample in enumerate(samples) if row not in among
    )


@dataclass
class _Generated:
    """What has been generated so far, with what was asked of the servers about it."""

    prompts: list[Prompt] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    scores: list[RemoteFuture[Tensor]] = field(default_factory=list)
    values: list[RemoteFuture[Tensor]] = field(default_factory=list)
    teacher_logprobs: list[RemoteFuture[Tensor]] = field(default_factory=list)


class RolloutBuilder:
    """Takes each step's samples from an engine, synchronously: every sample is of the newest
    weights.

    Generation is cut into micro-batches, and a micro-batch's scores, values and teacher's log-probs
    are asked for before the next one is generated.

    With `spare_prompts` so many more prompts are under way than are wanted, and the first that are
    complete are taken; the others go on with the next ones, from the tokens that they have. A step
    leaves a prompt behind `max_deferrals` times at most: then it is waited for. Which are taken
    follows from the engine's steps, not from time.
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
        """With `dynamic_sampling_rounds` prompts whose samples all have the same score are replaced
        by further ones, in at most so many rounds (DAPO: Yu et al. 2025, section 3.2); `compared`
        makes what is compared of their scores. With `truncate_token` responses are cut behind it.
        `score_parts` is `PendingRows.sources` of scores. What is rank 0's `is_alone` tells no other
        rank, and asks for no values: they are the newest critic's.
        """
        self._prompts, self._sampler, self._services = prompts, sampler, services
        self._settings, self._options, self._pad_token_id = settings, options, pad_token_id
        self._rounds, self._compared = dynamic_sampling_rounds, compared
        self._truncate_token, self.score_parts, self._is_alone = (
            truncate_token,
            score_parts,
            is_alone,
        )
        self.position = 0
        """Prompts of the stream that were taken, or passed over, so far: what a resumed run sets.
        """
        self._rates: PassRates | None = None
        """Of the prompts, as the step that is drawn knows them."""
        self._under_way: tuple[Straggler, ...] = ()
        self._skipped = 0
        """Prompts of this step that could not be drawn."""

    @property
    def under_way(self) -> tuple[Straggler, ...]:
        """The prompts that the last step left behind, in the order of their admission: what a
        resumed run sets.

        Setting raises AlignerError where they have another number of samples than these rollouts
        take.
        """
        return self._under_way

    @under_way.setter
    def under_way(self, stragglers: Sequence[Straggler]) -> None:
        each = self._settings.samples_per_prompt
        if others := {len(straggler.samples) for straggler in stragglers} - {each}:
            raise AlignerError(
                f"rollout.samples_per_prompt={each}: the partial rollouts have {max(others)}"
                f" samples per prompt; resume with rollout.samples_per_prompt={max(others)}"
            )
        self._under_way = tuple(stragglers)

    def take(self, rates: PassRates | None = None) -> RolloutBatch:
        """The samples of the next training step, equal on every rank, of prompts as they are drawn
        at these rates. Collective.

        Raises AlignerError when dynamic sampling, or the stream, does not find enough prompts.
        """
        generated, self._skipped, self._rates = _Generated(), 0, rates
        self._generate_and_ask(generated, self._settings.prompts_per_step)
        rows = (
            self._informative(generated) if self._rounds else torch.arange(len(generated.samples))
        )
        self._under_way = tuple(
            replace(one, deferrals=one.deferrals + 1) for one in self._under_way
        )
        guesses = self._sampler.rest()  # new weights come before the next step
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
        """The prompts of none of these rows, int64 [B], which are those of whole prompts."""
        each, taken = self._settings.samples_per_prompt, set(rows.tolist())
        firsts = [row for row in range(0, len(generated.samples), each) if row not in taken]
        return tuple(
            Straggler(generated.prompts[row], tuple(generated.samples[row : row + each]))
            for row in firsts
        )

    def _scores(self, generated: _Generated, rows: Tensor | None = None) -> PendingRows:
        """Those that were asked for, with what environments gave; of these rows, int64 [B], or
        all."""
        added = environment_scores(generated.samples, self._settings.samples_per_prompt)
        return PendingRows(tuple(generated.scores), rows, added, self.score_parts)

    def _values(
        self, generated: _Generated, rows: Tensor, samples: Sequence[Sample]
    ) -> PendingRows:
        """Of these rows, int64 [B], and of their samples' branches, of which values are asked for
        here."""
        if self._is_alone:
            return PendingRows(())
        return self._with_branches(
            generated, rows, samples, generated.values, self._services.ask_values
        )

    def _teacher_logprobs(
        self, generated: _Generated, rows: Tensor, samples: Sequence[Sample]
    ) -> PendingRows:
        """As `_values`, but a teacher is always the same: it is asked whoever draws."""
        of_rows = zip(rows.tolist(), samples, strict=True)
        told = [generated.prompts[row].metadata for row, sample in of_rows for _ in sample.branches]
        ask = functools.partial(self._services.ask_teacher, metadata=told)
        return self._with_branches(generated, rows, samples, generated.teacher_logprobs, ask)

    def _with_branches(
        self,
        generated: _Generated,
        rows: Tensor,
        samples: Sequence[Sample],
        asked: Sequence[RemoteFuture[Tensor]],
        ask: Callable[[SampleBatch], tuple[RemoteFuture[Tensor], ...]],
    ) -> PendingRows:
        """What was `asked` about all samples, of these rows, int64 [B], and of their branches,
        about which it asks here."""
        branches = [branch for sample in samples for branch in sample.branches]
        if not branches:
            return PendingRows(tuple(asked), rows)
        further = ask(collate(branches, self._pad_token_id))
        places = torch.cat((rows, len(generated.samples) + torch.arange(len(branches))))
        return PendingRows((*asked, *further), places)

    def _generate_and_ask(self, generated: _Generated, count: int) -> None:
        """Generate the samples of the next `count` prompts or a few more, whole micro-batches, and
        ask about them."""
        settings = self._settings
        size = settings.prompts_per_micro_batch
        for _ in range(0, count, size):
            complete = self._draw(size)
            prompts = [one.prompt for one in complete for _ in one.samples]
            samples = self._cut([sample for one in complete for sample in one.samples])
            batch = collate(samples, self._pad_token_id)
            metadata = [prompt.metadata for prompt in prompts]
            apart = settings.samples_per_prompt if settings.skippable_prompts else None
            generated.prompts += prompts
            generated.samples += samples
            generated.teacher_logprobs += self._services.ask_teacher(batch, metadata)
            if self._is_alone:
                generated.scores += self._services.ask_scores(batch, metadata, apart)
                continue
            scores, values = self._services.ask(batch, metadata, apart)
            generated.scores += scores
            generated.values += values

    def _draw(self, count: int) -> list[Straggler]:
        """The next `count` prompts that are complete; others may stay under way.

        What the generator refuses is asked for again prompt by prompt; those that are refused again
        are left out, and others take their places.
        """
        was_refused, may_skip = False, self._settings.skippable_prompts if self._is_alone else 0
        while True:
            self._admit(count + self._settings.spare_prompts)
            try:
                further = self._taken_further(self._under_way, count)
                break
            except RefusedError:
                if not may_skip:
                    raise
                left = len(self._under_way)
                self._leave_out()
                if self._skipped > may_skip or (was_refused and len(self._under_way) == left):
                    raise
                was_refused = True
        complete, self._under_way = divided(further, count, self._settings.max_deferrals)
        return complete

    def _admit(self, count: int) -> None:
        """Have at least `count` prompts under way."""
        fresh, self.position = self._prompts.select(
            self.position, max(0, count - len(self._under_way)), self._rates
        )
        each = self._settings.samples_per_prompt
        self._under_way += tuple(
            Straggler(prompt, tuple(create_empty_samples([prompt], each))) for prompt in fresh
        )

    def _taken_further(self, stragglers: Sequence[Straggler], count: int) -> list[Straggler]:
        """The prompts, at least `count` of them complete, and all that may not be left behind
        again."""
        each, enough = self._settings.samples_per_prompt, None
        if count < len(stragglers):
            limit = self._settings.max_deferrals
            enough = Enough(
                count,
                tuple(place for place, one in enumerate(stragglers) if one.deferrals >= limit),
            )
        samples = [sample for one in stragglers for sample in one.samples]
        drawn = iter(self._sampler.sample(samples, each, self._options, enough))
        return [replace(one, samples=tuple(itertools.islice(drawn, each))) for one in stragglers]

    def _leave_out(self) -> None:
        """Drop the prompts that are refused alone too."""
        kept = []
        for straggler in self._under_way:
            try:
                self._taken_further([straggler], 1)
                kept.append(straggler)
            except RefusedError as error:
                _log.warning(
                    "prompt %s is skipped, because generation failed: %s",
                    straggler.prompt.id,
                    error,
                )
        self._skipped += len(self._under_way) - len(kept)
        self._under_way = tuple(kept)

    def _informative(self, generated: _Generated) -> Tensor:
        """Rows, int64 [N], of a step's prompts whose scores are not all equal, asking for further
        ones as needed."""
        wanted, each = self._settings.prompts_per_step, self._settings.samples_per_prompt
        for rounds in range(self._rounds + 1):
            pending = self._scores(generated)
            scores = (
                pending.local().view(len(generated.samples), -1)[:, 0]
                if self._is_alone
                else pending.result()
            )
            rows = informative(self._compared(scores, generated.samples), each)
            found = len(rows) // each
            if found >= wanted:
                return rows[: wanted * each]
            if rounds < self._rounds:
                self._generate_and_ask(generated, wanted - found)
        raise AlignerError(
            f"algorithm.dynamic_sampling_rounds={self._rounds}: only {found} of"
            f" {len(generated.samples) // each} prompts have samples with different scores, but a"
            f" step needs {wanted} such prompts. Allow more rounds, generate more samples per"
            f" prompt (rollout.samples_per_prompt={each}), or use prompts that the policy solves"
            " sometimes but not always"
        )

    def forget(self, first: int) -> None:
        """No episode of a prompt before the `first` of the stream is begun again."""
        self._sampler.forget(first)

    def close(self) -> None:
        """Shut the engine down. Collective."""
        self._sampler.close()

    def generate(
        self, prompts: Sequence[Prompt], samples_per_prompt: int, options: SamplingOptions
    ) -> list[Sample]:
        """Samples of any prompts, each prompt's in a row, by the weights that serve; equal on every
        rank. Collective."""
        return self._cut(
            self._sampler.sample(
                create_empty_samples(prompts, samples_per_prompt), samples_per_prompt, options
            )
        )

    def _cut(self, samples: list[Sample]) -> list[Sample]:
        """Complete samples, behind the token that is to end them."""
        if self._truncate_token is None:
            return samples
        return [
            truncated(sample, self._truncate_token, self._settings.truncate_after)
            for sample in samples
        ]


def environment_scores(samples: Sequence[Sample], samples_per_prompt: int) -> Tensor | None:
    """What environments gave for each of these samples, branches included, float32 [B]; None
    without any.

    Not a number for all samples of a prompt where it is for one: an episode was lost.
    """
    given = [sample.environment_reward for sample in samples]
    if all(reward is None for reward in given):
        return None
    sums = torch.stack([torch.zeros(()) if reward is None else reward for reward in given])
    groups = sums.view(-1, samples_per_prompt)
    return torch.where(groups.isnan().any(1, keepdim=True), torch.nan, groups).flatten()


def informative(scores: Tensor, samples_per_prompt: int) -> Tensor:
    """Rows, int64 [N], of the prompts whose scores [B] are not all equal; samples without a score
    are not compared."""
    high, low = score_bounds(scores, samples_per_prompt)
    rows = torch.arange(len(scores)).view(-1, samples_per_prompt)
    return rows[high.amax(1) > low.amin(1)].flatten()


def truncated(sample: Sample, token_id: int, after: int) -> Sample:
    """The sample up to the first `token_id` among its response's tokens from `after` on; without
    one it has no end.

    Huang et al. 2023, "The N Implementation Details of RLHF with PPO", detail 8.
    """
    found = (sample.tokens[sample.prompt_length + after :] == token_id).nonzero()
    if not len(found):
        return replace(sample, finish_reason="length")
    kept = after + int(found[0]) + 1
    return sample.truncate(kept, "stop")
