"""An online algorithm as a composition: which samples it learns from, their advantages, its loss,
and where the KL goes."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aligner.algorithms.advantages import Estimate, group_whiten, groups_by_size, masked_whiten
from aligner.algorithms.distillation import distillation_advantages, distillation_loss
from aligner.algorithms.extension import find_estimator, find_loss, find_selection
from aligner.algorithms.kl import approximate_kl
from aligner.algorithms.policy_losses import LossContext, OnlineLoss, ratio_denominator
from aligner.algorithms.score_shaping import ScoreShaping, penalized_rewards
from aligner.algorithms.selections import SELECTIONS, Select, SelectByScore
from aligner.data.types import (
    FINISH_REASONS,
    Experience,
    PolicyLoss,
    SampleBatch,
    ScoredSamples,
    Stats,
)
from aligner.schema import AlgorithmConfig, Config, TeacherConfig
from aligner.schema.derived import (
    asks_before_update,
    least_scores,
    overlong_buffer,
    rows_together,
)


@dataclass(frozen=True)
class OnlineAlgorithm:
    """What a step makes of its samples; built from the configuration by
    `build_online_algorithm`."""

    settings: AlgorithmConfig
    select_by_score: SelectByScore | None
    """Leaves samples out before log-probs are computed; None: none."""
    select: Select | None
    """A user's own, which sees log-probs, rewards and values."""
    estimate: Estimate
    policy_loss: OnlineLoss
    """Without a KL penalty and an entropy bonus."""
    shaping: ScoreShaping
    group: int
    """The loss must see so many rows in a row together."""
    least_scores: int
    """Number of samples of a prompt that must have a score for any of them to be trained on."""
    max_response_tokens: int
    asks_before_update: bool
    """Whether old log-probs are wanted before a step's update; where not, and NaN is given, a loss
    takes its own."""
    teacher: TeacherConfig | None = None
    """How what a teacher says is learned from; None without one."""

    def scored_samples(
        self,
        batch: SampleBatch,
        scores: Tensor,
        values: Tensor | None,
        old_logprobs: Tensor,
        reference_logprobs: Tensor,
        kl_coefficient: float,
        teacher_logprobs: Tensor | None = None,
    ) -> ScoredSamples:
        """Scores, one an episode, to rewards [B, S-1], and the rows that are learned from; values
        are [B, S] with a critic.

        A KL penalty in the reward is taken token by token, the score on the last response token,
        but for what an environment gave for others. A branch's last token has the score of its
        episode.
        """
        scores = scores[batch.places]
        coefficient = 0.0 if self._kl_in_loss else kl_coefficient
        kl, cut_values = torch.zeros_like(reference_logprobs), None
        if coefficient:
            kl = approximate_kl(old_logprobs, reference_logprobs, self.settings.kl_estimator)
        if values is not None and self.settings.bootstrap_cut:
            after_last = values.gather(1, batch.lengths[:, None] - 1)[:, 0]
            cut_values = torch.where(has_ended(batch) | batch.is_branch, 0.0, after_last)
        turns = batch.turn_rewards
        at_end = scores if turns is None else scores - turns.sum(1)
        rewards = penalized_rewards(at_end, kl, coefficient, batch.mask)
        samples = ScoredSamples(
            **vars(batch),
            scores=scores,
            rewards=rewards if turns is None else rewards + turns,
            values=None if values is None else torch.where(batch.mask, values[:, :-1], 0.0),
            old_logprobs=old_logprobs,
            reference_logprobs=reference_logprobs,
            cut_values=cut_values,
            teacher_logprobs=teacher_logprobs,
        )
        return samples if self.select is None else samples.select(self.select(samples))

    def experience(self, samples: ScoredSamples) -> Experience:
        """The samples with their advantages and returns [B, S-1].

        Rewards are whitened without moving their mean, advantages with (Huang et al. 2023, "The N
        Implementation Details of RLHF with PPO", details 10 and 11). What a teacher adds to the
        advantages of tokens is added then, in nats. With `overlong_filter` rows that were cut are
        left out last, maybe all of them.
        """
        settings, mask = self.settings, samples.mask
        if settings.whiten_rewards:
            samples = replace(
                samples, rewards=masked_whiten(samples.rewards, mask, shift_mean=False)
            )
        found = self.estimate(samples, settings)
        estimated, returns = found if isinstance(found, tuple) else (found, None)
        estimated = torch.where(
            mask, estimated[:, None] if estimated.ndim == 1 else estimated, 0.0
        ).to(samples.rewards.dtype)
        if settings.whiten_advantages and settings.whiten_over == "prompt":
            if samples.episodes is None:
                whitened = torch.zeros_like(estimated)
                for rows, size in groups_by_size(samples.groups):
                    whitened[rows] = group_whiten(estimated[rows], mask[rows], size)
                estimated = whitened
            else:  # with branches prompts have different numbers of rows
                for rows in [samples.groups == group for group in samples.groups.unique()]:
                    estimated[rows] = masked_whiten(estimated[rows], mask[rows])
        elif settings.whiten_advantages:
            estimated = masked_whiten(estimated, mask)
        if (
            samples.teacher_logprobs is not None
            and self.teacher is not None
            and self.teacher.loss == "advantage"
        ):
            student = ratio_denominator(samples, settings)
            distilled = distillation_advantages(
                student, samples.teacher_logprobs, mask, self.teacher.weight
            )
            estimated = estimated + distilled.to(estimated.dtype)
        experience = Experience(**vars(samples), advantages=estimated, returns=returns)
        return (
            experience.select(has_ended(samples).nonzero()[:, 0])
            if settings.overlong_filter
            else experience
        )

    def minibatches(
        self, experience: Experience, epochs: int, count: int, seed: int
    ) -> Iterator[Experience]:
        """`epochs` passes over the rows, each reshuffled and cut into `count` minibatches; a
        function of the seed alone.

        Rows that the loss must see together stay together.
        """
        generator = torch.Generator().manual_seed(seed)
        members = torch.arange(experience.tokens.shape[0]).view(-1, self.group)
        for _ in range(epochs):
            for chosen in torch.randperm(len(members), generator=generator).tensor_split(
                min(count, len(members))
            ):
                yield experience.select(members[chosen].flatten())

    def denominator(self, minibatch: Experience) -> float:
        """What the loss's sums over a minibatch are divided by: its tokens, or its rows where the
        loss compares these."""
        return float(minibatch.tokens.shape[0] if self.group > 1 else minibatch.mask.sum())

    def loss(self, minibatch: Experience, kl_coefficient: float) -> PolicyLoss[Experience]:
        """The policy's loss on parts of a minibatch, under a KL coefficient."""
        tokens_a_row = float(minibatch.mask.sum()) / minibatch.tokens.shape[0]
        return functools.partial(
            self._loss, tokens_a_row=tokens_a_row, kl_coefficient=kl_coefficient
        )

    @property
    def _kl_in_loss(self) -> bool:
        return self.settings.kl_placement == "loss"

    def _loss(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        rows: Experience,
        denominator: float,
        *,
        tokens_a_row: float,
        kl_coefficient: float,
    ) -> tuple[Tensor, Stats]:
        rows = replace(
            rows,
            old_logprobs=torch.where(
                rows.old_logprobs.isnan(), logprobs.detach(), rows.old_logprobs
            ),
        )
        mask, aggregation = rows.mask, self.settings.aggregation
        weights = None
        if aggregation == "sequence":
            # Of mean 1 over the minibatch's tokens, so that the mean over tokens becomes that of
            # the responses' means.
            weights = (tokens_a_row / mask.sum(1, keepdim=True).clamp(min=1)).expand(mask.shape)
        # Scaling the loss alone leaves statistics what they are, means over tokens.
        scale = {"sum": tokens_a_row, "constant": tokens_a_row / self.max_response_tokens}.get(
            aggregation, 1.0
        )
        context = LossContext(self.settings, kl_coefficient, denominator, weights)
        loss, stats = self.policy_loss(logprobs, rows, context)
        if self._kl_in_loss and self.group == 1:
            reference = torch.where(mask, rows.reference_logprobs, 0.0)
            kl = context.total(
                approximate_kl(logprobs, reference, self.settings.kl_estimator), mask
            )
            loss = loss + kl_coefficient * kl
            stats["kl_loss"] = kl.detach()
        if self.teacher is not None and rows.candidates is not None:
            term, seen = distillation_loss(
                rows, self.teacher, lambda terms: context.total(terms, mask)
            )
            loss, stats = loss + term, stats | seen
        if self.settings.entropy_coefficient:
            loss = loss - self.settings.entropy_coefficient * context.total(entropy, mask)
        loss = scale * loss
        return loss, stats | {"loss": loss.detach()}


def has_ended(samples: SampleBatch) -> Tensor:
    """bool [B]: which responses have an end, and were not cut."""
    return samples.finish_reasons == FINISH_REASONS.index("stop")


def build_online_algorithm(config: Config) -> OnlineAlgorithm:
    """The composition that the configuration describes; `aligner.checks.algorithm` has made sure
    that its parts fit.

    Raises ConfigError for a function of the user's own that is not there.
    """
    settings = config.algorithm
    return OnlineAlgorithm(
        settings=settings,
        select_by_score=SELECTIONS.get(settings.train_on),
        select=find_selection(settings.train_on),
        estimate=find_estimator(settings.advantage),
        policy_loss=find_loss(settings.loss),
        shaping=build_shaping(config),
        group=rows_together(config),
        least_scores=least_scores(config),
        max_response_tokens=config.rollout.max_response_tokens,
        asks_before_update=asks_before_update(config),
        teacher=config.teacher if config.has_teacher else None,
    )


def build_shaping(config: Config) -> ScoreShaping:
    """What becomes of a run's scores before it learns from them, or compares them."""
    settings = config.algorithm
    return ScoreShaping(
        missing_end_score=config.reward.missing_end_score,
        max_response_tokens=config.rollout.max_response_tokens,
        overlong_buffer=overlong_buffer(config),
        length_penalty=settings.length_penalty,
        target_length=settings.target_length,
    )
