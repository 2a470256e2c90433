"""What scores a batch on the reward's ranks: texts on one of them, a model on all of them, or
several of these combined."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.data.collectives import broadcast_json
from aligner.errors import AlignerError, UnavailableError
from aligner.rewards.ensembles import COMBINATIONS
from aligner.rewards.remote import RemoteScorer
from aligner.rewards.scorers import (
    Scorer,
    ScorerUnavailable,
    ScoringError,
    ScoringRequest,
    StepScorer,
    checked_scores,
    checked_steps,
    require_finite,
    resolve_scorer,
    resolve_step_scorer,
)
from aligner.schema import RewardConfig
from aligner.schema.reward_sources import FunctionSource, RemoteSource, Source


@dataclass(frozen=True)
class ScoringBatch:
    """Responses to score."""

    requests: Callable[[], Sequence[ScoringRequest]]
    """Their texts without special tokens; made where they are wanted. Raises AlignerError."""
    tokens: Tensor | None = None
    """int64 [B, S]; None where no source wants tokens."""
    lengths: Tensor | None = None
    """int64 [B], as `tokens`."""
    whole: Callable[[], Sequence[ScoringRequest]] | None = None
    """Their texts with special tokens; None where they came as texts, or no source wants these."""
    token_at: Callable[[int, int], int] | None = None
    """Of a row the place of the token with which so many characters of the response are complete;
    None as `tokens`."""

    def select(self, rows: Tensor) -> "ScoringBatch":
        """Some of them, int64 [N]."""
        requests, whole, token_at = self.requests, self.whole, self.token_at
        return ScoringBatch(
            lambda: [requests()[row] for row in rows.tolist()],
            None if self.tokens is None else self.tokens[rows],
            None if self.lengths is None else self.lengths[rows],
            None if whole is None else lambda: [whole()[row] for row in rows.tolist()],
            (
                None
                if token_at is None
                else lambda row, characters: token_at(int(rows[row]), characters)
            ),
        )

    def places(self, row: int, steps: Sequence[tuple[int, float]]) -> dict[int, float]:
        """The places of the tokens that end a row's steps, with their rewards; by characters where
        there are no tokens."""
        placed: dict[int, float] = {}
        for end, reward in steps:
            place = end if self.token_at is None else self.token_at(row, end)
            placed[place] = placed.get(place, 0.0) + reward
        return placed

    def at_steps(self, steps: Sequence[Mapping[int, float]]) -> Tensor:
        """float64 [B, S]: of each row the numbers at some places, elsewhere not a number; [B],
        their sums, of texts alone."""
        if self.tokens is None:
            return torch.tensor([sum(each.values()) for each in steps], dtype=torch.float64)
        placed = torch.full(self.tokens.shape, torch.nan, dtype=torch.float64)
        for row, each in enumerate(steps):
            for place, number in each.items():
                placed[row, place] = number
        return placed


class RewardSource(Protocol):
    """Something that scores."""

    def raw(self, batch: ScoringBatch) -> Tensor:
        """Finite scores float64 [B], the same on every rank. Collective; raises ScoringError on
        every rank alike.

        Of a source that rewards steps [B, S]: at the tokens that end them, elsewhere not a number.
        """


class ScalarModel(Protocol):
    """A model with a number a token, spread over the ranks."""

    def values(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """float32 [B, S] of tokens int64 [B, S] and lengths int64 [B]; collective."""


@dataclass(frozen=True)
class TextSource:
    """A scorer of texts, which rank 0 calls."""

    name: str
    scorer: Scorer
    skip_special_tokens: bool = True

    def raw(self, batch: ScoringBatch) -> Tensor:
        """See RewardSource."""
        scores, error, unavailable = None, None, False
        requests = (
            batch.requests if self.skip_special_tokens or batch.whole is None else batch.whole
        )
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                scores = checked_scores(self.name, self.scorer, requests())
            except AlignerError as problem:
                error, unavailable = str(problem), isinstance(problem, UnavailableError)
        scores, error, unavailable = broadcast_json([scores, error, unavailable])
        if error is not None:
            raise (ScorerUnavailable if unavailable else ScoringError)(error)
        return torch.tensor(scores, dtype=torch.float64)


@dataclass(frozen=True)
class StepSource:
    """A function that rewards the steps of texts, which rank 0 calls."""

    name: str
    scorer: StepScorer

    def raw(self, batch: ScoringBatch) -> Tensor:
        """See RewardSource."""
        steps, error = None, None
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                steps = checked_steps(self.name, self.scorer, batch.requests())
            except AlignerError as problem:
                error = str(problem)
        steps, error = broadcast_json([steps, error])
        if error is not None:
            raise ScoringError(error)
        return batch.at_steps([batch.places(row, each) for row, each in enumerate(steps)])


@dataclass(frozen=True)
class RewardNormalizer:
    """gain·reward + bias."""

    gain: float = 1.0
    bias: float = 0.0

    @classmethod
    def fit(cls, scores: Tensor, mean: float = 0.0, std: float = 1.0) -> "RewardNormalizer":
        """The one that gives these scores a mean and a population standard deviation.

        gain = std / σ, bias = mean - gain·μ (Huang et al. 2023, "The N Implementation Details of
        RLHF with PPO", detail 6). Raises ValueError for scores that are all equal, or not all
        finite.
        """
        samples = scores.detach().double()
        if not samples.isfinite().all():
            raise ValueError("all scores must be finite")
        if samples.unique().numel() < 2:
            raise ValueError(
                f"all {samples.numel()} scores are equal; normalization requires a standard"
                " deviation > 0"
            )
        gain = std / float(samples.std(correction=0))
        return cls(gain, mean - gain * float(samples.mean()))

    def __call__(self, rewards: Tensor) -> Tensor:
        """Any shape, element by element."""
        return self.gain * rewards + self.bias


@dataclass(frozen=True)
class ModelSource:
    """A reward model: its value after a sequence's last token, normalized; of a process reward
    model after each step's."""

    name: str
    model: ScalarModel
    normalizer: RewardNormalizer = RewardNormalizer()
    step_separator: str | None = None
    """Steps end where this text does, and where the response ends."""
    step_probability: bool = RewardConfig.step_probability
    """A step's reward is what its value is the logit of."""

    def raw(self, batch: ScoringBatch) -> Tensor:
        """See RewardSource."""
        if batch.tokens is None or batch.lengths is None:
            raise ValueError("a reward model requires tokens, got only texts")
        values = self.model.values(batch.tokens, batch.lengths).double()
        if self.step_separator is not None:
            return self._of_steps(self.normalizer(values), batch, self.step_separator)
        scores = values.gather(1, batch.lengths[:, None] - 1)[:, 0]
        if not bool(scores.isfinite().all()):
            require_finite(self.name, scores.tolist(), batch.requests())
        return self.normalizer(scores)

    def _of_steps(self, values: Tensor, batch: ScoringBatch, separator: str) -> Tensor:
        """Rewards of steps, as RewardSource has them, of the values [B, S] at all tokens."""
        if batch.lengths is None or batch.token_at is None:
            raise ValueError("step rewards of a reward model require tokens, got only texts")
        rewards, requests, steps = (
            values.sigmoid() if self.step_probability else values,
            batch.requests(),
            [],
        )
        for row, (request, length) in enumerate(zip(requests, batch.lengths.tolist(), strict=True)):
            ends = [found.end() for found in re.finditer(re.escape(separator), request.response)]
            places = {batch.token_at(row, end) for end in ends}
            if not ends or request.response[ends[-1] :].strip():
                places.add(length - 1)
            own = {place: float(rewards[row, place]) for place in places}
            require_finite(self.name, list(own.values()), [request] * len(own))
            steps.append(own)
        return batch.at_steps(steps)


def step_source(source: FunctionSource) -> StepSource:
    """A function that rewards steps. Raises ConfigError when there is no such function."""
    key = f"{source.key}.function"
    return StepSource(
        source.name, resolve_step_scorer(source.function, key, source.function_timeout_s)
    )


def text_source(source: Source) -> TextSource:
    """A scoring function or a remote scorer. Raises ConfigError when there is no such function."""
    if isinstance(source, FunctionSource):
        return TextSource(
            source.name,
            resolve_scorer(source.function, f"{source.key}.function", source.function_timeout_s),
        )
    if isinstance(source, RemoteSource):
        return TextSource(
            source.name, RemoteScorer(source.url, source.timeout_s), source.skip_special_tokens
        )
    raise TypeError(f"{type(source).__name__} cannot score texts")


@dataclass(frozen=True)
class CombinedReward:
    """The reward: what each source gives, weight * (gain * raw + bias), and these combined."""

    parts: Sequence[tuple[Source, RewardSource]]
    combine: str = RewardConfig.combine
    disagreement_weight: float = RewardConfig.disagreement_weight

    def __call__(self, batch: ScoringBatch) -> Tensor:
        """As `in_parts`, without these."""
        return self.in_parts(batch)[0]

    def in_parts(self, batch: ScoringBatch) -> tuple[Tensor, list[Tensor]]:
        """As `in_steps`, without these."""
        return self.in_steps(batch)[:2]

    def in_steps(self, batch: ScoringBatch) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Finite scores float32 [B], what each source has given, float32 [B] each, 0 where it is
        not asked, and of the scores what tokens get that end steps, float32 [B, S], not a number
        elsewhere; None where no source rewards steps.

        The same on every rank. Collective; raises ScoringError on every rank alike.
        """
        given: dict[int, tuple[Tensor, Tensor]] = {}
        # Texts first: what they refuse costs no model's time.
        for place, (settings, source) in sorted(
            enumerate(self.parts), key=lambda part: isinstance(part[1][1], ModelSource)
        ):
            given[place] = _given(settings, source, batch)
        there = torch.stack([given[place][1] for place in range(len(given))])
        inside = [rewards for rewards, _ in given.values() if rewards.ndim > 1]
        parts = torch.stack([_totals(given[place][0]) for place in range(len(given))])
        if not bool(there.any(0).all()):
            request = batch.requests()[int(there.any(0).int().argmin())]
            raise ScoringError(
                "reward.sources: no source has a nonzero weight for"
                f" task={request.metadata.get('task')}, prompt {request.prompt!r}"
            )
        scores = COMBINATIONS[self.combine](parts, there, self.disagreement_weight).float()
        added = list(parts.float())
        names = [settings.name for settings, _ in self.parts]
        for name, numbers in zip((*names, " + ".join(names)), (*added, scores), strict=True):
            if not bool(numbers.isfinite().all()):
                require_finite(name, numbers.tolist(), batch.requests())
        if not inside:
            return scores, added, None
        steps = torch.stack(inside)
        return scores, added, torch.where(steps.isnan().all(0), torch.nan, steps.nansum(0)).float()


def _totals(given: Tensor) -> Tensor:
    """[B], of scores [B] or of rewards of tokens [B, S]."""
    return given if given.ndim == 1 else given.nansum(1)


def _given(settings: Source, source: RewardSource, batch: ScoringBatch) -> tuple[Tensor, Tensor]:
    """What a source gives, float64 [B] or, of steps, [B, S], and of which responses it is asked,
    bool [B].

    Collective, the same on every rank.
    """

    def scores(asked: ScoringBatch) -> Tensor:
        return settings.gain * source.raw(asked) + settings.bias

    if not settings.task_weights:
        given = settings.weight * scores(batch)
        return given, torch.ones(len(given), dtype=torch.bool)
    weights = torch.tensor(
        [settings.weight_of(request.metadata) for request in batch.requests()], dtype=torch.float64
    )
    there = weights != 0
    if not there.any():
        return weights, there
    rows = there.nonzero()[:, 0]
    asked = scores(batch if there.all() else batch.select(rows))
    given = torch.full(
        (len(weights), *asked.shape[1:]), 0.0 if asked.ndim == 1 else torch.nan, dtype=torch.float64
    )
    given[rows] = weights[rows].view(-1, *[1] * (asked.ndim - 1)) * asked
    return given, there
