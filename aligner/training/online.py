"""The online trainer: one training step, as the algorithm reads."""

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
from aligner.rollout.rollout_builder import RolloutBatch
from aligner.rollout.rollout_pipeline import RolloutPipeline
from aligner.rollout.services import Services, together
from aligner.schema import Config
from aligner.schema.derived import WITHOUT_RATIO, weights_version
from aligner.schema.reward_sources import has_step_rewards, source_names
from aligner.servers.critic_client import INITIAL, CriticState
from aligner.training.evaluator import Evaluations
from aligner.training.loop import TrainingLoop
from aligner.training.run_checkpoints import TrainingState
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
    """The critic's states that these checkpoints hold; its initial one where there is none."""
    return [CriticState(state.step, state.critic_updates) for state in checkpoints] or [INITIAL]


def announcement(config: Config, prompts: int) -> str:
    """What the run's steps come to, in the words of an offline run's, and what several passes over
    a step's samples mean."""
    size, steps, settings = config.rollout.prompts_per_step, config.run.steps, config.algorithm
    told = (
        f"online: {prompts} prompts; {size} prompts per step, {prompts / size:.1f} steps per epoch;"
        f" run.steps={steps} is {steps * size / prompts:.2f} epochs"
    )
    if settings.epochs > 1 and settings.loss in WITHOUT_RATIO:
        told += (
            f"; algorithm.epochs={settings.epochs}: loss={settings.loss} has no importance ratio;"
            " only a KL term keeps the policy close to the policy that generated the samples"
        )
    return told


@dataclass(kw_only=True)
class OnlineTrainer(TrainingLoop):
    """The policy learns from its own samples; see `aligner.training.setup`."""

    policy: Policy
    pipeline: RolloutPipeline
    services: Services
    algorithm: OnlineAlgorithm
    prompts: PromptStream
    pass_rates: PassRates
    """Theirs, after the steps that are done."""
    kl_controller: KLController
    evaluations: Evaluations | None

    def step(self, step: int, timer: PhaseTimer) -> StepResult:
        """Draw samples, learn from them, and say what was seen."""
        with timer.phase("generate"):
            rollout = self.pipeline.take()  # the servers are asked as each part is generated
        batch = rollout.batch
        drawn = rollout = replace(
            rollout, batch=replace(batch, row_ids=torch.arange(len(batch.tokens)))
        )
        chosen = rollout
        if self.algorithm.select_by_score is not None:
            with timer.phase("server_wait"):
                each = self.config.rollout.samples_per_prompt
                chosen = rollout.select(self.algorithm.select_by_score(self._scores(rollout), each))
        learned, experience = self._learn(step, chosen, timer) if chosen.samples else ({}, None)
        self._taught(rollout, rollout.batch)  # where nothing was learned nobody has read them yet
        rollout = rollout.scored()
        processed = {"samples": len(rollout.samples), "tokens": int(rollout.batch.lengths.sum())}
        sampled = StepSamples.of(drawn, experience)
        counted = self._count_passes(sampled)
        metrics = (
            learned
            | counted
            | rollout_metrics(
                rollout,
                self.config.rollout,
                source_names(self.config.reward),
                self.algorithm.min_scores_per_prompt,
            )
        )
        light = self.config.engine.publish != "whole" and self._changes_weights(step)
        if light and (stats := self.pipeline.publish_stats) is not None:
            metrics |= publish_metrics(stats)
        return StepResult(metrics, processed, rollout, rollout.scores.result(), sampled)

    def _count_passes(self, sampled: StepSamples) -> dict[str, float]:
        """Have what the step's samples scored decide what is drawn next; metrics of it."""
        data, before = self.config.data, self.pass_rates
        drawn = sampled.draws(self.prompts.locate, data.pass_threshold)
        self.pass_rates = before.with_outcomes(drawn, data.curriculum.decay)
        self.pipeline.pass_rates = self.pass_rates
        return draw_metrics(drawn, before, self.pass_rates)

    def _learn(
        self, step: int, rollout: RolloutBatch, timer: PhaseTimer
    ) -> tuple[dict[str, float], Experience | None]:
        """Make experience of the samples, and learn from it; None where nothing is left to learn
        from."""
        algorithm, coefficient = self.algorithm, self.kl_controller.coefficient
        if algorithm.group_size > 1:  # what is compared are samples
            rollout = rollout.without_branches()
        batch = rollout.batch
        with timer.phase("logprobs"):
            of, kept, routes = (batch.tokens, batch.lengths), batch.kept, batch.routes
            if self._asks_before_update(step):
                old_logprobs = self.policy.logprobs(
                    *of, mask=batch.mask, kept_tokens=kept, routes=routes
                )
            else:
                old_logprobs = torch.full_like(batch.engine_logprobs, torch.nan)
            differing = self.policy.runner.routing_mismatch
            reference_logprobs = self.policy.reference_logprobs(
                *of, mask=batch.mask, kept_tokens=kept, routes=routes
            )
        with timer.phase("server_wait"):
            rows = rollout.scored_rows(algorithm.min_scores_per_prompt)
            if len(rows) < len(rollout.samples):
                kept_rows = batch.with_branches(rows)
                rollout, old_logprobs, reference_logprobs = (
                    *(rollout.select(rows), old_logprobs[kept_rows], reference_logprobs[kept_rows]),
                )
                batch = rollout.batch
            scores = self._scores(rollout)
            if has_step_rewards(self.config.reward):
                batch = batch.with_step_rewards(rollout.scores.steps(batch.tokens.shape[1] - 1))
            values = (
                rollout.values.result(width=batch.tokens.shape[1])
                if self.config.algorithm.has_critic
                else None
            )
            batch, taught = self._taught(rollout, batch)
        samples = algorithm.build_scored_samples(
            batch, scores, values, old_logprobs, reference_logprobs, coefficient, taught
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
            asked = self._asks_before_update(step)
            mismatch = differing if asked else self.policy.runner.routing_mismatch
            stats["mismatch/expert_routing"] = mismatch
        if step >= self.config.algorithm.policy_starts_after:
            self.kl_controller.update(sequence_kl(experience), len(experience.tokens))
        return stats, experience

    def _asks_before_update(self, step: int) -> bool:
        """Whether log-probs are computed apart from the update, which comes with them where it is
        the step's only one."""
        return self.algorithm.needs_old_logprobs or step < self.config.algorithm.policy_starts_after

    def _taught(
        self, rollout: RolloutBatch, batch: SampleBatch
    ) -> tuple[SampleBatch, Tensor | None]:
        """Wait for the teacher's log-probs [B, S-1] of the batch's rows, None without a teacher;
        the batch has the others."""
        if not self.config.has_teacher:
            return batch, None
        told = rollout.teacher_logprobs.result(batch.tokens.shape[1] - 1)
        if told.ndim == 2:
            return batch, told
        taught = TeacherTopK.unpack(told)
        return (
            replace(batch, candidates=taught.ids, candidate_targets=taught.outcomes),
            taught.logprobs,
        )

    def _scores(self, rollout: RolloutBatch) -> Tensor:
        """Wait for the scores [B], and shape them."""
        return self.algorithm.shaping(rollout.scores.result(), rollout.samples)

    def _update(
        self, step: int, experience: Experience, timer: PhaseTimer
    ) -> tuple[dict[str, float], Experience]:
        """The policy's updates and, at the same time on the critic's devices, the critic's; their
        metrics.

        The experience comes back with log-probs from before the update, and the entropies of its
        rows' first updates.
        """
        settings = self.config.algorithm
        seed = self.config.seed * 1_000_003 + step
        parts = list(
            self.algorithm.iterate_minibatches(
                experience, settings.epochs, settings.minibatches, seed
            )
        )
        critic = self.services.train_critic(
            [
                (part.tokens, part.returns, part.values, part.mask)
                for part in parts
                if part.values is not None and part.returns is not None
            ]
        )
        before = (
            None if self._asks_before_update(step) else torch.empty_like(experience.old_logprobs)
        )
        entropies = None
        if self.config.logging.samples_mib and experience.row_ids is not None:
            entropies = torch.full(
                (int(experience.row_ids.max()) + 1, experience.mask.shape[1]), torch.nan
            )
        with timer.phase("train"):
            policy_updates = (
                self._train_policy(parts, before, entropies)
                if step >= settings.policy_starts_after
                else []
            )
        if before is not None:
            experience = replace(parts[0], old_logprobs=before)  # the only update's, of all rows
        if entropies is not None:
            experience = replace(experience, entropies=entropies[experience.row_ids])
        with timer.phase("server_wait"):
            critic_updates = critic.result()
        counted = {"policy/updates": float(len(policy_updates))}
        return (
            counted
            | update_metrics("policy", policy_updates)
            | update_metrics("value", critic_updates),
            experience,
        )

    def _train_policy(
        self, minibatches: Sequence[Experience], before: Tensor | None, entropies: Tensor | None
    ) -> list[dict[str, float]]:
        """An optimizer step on each minibatch, until the policy has moved too far; `before` as
        `Policy.train` has it.

        The entropies that a row's first step finds are put in its place by `row_ids` among
        `entropies`, which are NaN.
        """
        algorithm, limit = self.algorithm, self.config.algorithm.early_stop_kl
        updates: list[dict[str, float]] = []
        for part in minibatches:
            loss = algorithm.build_loss(part, self.kl_controller.coefficient)
            found = None if entropies is None else torch.empty(part.mask.shape)
            stats = self.policy.train(
                part,
                loss,
                denominator=algorithm.loss_denominator(part),
                group_size=algorithm.group_size,
                logprobs_out=before,
                entropies_out=found,
            )
            if entropies is not None and found is not None:
                earlier = entropies[part.row_ids]
                entropies[part.row_ids] = torch.where(earlier.isnan(), found, earlier)
            updates.append(stats)
            if limit is not None and stats.get("approx_kl", 0.0) > limit:
                break
        return updates

    def resume(self, saved: Sequence[TrainingState]) -> int:
        """Bring policy, critic, KL coefficient and pipeline to the last checkpoint."""
        self.services.start(self.config.server.start_timeout_s, critic_states(saved))
        if self.recorder is not None:
            _log.info("%s", announcement(self.config, len(self.prompts)))
        if not saved:
            return 0
        state, paths = saved[-1], run_paths(self.config)
        self.policy.load(paths.checkpoint(state.step, "policy"), verified=True)
        self.kl_controller.resume(state.kl_coefficient)
        self.pipeline.resume(paths.checkpoint(state.step, "rollouts"), state.step, state.position)
        self._load_rates(paths.checkpoint(state.step, "pass_rates"))
        return state.step

    def begin(self, first: int) -> None:
        """Have the engine serve the weights that the run starts with."""
        self.timeline.begin_step(first + 1 if first else 0)
        with self.timeline.span("snapshot" if self.pipeline.is_ahead else "publish"):
            self.pipeline.publish_weights(version=weights_version(self.config, first))

    def publish(self, version: int, timer: PhaseTimer, *, last: bool) -> None:
        """Take the weights after so many steps to the engine, beside the next steps where samples
        are drawn ahead.

        The engine keeps those that it has where the step has left them as they were.
        """
        if self._changes_weights(version):
            with timer.phase("snapshot" if self.pipeline.is_ahead else "reshard"):
                self.pipeline.publish_weights(version=version, last=last)
        self.services.assert_settled(is_ahead=self.pipeline.is_ahead)

    def _changes_weights(self, version: int) -> bool:
        """Whether the engine was given weights after so many steps, the first ones included."""
        return weights_version(self.config, version) == version

    def is_evaluated(self, step: int, *, saves: bool) -> bool:
        """Every so many steps, the initial weights and the last ones too."""
        return self.evaluations is not None and self.evaluations.is_due(step)

    def begin_evaluation(self, step: int) -> bool:
        """Have the generator draw the responses behind the samples that the same weights draw,
        where `evaluation.asynchronous`."""
        if self.evaluations is None or not self.config.evaluation.asynchronous:
            return False
        self.evaluations.begin(step, self.pipeline.draw_beside(self.evaluations.draw))
        return True

    def evaluate(self, step: int) -> dict[str, float]:
        """What responses to held-out prompts are worth."""
        assert self.evaluations is not None
        if not self.evaluations.has_begun:
            self.pipeline.await_published()
        metrics = self.evaluations.evaluate(step)
        self.services.assert_settled(is_ahead=self.pipeline.is_ahead)
        return metrics

    def begin_save(self, step: int) -> TrainingState:
        """Policy, critic, and the samples that were drawn ahead."""
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
        """The position in the data is known once the samples that the checkpoint holds are
        drawn."""
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
        found = self.pass_rates.load(directory) if directory.is_dir() else None
        if found is not None:
            self.pass_rates = self.pipeline.pass_rates = found
        elif self.recorder is not None:
            problem = (
                "contains pass rates of other prompts"
                if directory.is_dir()
                else "was written by an older release and contains no pass rates"
            )
            _log.warning("the checkpoint %s: counting pass rates from zero", problem)

    def committed(self, kept: Sequence[TrainingState]) -> None:
        """A critic that is lost comes back from these."""
        self.services.keep_critic(critic_states(kept))

    def close(self) -> None:
        """End the pipeline and its engine."""
        self.pipeline.close()
