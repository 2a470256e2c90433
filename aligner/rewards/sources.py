"""What scores a batch on the reward's ranks: texts on one of them, a model on all of them, or several of these combined."""

from collections.abc import Callable, Sequence
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
    checked_scores,
    require_finite,
    resolve_scorer,
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

    def select(self, rows: Tensor) -> "ScoringBatch":
        """Some of them, int64 [N]."""
        requests, whole = self.requests, self.whole
        return ScoringBatch(
            lambda: [requests()[row] for row in rows.tolist()],
            None if self.tokens is None else self.tokens[rows],
            None if self.lengths is None else self.lengths[rows],
            None if whole is None else lambda: [whole()[row] for row in rows.tolist()],
        )


class RewardSource(Protocol):
    """Something that scores."""

    def raw(self, batch: ScoringBatch) -> Tensor:
        """Finite scores float64 [B], the same on every rank. Collective; raises ScoringError on every rank alike."""


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
        requests = batch.requests if self.skip_special_tokens or batch.whole is None else batch.whole
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
class RewardNormalizer:
    """gain·reward + bias."""

    gain: float = 1.0
    bias: float = 0.0

    @classmethod
    def fit(cls, scores: Tensor, mean: float = 0.0, std: float = 1.0) -> "RewardNormalizer":
        """The one that gives these scores a mean and a population standard deviation.

        gain = std / σ, bias = mean - gain·μ (Huang et al. 2023, "The N Implementation Details of RLHF with PPO", detail 6).
        Raises ValueError for scores that are all equal, or not all finite.
        """
        samples = scores.detach().double()
        if not samples.isfinite().all():
            raise ValueError("a score is not finite")
        if samples.unique().numel() < 2:
            raise ValueError(f"{samples.numel()} scores do not differ: there is no deviation to scale by")
        gain = std / float(samples.std(correction=0))
        return cls(gain, mean - gain * float(samples.mean()))

    def __call__(self, rewards: Tensor) -> Tensor:
        """Any shape, element by element."""
        return self.gain * rewards + self.bias


@dataclass(frozen=True)
class ModelSource:
    """A reward model: its value after a sequence's last token, normalized."""

    name: str
    model: ScalarModel
    normalizer: RewardNormalizer = RewardNormalizer()

    def raw(self, batch: ScoringBatch) -> Tensor:
        """See RewardSource."""
        if batch.tokens is None or batch.lengths is None:
            raise ValueError("a model scores tokens")
        scores = self.model.values(batch.tokens, batch.lengths).gather(1, batch.lengths[:, None] - 1)[:, 0].double()
        if not bool(scores.isfinite().all()):
            require_finite(self.name, scores.tolist(), batch.requests())
        return self.normalizer(scores)


def text_source(source: Source) -> TextSource:
    """A scoring function or a remote scorer. Raises ConfigError when there is no such function."""
    if isinstance(source, FunctionSource):
        return TextSource(source.name, resolve_scorer(source.function, f"{source.key}.function", source.function_timeout_s))
    if isinstance(source, RemoteSource):
        return TextSource(source.name, RemoteScorer(source.url, source.timeout_s), source.skip_special_tokens)
    raise TypeError(f"{type(source).__name__} does not score texts")


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
        """Finite scores float32 [B], and what each source has given, float32 [B] each, 0 where it is not asked.

        The same on every rank. Collective; raises ScoringError on every rank alike.
        """
        given: dict[int, tuple[Tensor, Tensor]] = {}
        # Texts first: what they refuse costs no model's time.
        for place, (settings, source) in sorted(enumerate(self.parts), key=lambda part: isinstance(part[1][1], ModelSource)):
            given[place] = _given(settings, source, batch)
        parts, there = (torch.stack(each) for each in zip(*(given[place] for place in range(len(given))), strict=True))
        if not bool(there.any(0).all()):
            request = batch.requests()[int(there.any(0).int().argmin())]
            raise ScoringError(
                f"no source of the reward has a weight for task={request.metadata.get('task')}, prompt {request.prompt!r}"
            )
        scores = COMBINATIONS[self.combine](parts, there, self.disagreement_weight).float()
        added = list(parts.float())
        names = [settings.name for settings, _ in self.parts]
        for name, numbers in zip((*names, " + ".join(names)), (*added, scores), strict=True):
            if not bool(numbers.isfinite().all()):
                require_finite(name, numbers.tolist(), batch.requests())
        return scores, added


def _given(settings: Source, source: RewardSource, batch: ScoringBatch) -> tuple[Tensor, Tensor]:
    """What a source gives, float64 [B], and of which responses it is asked, bool [B]; collective, the same on every rank."""

    def scores(asked: ScoringBatch) -> Tensor:
        return settings.gain * source.raw(asked) + settings.bias

    if not settings.task_weights:
        given = settings.weight * scores(batch)
        return given, torch.ones_like(given, dtype=torch.bool)
    weights = torch.tensor([settings.weight_of(request.metadata) for request in batch.requests()], dtype=torch.float64)
    there = weights != 0
    if there.all():
        return weights * scores(batch), there
    if there.any():
        rows = there.nonzero()[:, 0]
        weights[rows] *= scores(batch.select(rows))
    return weights, there
