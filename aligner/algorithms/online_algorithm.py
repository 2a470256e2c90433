"""An online algorithm: its selection, advantage estimator, loss and KL penalty."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aligner.algorithms.advantages import (
    AdvantageEstimator,
    group_whiten,
    groups_by_size,
    masked_whiten,
)
from aligner.algorithms.distillation import distillation_advantages, distillation_loss
from aligner.algorithms.extension import find_estimator, find_loss, find_selection
from aligner.algorithms.kl import approximate_kl
from aligner.algorithms.policy_losses import LossContext, OnlineLoss, ratio_denominator
from aligner.algorithms.score_shaping import ScoreShaping, penalized_rewards
from aligner.algorithms.selections import SELECTIONS, CustomSelection, ScoreSelection
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
    get_min_scores,
    get_overlong_buffer,
    get_rows_per_group,
    needs_logprobs_before_update,
)


@dataclass(frozen=True)
class OnlineAlgorithm:
    """The computations that turn the samples of a step into the loss of the policy.

    `build_online_algorithm` builds it from the configuration. The trainer calls
    `build_scored_samples`, `build_experience`, `iterate_minibatches` and `build_loss` in this
    order.
    """

    settings: AlgorithmConfig
    """Section `algorithm` of the configuration."""
    select_by_score: ScoreSelection | None
    """Selection of samples before the log-probs are computed; None keeps all samples."""
    select: CustomSelection | None
    """Custom selection, which gets log-probs, rewards and values; None keeps all samples."""
    estimate: AdvantageEstimator
    """Estimator of the advantages and, with a critic, of the returns."""
    policy_loss: OnlineLoss
    """Loss without the KL penalty and the entropy bonus."""
    shaping: ScoreShaping
    """Penalties on the scores."""
    group_size: int
    """Number of consecutive rows that the loss compares and that must stay in the same micro-batch;
    1 if the loss compares no rows."""
    min_scores_per_prompt: int
    """Number of samples of a prompt that must have a score; otherwise the step trains on none of
    the prompt's samples."""
    max_response_tokens: int
    """Largest length of a response, in tokens."""
    needs_old_logprobs: bool
    """Whether the policy's log-probs must be computed before the update. If false, the old
    log-probs may be NaN, and the loss uses its own log-probs instead."""
    teacher: TeacherConfig | None = None
    """Section `teacher` of the configuration; None without a teacher."""

    def build_scored_samples(
        self,
        batch: SampleBatch,
        scores: Tensor,
        values: Tensor | None,
        old_logprobs: Tensor,
        reference_logprobs: Tensor,
        kl_coefficient: float,
        teacher_logprobs: Tensor | None = None,
    ) -> ScoredSamples:
        """Return the selected samples with the rewards of their tokens.

        The reward of a token is its KL penalty, if the penalty belongs to the reward, plus the
        reward of the environment. The last response token also gets the score minus the sum of the
        environment's rewards, because the score already contains this sum. A branch gets the score
        of its episode.

        Args:
            batch: Samples, one row for each sample and each branch.
            scores: Score of each episode, after penalties.
            values: Values `[B, S]` of the critic; None without a critic.
            old_logprobs: Log-probs `[B, S-1]` of the trainer before the update.
            reference_logprobs: Log-probs `[B, S-1]` of the reference model.
            kl_coefficient: Current weight of the KL penalty.
            teacher_logprobs: Log-probs `[B, S-1]` of the teacher; None without a teacher.
        """
        scores = scores[batch.episode_indices]

        coefficient = 0.0 if self._is_kl_in_loss else kl_coefficient
        kl = torch.zeros_like(reference_logprobs)
        if coefficient:
            kl = approximate_kl(old_logprobs, reference_logprobs, self.settings.kl_estimator)

        # The last value of a truncated response estimates the rewards that it would still have
        # received.
        cut_values = None
        if values is not None and self.settings.bootstrap_cut:
            last_values = values.gather(1, batch.lengths[:, None] - 1)[:, 0]
            cut_values = torch.where(has_ended(batch) | batch.is_branch, 0.0, last_values)

        turn_rewards = batch.turn_rewards
        final_rewards = scores if turn_rewards is None else scores - turn_rewards.sum(1)
        rewards = penalized_rewards(final_rewards, kl, coefficient, batch.mask)
        samples = ScoredSamples(
            **vars(batch),
            scores=scores,
            rewards=rewards if turn_rewards is None else rewards + turn_rewards,
            values=None if values is None else torch.where(batch.mask, values[:, :-1], 0.0),
            old_logprobs=old_logprobs,
            reference_logprobs=reference_logprobs,
            cut_values=cut_values,
            teacher_logprobs=teacher_logprobs,
        )
        return samples if self.select is None else samples.select(self.select(samples))

    def build_experience(self, samples: ScoredSamples) -> Experience:
        """Return the samples with their advantages and returns `[B, S-1]`.

        The steps are, in this order: whitening of the rewards, which keeps their mean; estimation
        of the advantages; whitening of the advantages, which sets their mean to 0 (Huang et al.
        2023, "The N Implementation Details of RLHF with PPO", details 10 and 11); addition of the
        teacher's advantages, in nats. Finally `algorithm.overlong_filter` removes the rows whose
        response was truncated, possibly all rows.
        """
        settings = self.settings
        mask = samples.mask
        if settings.whiten_rewards:
            samples = replace(
                samples, rewards=masked_whiten(samples.rewards, mask, shift_mean=False)
            )

        estimate = self.estimate(samples, settings)
        advantages, returns = estimate if isinstance(estimate, tuple) else (estimate, None)
        advantages = torch.where(
            mask, advantages[:, None] if advantages.ndim == 1 else advantages, 0.0
        ).to(samples.rewards.dtype)

        if settings.whiten_advantages and settings.whiten_over == "prompt":
            if samples.episodes is None:
                whitened = torch.zeros_like(advantages)
                for rows, size in groups_by_size(samples.groups):
                    whitened[rows] = group_whiten(advantages[rows], mask[rows], size)
                advantages = whitened
            else:
                # With branches, the prompts have different numbers of rows.
                for rows in [samples.groups == group for group in samples.groups.unique()]:
                    advantages[rows] = masked_whiten(advantages[rows], mask[rows])
        elif settings.whiten_advantages:
            advantages = masked_whiten(advantages, mask)

        if (
            samples.teacher_logprobs is not None
            and self.teacher is not None
            and self.teacher.loss == "advantage"
        ):
            # As in the ratio of the loss, the student is the policy at the beginning of the update
            # or, with algorithm.ratio_against=sampler, the engine's policy.
            student_logprobs = ratio_denominator(samples, settings)
            teacher_advantages = distillation_advantages(
                student_logprobs, samples.teacher_logprobs, mask, self.teacher.weight
            )
            advantages = advantages + teacher_advantages.to(advantages.dtype)

        experience = Experience(**vars(samples), advantages=advantages, returns=returns)
        return (
            experience.select(has_ended(samples).nonzero()[:, 0])
            if settings.overlong_filter
            else experience
        )

    def iterate_minibatches(
        self, experience: Experience, epochs: int, count: int, seed: int
    ) -> Iterator[Experience]:
        """Yield the minibatches of `epochs` passes over the rows.

        Each pass shuffles the rows and splits them into at most `count` minibatches. Rows that the
        loss compares stay together. The order depends only on the seed.
        """
        generator = torch.Generator().manual_seed(seed)
        groups = torch.arange(experience.tokens.shape[0]).view(-1, self.group_size)
        for _ in range(epochs):
            for selected in torch.randperm(len(groups), generator=generator).tensor_split(
                min(count, len(groups))
            ):
                yield experience.select(groups[selected].flatten())

    def loss_denominator(self, minibatch: Experience) -> float:
        """Return the divisor of the loss's sums.

        It is the number of trained tokens of the minibatch, or the number of its rows if the loss
        compares rows.
        """
        return float(minibatch.tokens.shape[0] if self.group_size > 1 else minibatch.mask.sum())

    def build_loss(self, minibatch: Experience, kl_coefficient: float) -> PolicyLoss[Experience]:
        """Return the loss function for parts of a minibatch, with the current KL coefficient."""
        tokens_per_row = float(minibatch.mask.sum()) / minibatch.tokens.shape[0]
        return functools.partial(
            self._compute_loss, tokens_per_row=tokens_per_row, kl_coefficient=kl_coefficient
        )

    @property
    def _is_kl_in_loss(self) -> bool:
        return self.settings.kl_placement == "loss"

    def _compute_loss(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        rows: Experience,
        denominator: float,
        *,
        tokens_per_row: float,
        kl_coefficient: float,
    ) -> tuple[Tensor, Stats]:
        """Return the contribution of some rows to the minibatch's loss, and its statistics.

        Args:
            logprobs: Log-probs `[B, S-1]` of the policy, differentiable, 0 outside the mask.
            entropy: Entropies `[B, S-1]` of the policy, differentiable, 0 outside the mask.
            rows: Part of the minibatch.
            denominator: Result of `loss_denominator` for the minibatch.
            tokens_per_row: Mean number of trained tokens per row of the minibatch.
            kl_coefficient: Current weight of the KL penalty.
        """
        # NaN means that the old log-probs were not computed separately, because the step has only
        # one update. The update starts with the old policy, so the current log-probs are the old
        # log-probs.
        rows = replace(
            rows,
            old_logprobs=torch.where(
                rows.old_logprobs.isnan(), logprobs.detach(), rows.old_logprobs
            ),
        )
        mask = rows.mask
        aggregation = self.settings.aggregation

        weights = None
        if aggregation == "sequence":
            # The weights have mean 1 over the minibatch's tokens, so that the mean over tokens
            # becomes the mean of the responses' means.
            weights = (tokens_per_row / mask.sum(1, keepdim=True).clamp(min=1)).expand(mask.shape)
        # `sum`: the sum over tokens divided by the number of rows. `constant`: `sum` divided by the
        # maximum response length (Liu et al. 2025, Dr. GRPO). Only the loss is scaled; the
        # statistics remain means over tokens.
        scale = {"sum": tokens_per_row, "constant": tokens_per_row / self.max_response_tokens}.get(
            aggregation, 1.0
        )

        context = LossContext(self.settings, kl_coefficient, denominator, weights)
        loss, stats = self.policy_loss(logprobs, rows, context)

        # A loss that compares rows already contains the reference model.
        if self._is_kl_in_loss and self.group_size == 1:
            reference = torch.where(mask, rows.reference_logprobs, 0.0)
            kl = context.total(
                approximate_kl(logprobs, reference, self.settings.kl_estimator), mask
            )
            loss = loss + kl_coefficient * kl
            stats["kl_loss"] = kl.detach()

        if self.teacher is not None and rows.candidates is not None:
            teacher_loss, teacher_stats = distillation_loss(
                rows, self.teacher, lambda terms: context.total(terms, mask)
            )
            loss = loss + teacher_loss
            stats = stats | teacher_stats

        if self.settings.entropy_coefficient:
            loss = loss - self.settings.entropy_coefficient * context.total(entropy, mask)

        loss = scale * loss
        return loss, stats | {"loss": loss.detach()}


def has_ended(samples: SampleBatch) -> Tensor:
    """Return which responses are complete, that is, not truncated, bool `[B]`."""
    return samples.finish_reasons == FINISH_REASONS.index("stop")


def build_online_algorithm(config: Config) -> OnlineAlgorithm:
    """Return the algorithm that the configuration describes.

    `aligner.checks.algorithm` has already verified that its parts are compatible.

    Raises:
        ConfigError: A custom function cannot be imported.
    """
    settings = config.algorithm
    return OnlineAlgorithm(
        settings=settings,
        select_by_score=SELECTIONS.get(settings.train_on),
        select=find_selection(settings.train_on),
        estimate=find_estimator(settings.advantage),
        policy_loss=find_loss(settings.loss),
        shaping=build_shaping(config),
        group_size=get_rows_per_group(config),
        min_scores_per_prompt=get_min_scores(config),
        max_response_tokens=config.rollout.max_response_tokens,
        needs_old_logprobs=needs_logprobs_before_update(config),
        teacher=config.teacher if config.has_teacher else None,
    )


def build_shaping(config: Config) -> ScoreShaping:
    """Return the penalties on scores. They apply before the scores are compared or used in
    training."""
    settings = config.algorithm
    return ScoreShaping(
        missing_end_score=config.reward.missing_end_score,
        max_response_tokens=config.rollout.max_response_tokens,
        overlong_buffer=get_overlong_buffer(config),
        length_penalty=settings.length_penalty,
        target_length=settings.target_length,
    )
