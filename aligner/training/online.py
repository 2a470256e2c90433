"""Online trainer: one training step, from generation to the policy and critic updates."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from aligner.algorithms.kl import KLController
from aligner.algorithms.online_algorithm import OnlineAlgorithm
from aligner.data.fencing import fenced_write
from aligner.data.pass_rates import PassRates
from aligner.data.prompts import PromptStream
from aligner.data.types import Experience, SampleBatch, TeacherTopK
from aligner.megatron.policy import Policy
from aligner.observability.timeline import PhaseTimer
from aligner.paths import run_paths
from aligner.schema import Config
from aligner.schema.derived import WITHOUT_RATIO, weights_version
from aligner.schema.reward_sources import has_step_rewards, source_names
from aligner.servers.critic_client import INITIAL, CriticState
from aligner.training.evaluator import Evaluations
from aligner.training.loop import TrainingLoop
from aligner.training.rollout_builder import RolloutBatch
from aligner.training.rollout_pipeline import RolloutPipeline
from aligner.training.run_checkpoints import TrainingState
from aligner.training.services import Services, together
from aligner.training.step_metrics import (
    StepResult,
    draw_metrics,
    experience_metrics,
    publish_metrics,
    rollout_metrics,
    sequence_kl,
    staleness_metrics,
    update_metrics,
)
from aligner.training.step_samples import StepSamples

_log = logging.getLogger(__name__)


def critic_states(checkpoints: Sequence[TrainingState]) -> list[CriticState]:
    """Return the states of the critic in these checkpoints; its initial state if there are none."""
    return [CriticState(state.step, state.critic_updates) for state in checkpoints] or [INITIAL]


def announcement(config: Config, prompts: int) -> str:
    """Return the log line that describes the steps of an online run.

    The line has the form of an offline run's. With several epochs per step it warns about losses
    without an importance ratio.

    Args:
        prompts: Number of prompts in the data.
    """
    size = config.rollout.prompts_per_step
    steps = config.run.steps
    settings = config.algorithm
    message = (
        f"online: {prompts} prompts; {size} prompts per step, {prompts / size:.1f} steps per epoch;"
        f" run.steps={steps} is {steps * size / prompts:.2f} epochs"
    )
    if settings.epochs > 1 and settings.loss in WITHOUT_RATIO:
        message += (
            f"; algorithm.epochs={settings.epochs}: loss={settings.loss} has no importance ratio;"
            " only a KL term keeps the policy close to the policy that generated the samples"
        )
    return message


@dataclass(kw_only=True)
class OnlineTrainer(TrainingLoop):
    """Training loop of a policy that learns from its own samples; see `aligner.training.setup`."""

    policy: Policy
    pipeline: RolloutPipeline
    services: Services
    algorithm: OnlineAlgorithm
    prompts: PromptStream
    pass_rates: PassRates
    """Pass rates per prompt after the completed steps."""
    kl_controller: KLController
    evaluations: Evaluations | None

    def step(self, step: int, timer: PhaseTimer) -> StepResult:
        """Generate samples, update policy and critic, and return the metrics of the step."""
        with timer.phase("generate"):
            rollout = self.pipeline.take()  # requests scores as soon as each part is complete

        batch = rollout.batch
        # Row ids identify the rows after selection, so that the sample files can show what was
        # trained on.
        sampled_rollout = rollout = replace(
            rollout, batch=replace(batch, row_ids=torch.arange(len(batch.tokens)))
        )

        chosen = rollout
        if self.algorithm.select_by_score is not None:
            with timer.phase("server_wait"):
                samples_per_prompt = self.config.rollout.samples_per_prompt
                chosen = rollout.select(
                    self.algorithm.select_by_score(self._scores(rollout), samples_per_prompt)
                )

        learning_metrics, experience = (
            self._learn(step, chosen, timer) if chosen.samples else ({}, None)
        )
        self._taught(rollout, rollout.batch)  # reads the answer if nothing was trained
        rollout = rollout.scored()

        processed = {"samples": len(rollout.samples), "tokens": int(rollout.batch.lengths.sum())}
        sampled = StepSamples.of(sampled_rollout, experience)
        pass_metrics = self._count_passes(sampled)

        metrics = (
            learning_metrics
            | pass_metrics
            | rollout_metrics(
                rollout,
                self.config.rollout,
                source_names(self.config.reward),
                self.algorithm.min_scores_per_prompt,
            )
        )

        is_partial_publish = self.config.engine.publish != "whole" and self._changes_weights(step)
        if is_partial_publish and (stats := self.pipeline.publish_stats) is not None:
            metrics |= publish_metrics(stats)
        return StepResult(metrics, processed, rollout, rollout.scores.result(), sampled)

    def _count_passes(self, sampled: StepSamples) -> dict[str, float]:
        """Update the pass rates, which determine the prompts of later steps, and return their
        metrics."""
        data = self.config.data
        earlier_rates = self.pass_rates
        outcomes = sampled.draws(self.prompts.locate, data.pass_threshold)
        self.pass_rates = earlier_rates.with_outcomes(outcomes, data.curriculum.decay)
        self.pipeline.pass_rates = self.pass_rates
        return draw_metrics(outcomes, earlier_rates, self.pass_rates)

    def _learn(
        self, step: int, rollout: RolloutBatch, timer: PhaseTimer
    ) -> tuple[dict[str, float], Experience | None]:
        """Build the experience from the samples and train on it.

        Returns:
            Metrics, and the experience; ({}, None) if no samples remain to train on.
        """
        algorithm = self.algorithm
        coefficient = self.kl_controller.coefficient
        if algorithm.group_size > 1:  # the loss compares samples, not branches
            rollout = rollout.without_branches()

        batch = rollout.batch
        with timer.phase("logprobs"):
            # Replaying expert routing and restricting the log-probs to the sampling support makes
            # them comparable with the log-probs of the engine.
            inputs = (batch.tokens, batch.lengths)
            kept_tokens = batch.kept
            routes = batch.routes
            if self._asks_before_update(step):
                old_logprobs = self.policy.logprobs(
                    *inputs, mask=batch.mask, kept_tokens=kept_tokens, routes=routes
                )
            else:
                old_logprobs = torch.full_like(batch.engine_logprobs, torch.nan)
            # The reference pass below overwrites this value.
            routing_mismatch = self.policy.runner.routing_mismatch
            reference_logprobs = self.policy.reference_logprobs(
                *inputs, mask=batch.mask, kept_tokens=kept_tokens, routes=routes
            )

        with timer.phase("server_wait"):
            rows = rollout.scored_rows(algorithm.min_scores_per_prompt)
            # Samples without a score are removed only here, because the log-probs are computed
            # while the reward server works.
            if len(rows) < len(rollout.samples):
                batch_rows = batch.with_branches(rows)
                rollout = rollout.select(rows)
                old_logprobs = old_logprobs[batch_rows]
                reference_logprobs = reference_logprobs[batch_rows]
                batch = rollout.batch
            scores = self._scores(rollout)
            if has_step_rewards(self.config.reward):
                batch = batch.with_step_rewards(rollout.scores.steps(batch.tokens.shape[1] - 1))
            values = (
                rollout.values.result(width=batch.tokens.shape[1])
                if self.config.algorithm.has_critic
                else None
            )
            batch, teacher_logprobs = self._taught(rollout, batch)

        samples = algorithm.build_scored_samples(
            batch, scores, values, old_logprobs, reference_logprobs, coefficient, teacher_logprobs
        )
        if not len(samples.tokens):
            return {}, None
        experience = algorithm.build_experience(samples)
        if not len(experience.tokens):
            return {}, None

        stats, experience = self._update(step, experience, timer)
        version = weights_version(self.config, step)
        stats |= (
            experience_metrics(experience)
            | staleness_metrics(experience, version)
            | {"kl/coef": coefficient}
        )

        if batch.routes is not None:
            is_computed_before_update = self._asks_before_update(step)
            stats["mismatch/expert_routing"] = (
                routing_mismatch
                if is_computed_before_update
                else self.policy.runner.routing_mismatch
            )

        if step >= self.config.algorithm.policy_starts_after:
            self.kl_controller.update(sequence_kl(experience), len(experience.tokens))
        return stats, experience

    def _asks_before_update(self, step: int) -> bool:
        """Return whether log-probs are computed separately before the update.

        If the step has only one update, this update's forward pass returns them.
        """
        return self.algorithm.needs_old_logprobs or step < self.config.algorithm.policy_starts_after

    def _taught(
        self, rollout: RolloutBatch, batch: SampleBatch
    ) -> tuple[SampleBatch, Tensor | None]:
        """Wait for the teacher's log-probs of the batch's rows.

        Returns:
            The batch, with the teacher's candidate tokens if the teacher returns its top-k
            log-probs; and the teacher's log-probs [B, S-1] of the response tokens, None without a
            teacher.
        """
        if not self.config.has_teacher:
            return batch, None
        teacher_rows = rollout.teacher_logprobs.result(batch.tokens.shape[1] - 1)
        if teacher_rows.ndim == 2:
            return batch, teacher_rows
        top_k_logprobs = TeacherTopK.unpack(teacher_rows)
        return (
            replace(
                batch, candidates=top_k_logprobs.ids, candidate_targets=top_k_logprobs.outcomes
            ),
            top_k_logprobs.logprobs,
        )

    def _scores(self, rollout: RolloutBatch) -> Tensor:
        """Wait for the scores [B] and return them after shaping."""
        return self.algorithm.shaping(rollout.scores.result(), rollout.samples)

    def _update(
        self, step: int, experience: Experience, timer: PhaseTimer
    ) -> tuple[dict[str, float], Experience]:
        """Update the policy, and concurrently the critic on its own devices.

        Returns:
            Metrics of the updates, and the experience with the log-probs from before the update and
            the entropies from the first update of each row.
        """
        settings = self.config.algorithm
        seed = self.config.seed * 1_000_003 + step
        minibatches = list(
            self.algorithm.iterate_minibatches(
                experience, settings.epochs, settings.minibatches, seed
            )
        )

        # Send the critic's batches first: its ranks train while the policy trains.
        critic = self.services.train_critic(
            [
                (part.tokens, part.returns, part.values, part.mask)
                for part in minibatches
                if part.values is not None and part.returns is not None
            ]
        )

        logprobs_before = (
            None if self._asks_before_update(step) else torch.empty_like(experience.old_logprobs)
        )
        entropies = None
        if self.config.logging.samples_mib and experience.row_ids is not None:
            entropies = torch.full(
                (int(experience.row_ids.max()) + 1, experience.mask.shape[1]), torch.nan
            )

        with timer.phase("train"):
            policy_updates = (
                self._train_policy(minibatches, logprobs_before, entropies)
                if step >= settings.policy_starts_after
                else []
            )

        if logprobs_before is not None:
            # There is only one update, and its minibatch contains all rows.
            experience = replace(minibatches[0], old_logprobs=logprobs_before)
        if entropies is not None:
            experience = replace(experience, entropies=entropies[experience.row_ids])

        with timer.phase("server_wait"):
            critic_updates = critic.result()

        update_counts = {"policy/updates": float(len(policy_updates))}
        return (
            update_counts
            | update_metrics("policy", policy_updates)
            | update_metrics("value", critic_updates),
            experience,
        )

    def _train_policy(
        self, minibatches: Sequence[Experience], before: Tensor | None, entropies: Tensor | None
    ) -> list[dict[str, float]]:
        """Run one optimizer step per minibatch, until the KL exceeds `algorithm.early_stop_kl`.

        Args:
            before: Output for the log-probs from before the update, like `logprobs_out` of
                `Policy.train`; None if they are known.
            entropies: Output for the entropies of each row's first update, indexed by `row_ids`;
                initially NaN. None if they are not recorded.
        """
        algorithm = self.algorithm
        limit = self.config.algorithm.early_stop_kl
        updates: list[dict[str, float]] = []

        for part in minibatches:
            loss = algorithm.build_loss(part, self.kl_controller.coefficient)
            part_entropies = None if entropies is None else torch.empty(part.mask.shape)
            stats = self.policy.train(
                part,
                loss,
                denominator=algorithm.loss_denominator(part),
                group_size=algorithm.group_size,
                logprobs_out=before,
                entropies_out=part_entropies,
            )
            if entropies is not None and part_entropies is not None:
                earlier = entropies[part.row_ids]
                entropies[part.row_ids] = torch.where(earlier.isnan(), part_entropies, earlier)
            updates.append(stats)
            if limit is not None and stats.get("approx_kl", 0.0) > limit:
                break
        return updates

    def resume(self, saved: Sequence[TrainingState]) -> int:
        """Restore policy, critic, KL coefficient, pipeline and pass rates from the last
        checkpoint."""
        self.services.start(self.config.server.start_timeout_s, critic_states(saved))
        if self.recorder is not None:
            _log.info("%s", announcement(self.config, len(self.prompts)))
        if not saved:
            return 0

        state = saved[-1]
        paths = run_paths(self.config)
        self.policy.load(paths.checkpoint(state.step, "policy"), verified=True)
        self.kl_controller.resume(state.kl_coefficient)
        self.pipeline.resume(paths.checkpoint(state.step, "rollouts"), state.step, state.position)
        self._load_rates(paths.checkpoint(state.step, "pass_rates"))
        return state.step

    def begin(self, first: int) -> None:
        """Publish the weights that the run starts with to the engine."""
        self.timeline.begin_step(first + 1 if first else 0)
        with self.timeline.span("snapshot" if self.pipeline.is_ahead else "publish"):
            self.pipeline.publish_weights(version=weights_version(self.config, first))

    def publish(self, version: int, timer: PhaseTimer, *, last: bool) -> None:
        """Publish the weights of `version` to the engine; in an asynchronous run, concurrently with
        the next steps.

        The engine keeps its weights if the step did not change them.
        """
        if self._changes_weights(version):
            with timer.phase("snapshot" if self.pipeline.is_ahead else "reshard"):
                self.pipeline.publish_weights(version=version, last=last)
        self.services.assert_settled(is_ahead=self.pipeline.is_ahead)

    def _changes_weights(self, version: int) -> bool:
        """Return whether the engine receives weights after `version` steps; True for the initial
        weights."""
        return weights_version(self.config, version) == version

    def is_evaluated(self, step: int, *, saves: bool) -> bool:
        """Return whether an evaluation is due: at the interval of `evaluation.every`, and for the
        initial and the last weights."""
        return self.evaluations is not None and self.evaluations.is_due(step)

    def begin_evaluation(self, step: int) -> bool:
        """Queue the evaluation's generation after the samples of the same weights, with
        `evaluation.asynchronous`."""
        if self.evaluations is None or not self.config.evaluation.asynchronous:
            return False
        self.evaluations.begin(step, self.pipeline.draw_beside(self.evaluations.draw))
        return True

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of the responses to the held-out prompts."""
        assert self.evaluations is not None
        if not self.evaluations.has_begun:
            self.pipeline.await_published()
        metrics = self.evaluations.evaluate(step)
        self.services.assert_settled(is_ahead=self.pipeline.is_ahead)
        return metrics

    def begin_save(self, step: int) -> TrainingState:
        """Start to save policy, critic, pass rates and the samples that were generated ahead."""
        self.policy.begin_save(run_paths(self.config).checkpoint(step, "policy"))
        self.pipeline.begin_save(step)
        together(lambda: None if self.recorder is None else self._write_rates(step))
        critic = self.services.begin_critic_checkpoint(step)
        return TrainingState(
            step,
            self.kl_controller.coefficient,
            0 if critic is None else critic.updates,
            position=0,
        )

    def finish_save(self, state: TrainingState) -> TrainingState:
        """Wait until the checkpoint is written, and add the position in the data to its state.

        The position is known only after the samples in the checkpoint have been generated.
        """
        self.policy.finish_save()
        self.services.finish_critic_checkpoint()
        position = self.pipeline.finish_save(
            run_paths(self.config).checkpoint(state.step, "rollouts")
        )
        return replace(state, position=position)

    @fenced_write()
    def _write_rates(self, step: int) -> None:
        self.pass_rates.save(run_paths(self.config).checkpoint(step, "pass_rates"))

    def _load_rates(self, directory: Path) -> None:
        """Restore the pass rates; log a warning if the checkpoint has none for these prompts."""
        pass_rates = self.pass_rates.load(directory) if directory.is_dir() else None
        if pass_rates is not None:
            self.pass_rates = self.pipeline.pass_rates = pass_rates
        elif self.recorder is not None:
            problem = (
                "contains pass rates of other prompts"
                if directory.is_dir()
                else "was written by an older release and contains no pass rates"
            )
            _log.warning("the checkpoint %s: counting pass rates from zero", problem)

    def committed(self, kept: Sequence[TrainingState]) -> None:
        """Set the checkpoints from which a lost critic is restored."""
        self.services.keep_critic(critic_states(kept))

    def close(self) -> None:
        """Close the pipeline and its engine."""
        self.pipeline.close()
