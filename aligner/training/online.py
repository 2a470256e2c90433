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
from aligner.paths import get_run_paths
from aligner.schema import Config
from aligner.schema.derived import LOSSES_WITHOUT_RATIO, get_weights_version
from aligner.schema.reward_sources import has_step_rewards, list_source_names
from aligner.servers.critic_client import INITIAL, CriticState
from aligner.training.evaluator import Evaluations
from aligner.training.loop import TrainingLoop
from aligner.training.rollout_builder import RolloutBatch
from aligner.training.rollout_pipeline import RolloutPipeline
from aligner.training.run_checkpoints import TrainingState
from aligner.training.services import Services, run_and_broadcast_result
from aligner.training.step_metrics import (
    StepResult,
    combine_update_metrics,
    compute_experience_metrics,
    compute_prompt_metrics,
    compute_publish_metrics,
    compute_rollout_metrics,
    compute_sequence_kl,
    compute_staleness_metrics,
    compute_verification_metrics,
)
from aligner.training.step_samples import StepSamples

_log = logging.getLogger(__name__)


def build_critic_states(checkpoints: Sequence[TrainingState]) -> list[CriticState]:
    """Return the critic's state in each checkpoint; its initial state if there are none."""
    return [CriticState(state.step, state.critic_updates) for state in checkpoints] or [INITIAL]


def describe_run(config: Config, prompt_count: int) -> str:
    """Return the log line that describes the steps of an online run.

    The line has the same format as in an offline run. With several epochs per step it warns about
    losses without an importance ratio.

    Args:
        prompt_count: Number of prompts in the data.
    """
    size = config.rollout.prompts_per_step
    steps = config.run.steps
    settings = config.algorithm
    message = (
        f"online: {prompt_count} prompts; {size} prompts per step,"
        f" {prompt_count / size:.1f} steps per epoch;"
        f" run.steps={steps} is {steps * size / prompt_count:.2f} epochs"
    )
    # Such a loss does not limit how far the later epochs move from the policy of the samples.
    if settings.epochs > 1 and settings.loss in LOSSES_WITHOUT_RATIO:
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

        # Row ids identify the rows after selection, so that the sample files can show which rows
        # were trained on.
        row_ids = torch.arange(len(rollout.batch.tokens))
        rollout = replace(rollout, batch=replace(rollout.batch, row_ids=row_ids))
        generated_rollout = rollout

        selected_rollout = rollout
        if self.algorithm.select_by_score is not None:
            with timer.phase("server_wait"):
                samples_per_prompt = self.config.rollout.samples_per_prompt
                scores = self._wait_for_scores(rollout)
                selected_rows = self.algorithm.select_by_score(scores, samples_per_prompt)
                selected_rollout = rollout.select(selected_rows)

        training_metrics: dict[str, float] = {}
        experience = None
        if selected_rollout.samples:
            training_metrics, experience = self._train_on_rollout(step, selected_rollout, timer)
        # Read the teacher's answer even if no sample was trained on: `assert_settled` rejects
        # unread answers.
        self._wait_for_teacher(rollout, rollout.batch)
        rollout = rollout.drop_unscored()

        processed_counts = {
            "samples": len(rollout.samples),
            "tokens": int(rollout.batch.lengths.sum()),
        }
        # The samples of the generated rollout, not only those that were selected and trained on.
        step_samples = StepSamples.from_rollout(generated_rollout, experience)
        pass_metrics = self._update_pass_rates(step_samples)

        metrics = (
            training_metrics
            | pass_metrics
            | compute_rollout_metrics(
                rollout,
                self.config.rollout,
                list_source_names(self.config.reward),
                self.algorithm.min_scores_per_prompt,
            )
        )

        # Without `engine.publish=changes` every publish transfers all elements, so that the metrics
        # would be constant.
        is_partial_publish = self.config.engine.publish != "whole"
        if self._has_new_weights(step) and (stats := self.pipeline.publish_stats) is not None:
            metrics |= compute_verification_metrics(stats)
            if is_partial_publish:
                metrics |= compute_publish_metrics(stats)
        return StepResult(metrics, processed_counts, rollout, rollout.scores.result(), step_samples)

    def _update_pass_rates(self, step_samples: StepSamples) -> dict[str, float]:
        """Update the pass rates, which determine the prompts of later steps, and return their
        metrics."""
        data = self.config.data
        earlier_rates = self.pass_rates
        outcomes = step_samples.collect_outcomes(self.prompts.locate, data.pass_threshold)
        self.pass_rates = earlier_rates.with_outcomes(outcomes, data.curriculum.decay)
        # An asynchronous pipeline uses the rates at the moment when the trainer publishes a
        # version, so that the selection of prompts depends on the step, never on timing.
        self.pipeline.pass_rates = self.pass_rates
        return compute_prompt_metrics(outcomes, earlier_rates, self.pass_rates)

    def _train_on_rollout(
        self, step: int, rollout: RolloutBatch, timer: PhaseTimer
    ) -> tuple[dict[str, float], Experience | None]:
        """Build the experience from the samples and train on it.

        Returns:
            Metrics, and the experience; ({}, None) if no samples remain to train on.
        """
        algorithm = self.algorithm
        coefficient = self.kl_controller.coefficient
        # Group losses compare whole samples, so the branches are dropped.
        if algorithm.group_size > 1:
            rollout = rollout.drop_branches()

        batch = rollout.batch
        with timer.phase("logprobs"):
            # Replaying expert routing and restricting the log-probs to the sampling support and to
            # the tokens that grammars allow makes them comparable with the log-probs of the engine.
            inputs = (batch.tokens, batch.lengths)
            sampling_support = batch.sampling_support
            guided_tokens = batch.guided_tokens
            expert_routing = batch.expert_routing
            if self._needs_logprobs_before_update(step):
                old_logprobs = self.policy.logprobs(
                    *inputs,
                    mask=batch.mask,
                    sampling_support=sampling_support,
                    guided_tokens=guided_tokens,
                    expert_routing=expert_routing,
                )
            else:
                # NaN is a placeholder: the loss uses the log-probs of its own forward pass instead.
                old_logprobs = torch.full_like(batch.engine_logprobs, torch.nan)
            # The reference pass below overwrites this value.
            routing_mismatch = self.policy.runner.routing_mismatch
            reference_logprobs = self.policy.reference_logprobs(
                *inputs,
                mask=batch.mask,
                sampling_support=sampling_support,
                guided_tokens=guided_tokens,
                expert_routing=expert_routing,
            )

        with timer.phase("server_wait"):
            scored_rows = rollout.find_scored_rows(algorithm.min_scores_per_prompt)
            # Samples without a score are removed only here, because the log-probs are computed
            # while the reward server works.
            if len(scored_rows) < len(rollout.samples):
                # Scores belong to samples; log-probs also have the rows of the samples' branches.
                batch_rows = batch.get_rows_with_branches(scored_rows)
                rollout = rollout.select(scored_rows)
                old_logprobs = old_logprobs[batch_rows]
                reference_logprobs = reference_logprobs[batch_rows]
                batch = rollout.batch

            scores = self._wait_for_scores(rollout)
            if has_step_rewards(self.config.reward):
                step_rewards = rollout.scores.get_step_rewards(
                    batch.tokens.shape[1] - 1
                )  # [B, S-1]
                batch = batch.with_step_rewards(step_rewards)
            values = None
            if self.config.algorithm.has_critic:
                values = rollout.values.result(width=batch.tokens.shape[1])  # [B, S]
            batch, teacher_logprobs = self._wait_for_teacher(rollout, batch)

        samples = algorithm.build_scored_samples(
            batch, scores, values, old_logprobs, reference_logprobs, coefficient, teacher_logprobs
        )
        if not len(samples.tokens):
            return {}, None
        experience = algorithm.build_experience(samples)
        if not len(experience.tokens):
            return {}, None

        stats, experience = self._update(step, experience, timer)
        version = get_weights_version(self.config, step)
        stats |= (
            compute_experience_metrics(experience)
            | compute_staleness_metrics(experience, version)
            | {"kl/coef": coefficient}
        )

        if batch.expert_routing is not None:
            # Report the mismatch of the policy's first forward pass over the samples: the log-prob
            # pass if there was one, else the update.
            if not self._needs_logprobs_before_update(step):
                routing_mismatch = self.policy.runner.routing_mismatch
            stats["mismatch/expert_routing"] = routing_mismatch

        # In a step that updates only the critic, the policy is unchanged: its KL must not adapt the
        # coefficient.
        if step >= self.config.algorithm.steps_before_policy_updates:
            self.kl_controller.update(compute_sequence_kl(experience), len(experience.tokens))
        return stats, experience

    def _needs_logprobs_before_update(self, step: int) -> bool:
        """Return whether the old log-probs are computed in a separate pass before the update.

        This is the case if they are needed before the first update
        (`OnlineAlgorithm.needs_old_logprobs`), or if the step has no policy update whose forward
        pass could return them.
        """
        return (
            self.algorithm.needs_old_logprobs
            or step < self.config.algorithm.steps_before_policy_updates
        )

    def _wait_for_teacher(
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
        # [B, S-1], or [B, S-1, 2+2k] with the top-k log-probs.
        teacher_rows = rollout.teacher_logprobs.result(batch.tokens.shape[1] - 1)
        if teacher_rows.ndim == 2:
            return batch, teacher_rows
        top_k = TeacherTopK.unpack(teacher_rows)
        batch = replace(batch, candidates=top_k.ids, candidate_targets=top_k.outcomes)
        return batch, top_k.logprobs

    def _wait_for_scores(self, rollout: RolloutBatch) -> Tensor:
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
        # The factor is larger than the number of steps of a run, so that no two steps of runs with
        # different seeds shuffle with the same seed.
        seed = self.config.seed * 1_000_003 + step
        minibatches = list(
            self.algorithm.iterate_minibatches(
                experience, settings.epochs, settings.minibatches, seed
            )
        )

        # Send the critic's batches first: its ranks train while the policy trains.
        pending_updates = self.services.train_critic(
            [
                (minibatch.tokens, minibatch.returns, minibatch.values, minibatch.mask)
                for minibatch in minibatches
                if minibatch.values is not None and minibatch.returns is not None
            ]
        )

        old_logprobs = None
        if not self._needs_logprobs_before_update(step):
            old_logprobs = torch.empty_like(experience.old_logprobs)
        entropies = None
        if self.config.logging.samples_mib and experience.row_ids is not None:
            # Indexed by row id, because the minibatches are shuffled; NaN marks untrained rows.
            rows = int(experience.row_ids.max()) + 1
            entropies = torch.full((rows, experience.mask.shape[1]), torch.nan)  # [rows, S-1]

        with timer.phase("train"):
            policy_updates: list[dict[str, float]] = []
            if step >= settings.steps_before_policy_updates:
                policy_updates = self._train_policy(minibatches, old_logprobs, entropies)

        if old_logprobs is not None:
            # There is only one update. Its minibatch contains all rows, in the order in which the
            # update has written the log-probs.
            experience = replace(minibatches[0], old_logprobs=old_logprobs)
        if entropies is not None:
            experience = replace(experience, entropies=entropies[experience.row_ids])

        with timer.phase("server_wait"):
            critic_updates = pending_updates.result()

        stats = {"policy/updates": float(len(policy_updates))}
        stats |= combine_update_metrics("policy", policy_updates)
        stats |= combine_update_metrics("value", critic_updates)
        return stats, experience

    def _train_policy(
        self,
        minibatches: Sequence[Experience],
        logprobs_out: Tensor | None,
        entropies: Tensor | None,
    ) -> list[dict[str, float]]:
        """Run one optimizer step per minibatch, until the KL exceeds `algorithm.early_stop_kl`.

        Args:
            logprobs_out: Destination of the log-probs from before the update, see `Policy.train`;
                None if they are known. Not None requires a single minibatch.
            entropies: Destination of the entropies of each row's first update, [rows, S-1], indexed
                by `row_ids`; initially NaN. None if they are not recorded.
        """
        algorithm = self.algorithm
        max_kl = self.config.algorithm.early_stop_kl
        updates: list[dict[str, float]] = []

        for minibatch in minibatches:
            loss = algorithm.build_loss(minibatch, self.kl_controller.coefficient)
            entropies_out = None if entropies is None else torch.empty(minibatch.mask.shape)
            stats = self.policy.train(
                minibatch,
                loss,
                denominator=algorithm.loss_denominator(minibatch),
                group_size=algorithm.group_size,
                logprobs_out=logprobs_out,
                entropies_out=entropies_out,
            )
            if entropies is not None and entropies_out is not None:
                # In later epochs the entropies are those of an updated policy; keep the first.
                earlier_entropies = entropies[minibatch.row_ids]
                entropies[minibatch.row_ids] = torch.where(
                    earlier_entropies.isnan(), entropies_out, earlier_entropies
                )
            updates.append(stats)
            # The KL is known only after the update that exceeds the limit.
            if max_kl is not None and stats.get("approx_kl", 0.0) > max_kl:
                break
        return updates

    def resume(self, states: Sequence[TrainingState]) -> int:
        """Restore policy, critic, KL coefficient, pipeline and pass rates from the last
        checkpoint."""
        self.services.start(self.config.server.start_timeout_s, build_critic_states(states))
        # Only rank 0 has a recorder.
        if self.recorder is not None:
            _log.info("%s", describe_run(self.config, len(self.prompts)))
        if not states:
            return 0

        state = states[-1]
        paths = get_run_paths(self.config)
        # `RunCheckpoints.rename_damaged` has verified the checksums of the files.
        self.policy.load(paths.checkpoint(state.step, "policy"), verified=True)
        self.kl_controller.resume(state.kl_coefficient)
        self.pipeline.resume(paths.checkpoint(state.step, "rollouts"), state.step, state.position)
        self._load_pass_rates(paths.checkpoint(state.step, "pass_rates"))
        return state.step

    def begin(self, first_step: int) -> None:
        """Publish the weights that the run starts with to the engine."""
        # In a new run, this publish belongs to step 0, like the evaluation of the initial weights.
        self.timeline.begin_step(first_step + 1 if first_step else 0)
        with self.timeline.span("snapshot" if self.pipeline.is_asynchronous else "publish"):
            self.pipeline.publish_weights(version=get_weights_version(self.config, first_step))

    def publish(self, version: int, timer: PhaseTimer, *, is_last: bool) -> None:
        """Publish the weights of `version` to the engine; in an asynchronous run, concurrently with
        the next steps.

        Nothing is published if the step did not change the version; see `get_weights_version`.
        """
        if self._has_new_weights(version):
            with timer.phase("snapshot" if self.pipeline.is_asynchronous else "reshard"):
                self.pipeline.publish_weights(version=version, is_last=is_last)
        self.services.assert_settled(is_asynchronous=self.pipeline.is_asynchronous)

    def _has_new_weights(self, version: int) -> bool:
        """Return whether the weights after step `version` are a new version for the engine.

        The initial weights are a new version, too.
        """
        return get_weights_version(self.config, version) == version

    def should_evaluate(self, step: int, *, is_saved: bool) -> bool:
        """Return whether an evaluation is due: at the interval of `evaluation.every`, and for the
        initial and the last weights."""
        return self.evaluations is not None and self.evaluations.is_due(step)

    def begin_evaluation(self, step: int) -> bool:
        """Queue the generation of the evaluation after the training samples of the same weights.

        Returns:
            Whether the evaluation was queued; False without `evaluation.asynchronous`.
        """
        if self.evaluations is None or not self.config.evaluation.asynchronous:
            return False
        self.evaluations.begin(step, self.pipeline.generate_extra(self.evaluations.generate))
        return True

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of the responses to the held-out prompts."""
        assert self.evaluations is not None
        # A queued evaluation already waits for the publish.
        if not self.evaluations.has_begun:
            self.pipeline.await_published()
        metrics = self.evaluations.evaluate(step)
        self.services.assert_settled(is_asynchronous=self.pipeline.is_asynchronous)
        return metrics

    def begin_save(self, step: int) -> TrainingState:
        """Start to save policy, critic, pass rates and the samples that were generated ahead."""
        self.policy.begin_save(get_run_paths(self.config).checkpoint(step, "policy"))
        self.pipeline.begin_save(step)
        # The next step changes the pass rates, so rank 0, which has the recorder, writes them
        # before this method returns.
        run_and_broadcast_result(
            lambda: None if self.recorder is None else self._save_pass_rates(step)
        )
        critic_state = self.services.begin_critic_checkpoint(step)
        critic_updates = 0 if critic_state is None else critic_state.updates
        # `finish_save` sets the position.
        return TrainingState(step, self.kl_controller.coefficient, critic_updates, position=0)

    def finish_save(self, state: TrainingState) -> TrainingState:
        """Wait until the checkpoint is written, and add the position in the data to its state.

        The position is known only after the samples in the checkpoint have been generated.
        """
        self.policy.finish_save()
        self.services.finish_critic_checkpoint()
        position = self.pipeline.finish_save(
            get_run_paths(self.config).checkpoint(state.step, "rollouts")
        )
        return replace(state, position=position)

    @fenced_write()
    def _save_pass_rates(self, step: int) -> None:
        self.pass_rates.save(get_run_paths(self.config).checkpoint(step, "pass_rates"))

    def _load_pass_rates(self, directory: Path) -> None:
        """Restore the pass rates; log a warning if the checkpoint has none for these prompts."""
        pass_rates = self.pass_rates.load(directory) if directory.is_dir() else None
        if pass_rates is not None:
            self.pass_rates = pass_rates
            self.pipeline.pass_rates = pass_rates
        elif self.recorder is not None:  # rank 0
            problem = (
                "contains pass rates of other prompts"
                if directory.is_dir()
                else "was written by an older release and contains no pass rates"
            )
            _log.warning("the checkpoint %s: counting pass rates from zero", problem)

    def on_checkpoint_complete(self, states: Sequence[TrainingState]) -> None:
        """Set the checkpoints from which a lost critic is restored."""
        self.services.set_critic_recovery_points(build_critic_states(states))

    def close(self) -> None:
        """Close the pipeline and its engine."""
        self.pipeline.close()
