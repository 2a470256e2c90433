"""Reward sources, and their combination to one reward.

A source scores a batch of responses on the ranks of the reward. A source of texts runs on rank 0,
and a reward model on all ranks. The module also contains the combinations of several sources
(`reward.combine`) and the normalization of rewards.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from aligner.data.collectives import run_on_rank0
from aligner.data.types import ABSTAINED
from aligner.errors import AlignerError, UnavailableError
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.remote import RemoteScorer
from aligner.rewards.scorers import (
    Scorer,
    ScorerDeadlocked,
    ScorerTimeout,
    ScorerUnavailable,
    ScoringError,
    StepScorer,
    call_scorer,
    call_step_scorer,
    require_finite,
    resolve_scorer,
    resolve_step_scorer,
)
from aligner.schema import RewardConfig
from aligner.schema.reward_sources import FunctionSource, RemoteSource, Source

Combine: TypeAlias = Callable[[Tensor, Tensor, float], Tensor]
"""Function that combines the scores `[P, B]` of P sources into scores `[B]`.

The second argument, bool `[P, B]`, is true where a source has a score; the first argument is 0
elsewhere. The result is undefined where no source has a score. The third argument is the weight of
the disagreement between the sources.
"""


def _mean(scores: Tensor, has_score: Tensor) -> Tensor:
    return scores.sum(0) / has_score.sum(0)


def _variance(scores: Tensor, has_score: Tensor) -> Tensor:
    """Return the population variance of each response's scores."""
    # Missing scores must not count as deviations.
    deviations = torch.where(has_score, scores - _mean(scores, has_score), 0.0)
    return _mean(deviations.square(), has_score)


COMBINATIONS: Mapping[str, Combine] = {
    "sum": lambda scores, has_score, weight: scores.sum(0),
    "mean": lambda scores, has_score, weight: _mean(scores, has_score),
    "min": lambda scores, has_score, weight: torch.where(has_score, scores, torch.inf).amin(0),
    "mean_minus_std": (
        lambda scores, has_score, weight: (
            _mean(scores, has_score) - weight * _variance(scores, has_score).sqrt()
        )
    ),
    "mean_minus_variance": (
        lambda scores, has_score, weight: (
            _mean(scores, has_score) - weight * _variance(scores, has_score)
        )
    ),
}
"""Combinations by their name in `reward.combine`.

`min` is worst-case optimization (WCO), and `mean_minus_variance` is uncertainty-weighted
optimization (UWO), of Coste et al. 2023, "Reward Model Ensembles Help Mitigate Overoptimization".
With `mean_minus_std` the weight does not depend on the scale of the scores.
"""


@dataclass(frozen=True)
class ScoringBatch:
    """Responses to score, as texts and as tokens."""

    requests: Callable[[], Sequence[ScoringRequest]]
    """Function that returns the texts without special tokens. Sources call it only if they need
    texts. It raises AlignerError."""
    tokens: Tensor | None = None
    """Token ids, int64 `[B, S]`; None if no source needs tokens."""
    lengths: Tensor | None = None
    """Lengths of the rows, int64 `[B]`; None if no source needs tokens."""
    requests_with_special_tokens: Callable[[], Sequence[ScoringRequest]] | None = None
    """Function that returns the texts with special tokens; None if the batch arrived as texts, or
    if no source needs special tokens."""
    find_token: Callable[[int, int], int] | None = None
    """Function from a row and a number of characters of its response to the index of the token that
    completes these characters; None if no source needs tokens."""

    def select(self, rows: Tensor) -> "ScoringBatch":
        """Return the batch of some rows, int64 `[N]`."""
        requests = self.requests
        requests_with_special_tokens = self.requests_with_special_tokens
        find_token = self.find_token
        return ScoringBatch(
            lambda: [requests()[row] for row in rows.tolist()],
            None if self.tokens is None else self.tokens[rows],
            None if self.lengths is None else self.lengths[rows],
            (
                None
                if requests_with_special_tokens is None
                else lambda: [requests_with_special_tokens()[row] for row in rows.tolist()]
            ),
            (
                None
                if find_token is None
                else lambda row, characters: find_token(int(rows[row]), characters)
            ),
        )

    def sum_by_token(self, row: int, steps: Sequence[tuple[int, float]]) -> dict[int, float]:
        """Return the rewards of a row's steps by the index of the token that ends the step.

        Steps that end at the same token are added. Without tokens, the keys are the numbers of
        characters after which the steps end.
        """
        rewards: dict[int, float] = {}
        for end, reward in steps:
            index = end if self.find_token is None else self.find_token(row, end)
            rewards[index] = rewards.get(index, 0.0) + reward
        return rewards

    def build_step_rewards(self, steps: Sequence[Mapping[int, float] | None]) -> Tensor:
        """Return the rewards of all steps as a tensor.

        Args:
            steps: For each row the rewards by token index; None if the source abstained.

        Returns:
            float64 `[B, S]`, the rewards at their tokens and NaN elsewhere; a row is ABSTAINED
            everywhere if the source abstained. Without tokens, float64 `[B]`, the sums of the
            rewards.
        """
        if self.tokens is None:
            sums = [ABSTAINED if rewards is None else sum(rewards.values()) for rewards in steps]
            return torch.tensor(sums, dtype=torch.float64)
        step_rewards = torch.full(self.tokens.shape, torch.nan, dtype=torch.float64)
        for row, rewards in enumerate(steps):
            if rewards is None:
                step_rewards[row] = ABSTAINED
                continue
            for index, reward in rewards.items():
                step_rewards[row, index] = reward
        return step_rewards


_ERROR_TYPES: tuple[type[ScoringError], ...] = (ScorerUnavailable, ScorerTimeout, ScorerDeadlocked)
"""Errors of scorers that reach the client with their own type; all others become ScoringError."""


def _score_on_rank0(score: Callable[[], Any]) -> Any:
    """Return on every rank the JSON value that `score` returns on rank 0.

    Collective.

    Raises:
        ScoringError: `score` raised AlignerError on rank 0. Every rank raises the same error.
    """

    def run() -> Any:
        """Return the scores; raise an error as one of the types that the client distinguishes."""
        try:
            return score()
        except AlignerError as error:
            # The client distinguishes only these types.
            error_type = next((kind for kind in _ERROR_TYPES if type(error) is kind), ScoringError)
            if isinstance(error, UnavailableError):
                error_type = ScorerUnavailable
            raise error_type(str(error)) from error

    return run_on_rank0(run, error_types=(ScoringError, *_ERROR_TYPES))


class RewardSource(Protocol):
    """Source of raw scores, before weights and the combination with other sources."""

    def compute_raw_scores(self, batch: ScoringBatch) -> Tensor:
        """Return the raw scores of a batch.

        Collective; the result is the same on every rank.

        Returns:
            Finite scores, float64 `[B]`; ABSTAINED where the source abstains. A source that rewards
            steps returns `[B, S]`; see `ScoringBatch.build_step_rewards`.

        Raises:
            ScoringError: The scoring failed. Every rank raises the same error.
        """


class ScalarModel(Protocol):
    """A model with one output per token, distributed over the ranks."""

    def values(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the outputs, float32 `[B, S]`, of tokens int64 `[B, S]` with lengths int64 `[B]`.

        Collective.
        """


@dataclass(frozen=True)
class TextSource:
    """A scorer of texts, which rank 0 calls."""

    name: str
    """Name of the source in the configuration, for error messages."""
    scorer: Scorer
    """Scorer that rank 0 calls."""
    skip_special_tokens: bool = True
    """Whether the scorer gets the texts without special tokens."""

    def compute_raw_scores(self, batch: ScoringBatch) -> Tensor:
        """Return the scores of the texts. See RewardSource."""
        requests = (
            batch.requests
            if self.skip_special_tokens or batch.requests_with_special_tokens is None
            else batch.requests_with_special_tokens
        )
        scores = _score_on_rank0(lambda: call_scorer(self.name, self.scorer, requests()))
        return torch.tensor(
            [ABSTAINED if score is None else score for score in scores], dtype=torch.float64
        )


@dataclass(frozen=True)
class StepSource:
    """A function that rewards the steps of texts, which rank 0 calls."""

    name: str
    """Name of the source in the configuration, for error messages."""
    scorer: StepScorer
    """Scorer that rank 0 calls."""

    def compute_raw_scores(self, batch: ScoringBatch) -> Tensor:
        """Return the rewards of the steps. See RewardSource."""
        step_lists = _score_on_rank0(
            lambda: call_step_scorer(self.name, self.scorer, batch.requests())
        )
        return batch.build_step_rewards(
            [
                None if steps is None else batch.sum_by_token(row, steps)
                for row, steps in enumerate(step_lists)
            ]
        )


@dataclass(frozen=True)
class RewardNormalizer:
    """The affine function gain · reward + bias."""

    gain: float = 1.0
    bias: float = 0.0

    @classmethod
    def fit(cls, scores: Tensor, mean: float = 0.0, std: float = 1.0) -> "RewardNormalizer":
        """Return the normalizer that gives the scores a mean and a population standard deviation.

        gain = std / σ and bias = mean - gain · μ, where μ and σ are the mean and the population
        standard deviation of the scores (Huang et al. 2023, "The N Implementation Details of RLHF
        with PPO", detail 6).

        Raises:
            ValueError: The scores are all equal, or one is not finite.
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
        """Return the normalized rewards, of the shape of `rewards`."""
        return self.gain * rewards + self.bias


@dataclass(frozen=True)
class ModelSource:
    """A reward model.

    The reward of a response is the normalized output at its last token. A process reward model
    rewards each step with the output at the last token of the step.
    """

    name: str
    """Name of the source in the configuration, for error messages."""
    model: ScalarModel
    """Model that all ranks run."""
    normalizer: RewardNormalizer = RewardNormalizer()
    """Normalization of the outputs."""
    step_separator: str | None = None
    """Text that ends a step; the end of the response ends the last step. None means that the model
    rewards whole responses."""
    step_probability: bool = RewardConfig.step_probability
    """Whether a step's reward is the sigmoid of the output."""

    def compute_raw_scores(self, batch: ScoringBatch) -> Tensor:
        """Return the rewards of the responses or of their steps. See RewardSource."""
        if batch.tokens is None or batch.lengths is None:
            raise ValueError("a reward model requires tokens, got only texts")
        values = self.model.values(batch.tokens, batch.lengths).double()
        if self.step_separator is not None:
            return self._compute_step_rewards(self.normalizer(values), batch, self.step_separator)
        scores = values.gather(1, batch.lengths[:, None] - 1)[:, 0]
        # Texts are decoded only for the error message.
        if not bool(scores.isfinite().all()):
            require_finite(self.name, scores.tolist(), batch.requests())
        return self.normalizer(scores)

    def _compute_step_rewards(self, values: Tensor, batch: ScoringBatch, separator: str) -> Tensor:
        """Return the rewards of the steps from the normalized outputs `[B, S]` of all tokens."""
        if batch.lengths is None or batch.find_token is None:
            raise ValueError("step rewards of a reward model require tokens, got only texts")
        rewards = values.sigmoid() if self.step_probability else values
        requests = batch.requests()
        steps = []
        for row, (request, length) in enumerate(zip(requests, batch.lengths.tolist(), strict=True)):
            ends = [match.end() for match in re.finditer(re.escape(separator), request.response)]
            token_indices = {batch.find_token(row, end) for end in ends}
            # Text after the last separator is a step that ends with the response.
            if not ends or request.response[ends[-1] :].strip():
                token_indices.add(length - 1)
            row_rewards = {index: float(rewards[row, index]) for index in token_indices}
            require_finite(self.name, list(row_rewards.values()), [request] * len(row_rewards))
            steps.append(row_rewards)
        return batch.build_step_rewards(steps)


def build_step_source(source: FunctionSource) -> StepSource:
    """Return the source of a function that rewards steps.

    Raises:
        ConfigError: The function does not exist.
    """
    key = f"{source.key}.function"
    return StepSource(
        source.name, resolve_step_scorer(source.function, key, source.function_timeout_s)
    )


def build_text_source(source: Source) -> TextSource:
    """Return the source of a scoring function or a remote scorer.

    Raises:
        ConfigError: The function does not exist.
        TypeError: The source cannot score texts.
    """
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
    """The reward: the weighted scores of all sources, combined to one score per response.

    The weighted score of a source is weight · (gain · raw score + bias).
    """

    parts: Sequence[tuple[Source, RewardSource]]
    """Settings and implementation of each source."""
    combine: str = RewardConfig.combine
    """Key of COMBINATIONS."""
    disagreement_weight: float = RewardConfig.disagreement_weight
    """Weight of the disagreement between sources in the combination."""

    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Return the scores `[B]`. See `compute_scores_and_steps`."""
        return self.compute_scores_and_parts(batch)[0]

    def compute_scores_and_parts(self, batch: ScoringBatch) -> tuple[Tensor, list[Tensor]]:
        """Return the scores, and the score of each source. See `compute_scores_and_steps`."""
        return self.compute_scores_and_steps(batch)[:2]

    def compute_scores_and_steps(
        self, batch: ScoringBatch
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Return the scores of the responses, their parts, and the rewards of steps.

        Collective; the results are the same on every rank.

        Returns:
            Finite scores, float32 `[B]`; NaN where every requested source abstained.
            The weighted score of each source, float32 `[B]` each; 0 where the source was not
            requested or abstained.
            The part of the scores that belongs to the last tokens of steps, float32 `[B, S]`, NaN
            elsewhere; None if no source rewards steps.

        Raises:
            ScoringError: A source failed, or a response has no source with a nonzero weight. Every
                rank raises the same error.
        """
        results: dict[int, _SourceScores] = {}
        # Sources of texts run first: if they fail, the models need not run.
        for index, (settings, source) in sorted(
            enumerate(self.parts), key=lambda part: isinstance(part[1][1], ModelSource)
        ):
            results[index] = _score_source(settings, source, batch)
        source_scores = [results[index] for index in range(len(results))]

        is_requested = torch.stack([result.is_requested for result in source_scores]).any(0)
        if not bool(is_requested.all()):
            request = batch.requests()[int(is_requested.int().argmin())]
            raise ScoringError(
                "reward.sources: no source has a nonzero weight for"
                f" task={request.metadata.get('task')}, prompt {request.prompt!r}"
            )

        has_score = torch.stack([result.has_score for result in source_scores])
        parts = torch.stack([_sum_steps(result.scores) for result in source_scores])
        combined = COMBINATIONS[self.combine](parts, has_score, self.disagreement_weight).float()
        has_any_score = has_score.any(0)

        # Weights and float32 can make a finite raw score infinite.
        float_parts = list(parts.float())
        names = [settings.name for settings, _ in self.parts]
        for name, numbers in zip(
            (*names, " + ".join(names)), (*float_parts, combined), strict=True
        ):
            is_valid = numbers.isfinite() | ~has_any_score
            if not bool(is_valid.all()):
                rows = (~is_valid).nonzero()[:, 0].tolist()
                requests = batch.requests()
                require_finite(name, numbers[rows].tolist(), [requests[row] for row in rows])
        scores = torch.where(has_any_score, combined, torch.nan)

        step_rewards = [result.scores for result in source_scores if result.scores.ndim > 1]
        if not step_rewards:
            return scores, float_parts, None
        steps = torch.stack(step_rewards)
        return (
            scores,
            float_parts,
            torch.where(steps.isnan().all(0), torch.nan, steps.nansum(0)).float(),
        )


def _sum_steps(scores: Tensor) -> Tensor:
    """Return scores `[B]` unchanged, and the sums `[B]` of rewards of steps `[B, S]`."""
    return scores if scores.ndim == 1 else scores.nansum(1)


@dataclass(frozen=True)
class _SourceScores:
    """The weighted scores of one source."""

    scores: Tensor
    """float64 `[B]`, 0 where the source has no score; of a source that rewards steps float64
    `[B, S]`, NaN where the source has no score."""
    is_requested: Tensor
    """bool `[B]`: whether the source's weight for the response is not 0."""
    has_score: Tensor
    """bool `[B]`: whether the source was requested and did not abstain."""


def _score_source(settings: Source, source: RewardSource, batch: ScoringBatch) -> _SourceScores:
    """Return the weighted scores of one source.

    Collective; the result is the same on every rank.
    """
    if not settings.task_weights:
        raw = source.compute_raw_scores(batch)
        weights = torch.full((len(raw),), settings.weight, dtype=torch.float64)
        rows = torch.arange(len(raw))
    else:
        weights = torch.tensor(
            [settings.get_weight(request.metadata) for request in batch.requests()],
            dtype=torch.float64,
        )
        # The source scores only the responses of tasks with a nonzero weight.
        rows = weights.nonzero()[:, 0]
        if not len(rows):
            none = torch.zeros(len(weights), dtype=torch.bool)
            return _SourceScores(weights, none, none)
        raw = source.compute_raw_scores(batch if len(rows) == len(weights) else batch.select(rows))

    is_requested = torch.zeros(len(weights), dtype=torch.bool).index_fill_(0, rows, True)
    has_abstained = (raw == ABSTAINED).view(len(raw), -1).any(1)
    has_score = is_requested.index_fill(0, rows[has_abstained], False)

    missing_score = 0.0 if raw.ndim == 1 else torch.nan
    scores = torch.full((len(weights), *raw.shape[1:]), missing_score, dtype=torch.float64)
    scored_rows = rows[~has_abstained]
    row_weights = weights[scored_rows].view(-1, *[1] * (raw.ndim - 1))
    scores[scored_rows] = row_weights * (settings.gain * raw[~has_abstained] + settings.bias)
    return _SourceScores(scores, is_requested, has_score)
