"""What scores a batch on the reward's ranks: texts on one of them, a model on all of them, or
several of these combined."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.data.collectives import broadcast_json
from aligner.data.types import ABSTAINED
from aligner.errors import AlignerError, UnavailableError
from aligner.rewards.remote import RemoteScorer
from aligner.rewards.scorers import (
    Scorer,
    ScorerDeadlocked,
    ScorerTimeout,
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

Combine: TypeAlias = Callable[[Tensor, Tensor, float], Tensor]
"""Combine the scores [P, B] of P sources into [B].

The second argument, bool [P, B], is true where a source has scored; scores are 0 elsewhere, and the
result has no meaning where no source has scored. The third is the weight of the disagreement."""


def _mean(scores: Tensor, there: Tensor) -> Tensor:
    return scores.sum(0) / there.sum(0)


def _variance(scores: Tensor, there: Tensor) -> Tensor:
    """Over all of a row's scores, not a sample of them."""
    return _mean(torch.where(there, scores - _mean(scores, there), 0.0).square(), there)


COMBINATIONS: Mapping[str, Combine] = {
    "sum": lambda scores, there, weight: scores.sum(0),
    "mean": lambda scores, there, weight: _mean(scores, there),
    "min": lambda scores, there, weight: torch.where(there, scores, torch.inf).amin(0),
    "mean_minus_std": (
        lambda scores, there, weight: (
            _mean(scores, there) - weight * _variance(scores, there).sqrt()
        )
    ),
    "mean_minus_variance": (
        lambda scores, there, weight: _mean(scores, there) - weight * _variance(scores, there)
    ),
}
"""By the name that `reward.combine` has for them.

`min` is worst-case optimization (WCO) and `mean_minus_variance` uncertainty-weighted optimization
(UWO) of Coste et al. 2023, "Reward Model Ensembles Help Mitigate Overoptimization"; with
`mean_minus_std` the weight does not hang on the scores' scale.
"""


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

    def at_steps(self, steps: Sequence[Mapping[int, float] | None]) -> Tensor:
        """float64 [B, S]: the rewards of each row's steps at their tokens, NaN elsewhere; all
        ABSTAINED where a row is None. [B], the sums of the rewards, for texts alone."""
        if self.tokens is None:
            sums = [ABSTAINED if each is None else sum(each.values()) for each in steps]
            return torch.tensor(sums, dtype=torch.float64)
        placed = torch.full(self.tokens.shape, torch.nan, dtype=torch.float64)
        for row, each in enumerate(steps):
            if each is None:
                placed[row] = ABSTAINED
                continue
            for place, number in each.items():
                placed[row, place] = number
        return placed


_ERRORS = {
    error.__name__: error
    for error in (ScoringError, ScorerUnavailable, ScorerTimeout, ScorerDeadlocked)
}
"""Errors of scorers that reach the client under their own names; others are ScoringErrors."""


def _on_rank_0(score: Callable[[], Any]) -> Any:
    """Return on every rank what `score` returns on rank 0, as JSON. Collective; raises ScoringError
    on every rank alike."""
    scores, kind, message = None, None, None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            scores = score()
        except AlignerError as error:
            unavailable = isinstance(error, UnavailableError)
            kind = ScorerUnavailable.__name__ if unavailable else type(error).__name__
            message = str(error)
    scores, kind, message = broadcast_json([scores, kind, message])
    if kind is not None:
        raise _ERRORS.get(kind, ScoringError)(message)
    return scores


class RewardSource(Protocol):
    """Something that scores."""

    def raw(self, batch: ScoringBatch) -> Tensor:
        """Return finite scores float64 [B], ABSTAINED where the source abstains; the same on every
        rank. Collective; raises ScoringError on every rank alike.

        A source that rewards steps returns [B, S] as `ScoringBatch.at_steps`.
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
        requests = (
            batch.requests if self.skip_special_tokens or batch.whole is None else batch.whole
        )
        scores = _on_rank_0(lambda: checked_scores(self.name, self.scorer, requests()))
        return torch.tensor(
            [ABSTAINED if score is None else score for score in scores], dtype=torch.float64
        )


@dataclass(frozen=True)
class StepSource:
    """A function that rewards the steps of texts, which rank 0 calls."""

    name: str
    scorer: StepScorer

    def raw(self, batch: ScoringBatch) -> Tensor:
        """See RewardSource."""
        steps = _on_rank_0(lambda: checked_steps(self.name, self.scorer, batch.requests()))
        return batch.at_steps(
            [None if each is None else batch.places(row, each) for row, each in enumerate(steps)]
        )


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
        """As `in_steps`, without the steps."""
        return self.in_steps(batch)[:2]

    def in_steps(self, batch: ScoringBatch) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Score responses. Collective; raises ScoringError on every rank alike.

        Returns:
            Finite scores float32 [B], NaN where every source that was asked abstained.
            The score of each source, float32 [B] each, 0 where it was not asked or abstained.
            The part of the scores that belongs to tokens which end steps, float32 [B, S], NaN
            elsewhere; None if no source rewards steps.
            All are the same on every rank.
        """
        given: dict[int, _Given] = {}
        # Texts first: what they refuse costs no model's time.
        for place, (settings, source) in sorted(
            enumerate(self.parts), key=lambda part: isinstance(part[1][1], ModelSource)
        ):
            given[place] = _given(settings, source, batch)
        in_order = [given[place] for place in range(len(given))]
        asked = torch.stack([one.asked for one in in_order]).any(0)
        if not bool(asked.all()):
            request = batch.requests()[int(asked.int().argmin())]
            raise ScoringError(
                "reward.sources: no source has a nonzero weight for"
                f" task={request.metadata.get('task')}, prompt {request.prompt!r}"
            )

        scored = torch.stack([one.scored for one in in_order])
        parts = torch.stack([_totals(one.scores) for one in in_order])
        combined = COMBINATIONS[self.combine](parts, scored, self.disagreement_weight).float()
        is_scored = scored.any(0)
        added = list(parts.float())
        names = [settings.name for settings, _ in self.parts]
        for name, numbers in zip((*names, " + ".join(names)), (*added, combined), strict=True):
            finite = numbers.isfinite() | ~is_scored
            if not bool(finite.all()):
                rows = (~finite).nonzero()[:, 0].tolist()
                requests = batch.requests()
                require_finite(name, numbers[rows].tolist(), [requests[row] for row in rows])
        scores = torch.where(is_scored, combined, torch.nan)

        inside = [one.scores for one in in_order if one.scores.ndim > 1]
        if not inside:
            return scores, added, None
        steps = torch.stack(inside)
        return scores, added, torch.where(steps.isnan().all(0), torch.nan, steps.nansum(0)).float()


def _totals(given: Tensor) -> Tensor:
    """[B], of scores [B] or of rewards of tokens [B, S]."""
    return given if given.ndim == 1 else given.nansum(1)


@dataclass(frozen=True)
class _Given:
    """The weighted scores of one source."""

    scores: Tensor
    """float64 [B], 0 where there is none; of steps [B, S], NaN where there is none."""
    asked: Tensor
    """bool [B]: the responses for which the source's weight is not 0."""
    scored: Tensor
    """bool [B]: the responses for which the source was asked and did not abstain."""


def _given(settings: Source, source: RewardSource, batch: ScoringBatch) -> _Given:
    """Ask a source. Collective, the same on every rank."""
    if not settings.task_weights:
        raw = source.raw(batch)
        weights = torch.full((len(raw),), settings.weight, dtype=torch.float64)
        rows = torch.arange(len(raw))
    else:
        weights = torch.tensor(
            [settings.weight_of(request.metadata) for request in batch.requests()],
            dtype=torch.float64,
        )
        rows = weights.nonzero()[:, 0]
        if not len(rows):
            nothing = torch.zeros(len(weights), dtype=torch.bool)
            return _Given(weights, nothing, nothing)
        raw = source.raw(batch if len(rows) == len(weights) else batch.select(rows))

    asked = torch.zeros(len(weights), dtype=torch.bool).index_fill_(0, rows, True)
    abstained = (raw == ABSTAINED).view(len(raw), -1).any(1)
    scored = asked.index_fill(0, rows[abstained], False)
    nothing_given = 0.0 if raw.ndim == 1 else torch.nan
    scores = torch.full((len(weights), *raw.shape[1:]), nothing_given, dtype=torch.float64)
    answered = rows[~abstained]
    own_weights = weights[answered].view(-1, *[1] * (raw.ndim - 1))
    scores[answered] = own_weights * (settings.gain * raw[~abstained] + settings.bias)
    return _Given(scores, asked, scored)
