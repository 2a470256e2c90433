"""The online trainer: one training step, as the algorithm reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from aligner.algorithms.kl import KLController
from aligner.algorithms.online_algorithm import OnlineAlgorithm
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Experience
from aligner.megatron.policy import Policy
from aligner.observability.metrics import MetricsWriter, RecordWriter
from aligner.observability.timeline import PhaseTimer, Timeline
from aligner.paths import RunPaths
from aligner.rollout.rollout_builder import RolloutBatch
from aligner.rollout.rollout_pipeline import RolloutPipeline
from aligner.rollout.services import Services
from aligner.schema import Config
from aligner.servers.critic_client import INITIAL, CriticState
from aligner.training.evaluator import Evaluator
from aligner.training.run_checkpoints import RunCheckpoints, TrainingState
from aligner.training.step_metrics import experience_metrics, rollout_metrics, sequence_kl, staleness_metrics, update_metrics
from aligner.training.stopping import StopCondition


@dataclass(frozen=True)
class Outcome:
    """What a step leaves: its metrics, and the samples they speak of with their scores [B]."""

    stats: dict[str, float]
    rollout: RolloutBatch
    scores: Tensor


def critic_states(checkpoints: Sequence[TrainingState]) -> list[CriticState]:
    """The critic's states that these checkpoints hold; its initial one where there is none."""
    return [CriticState(state.step, state.critic_updates) for state in checkpoints] or [INITIAL]


@dataclass
class Recorder:
    """What rank 0 writes down; the other ranks have none."""

    metrics: MetricsWriter
    samples: RecordWriter
    tokenizer: Tokenizer

    def truncate_after(self, step: int, *, amends: bool = False) -> None:
        """Forget what a resumed run is about to do again; see `MetricsWriter.truncate_after`."""
        self.metrics.truncate_after(step, amends=amends)
        self.samples.truncate_after(step)

    def write_samples(self, step: int, outcome: Outcome, count: int) -> None:
        """Write some samples, evenly spread over the step's."""
        samples, records = outcome.rollout.samples, []
        for index in range(0, len(samples), -(-len(samples) // count)):
            prompt, response = outcome.rollout.prompts[index].text, self.tokenizer.decode(samples[index].response)
            records.append({"prompt": prompt, "response": response, "reward": float(outcome.scores[index])})
        self.samples.write(step, records)


@dataclass
class OnlineTrainer:
    """One rank of the trainer. Every rank runs the same program on the same whole step; see `trainer_setup.py`."""

    config: Config
    paths: RunPaths
    policy: Policy
    pipeline: RolloutPipeline
    services: Services
    algorithm: OnlineAlgorithm
    kl_controller: KLController
    checkpoints: RunCheckpoints
    saved: list[TrainingState]
    """The newest checkpoints; the run resumes from the last, and starts at the beginning without one."""
    recorder: Recorder | None
    evaluator: Evaluator | None
    timeline: Timeline
    ending: StopCondition
    _saving: tuple[TrainingState, float | None] | None = field(default=None, init=False)
    """A checkpoint that is being written, its position in the data still to be set, and its metric."""

    def run(self) -> None:
        """Train from where the run stands to its end."""
        first = self._resume()
        if self.ending.is_early_after(first):
            return
        self.timeline.begin_step(first + 1 if first else 0)
        with self.timeline.span("snapshot" if self.pipeline.is_ahead else "publish"):
            self.pipeline.publish_weights(version=first)
        timer = PhaseTimer(listener=self.timeline.add)
        if first == 0:
            evaluated = self._evaluate(0, timer)
            if self.recorder is not None and evaluated:
                self.recorder.metrics.write(0, evaluated | {"time/evaluate": timer.take()["time/evaluate"]})
        elif self._owes_evaluation:
            evaluated = self._evaluate(first, timer)
            if self.recorder is not None:
                self.recorder.metrics.amend(first, evaluated | {"time/evaluate": timer.take()["time/evaluate"]})
                self.checkpoints.settle(first, self.checkpoints.metric(evaluated))
        for step in range(first, self.ending.last):
            done = step + 1
            self.timeline.begin_step(done)
            outcome = self.step(step, timer)
            ends = self.ending.is_after(done)
            with timer.phase("snapshot" if self.pipeline.is_ahead else "reshard"):
                self.pipeline.publish_weights(version=done, last=ends)
            if not self.ending.is_early:  # what is left of a grace period is for the checkpoint
                outcome = replace(outcome, stats=outcome.stats | self._evaluate(done, timer))
            self.checkpoints.check_metric(outcome.stats)
            self.services.assert_settled(is_ahead=self.pipeline.is_ahead)
            self._record(done, outcome, timer.take())
            self._finish_save(timer)  # one that was begun a step ago
            if ends or (self.config.checkpoint.every and done % self.config.checkpoint.every == 0):
                self._begin_save(done, outcome.stats, timer)
            if ends:
                break
        self._finish_save(timer)
        self.timeline.flush()

    def _is_evaluated(self, step: int) -> bool:
        return self.evaluator is not None and self.evaluator.is_due(step)

    @property
    def _owes_evaluation(self) -> bool:
        """Whether the step that the run resumes from is still to be evaluated."""
        return bool(self.saved) and self.saved[-1].owes_evaluation and self._is_evaluated(self.saved[-1].step)

    def _evaluate(self, step: int, timer: PhaseTimer) -> dict[str, float]:
        """What the weights of a step are worth, where they are to be evaluated."""
        if self.evaluator is None or not self._is_evaluated(step):
            return {}
        with timer.phase("evaluate"):
            self.pipeline.await_published()
            return self.evaluator.evaluate(step)

    def step(self, step: int, timer: PhaseTimer) -> Outcome:
        """One training step."""
        with timer.phase("generate"):
            rollout = self.pipeline.take()  # scores and values are asked for as each part is generated
        chosen = rollout
        if self.algorithm.select is not None:
            with timer.phase("server_wait"):
                rollout = rollout.scored()
                chosen = rollout.select(self.algorithm.select(rollout.batch, self._scores(rollout)))
        stats = self._learn(step, chosen, timer) if chosen.samples else {}
        scored = rollout.scored()
        return Outcome(stats | rollout_metrics(scored, self.config.rollout), scored, scored.scores.result())

    def _learn(self, step: int, rollout: RolloutBatch, timer: PhaseTimer) -> dict[str, float]:
        """Make experience of the samples, and learn from it."""
        algorithm, coefficient, batch = self.algorithm, self.kl_controller.coefficient, rollout.batch
        with timer.phase("logprobs"):
            old_logprobs = self.policy.logprobs(batch.tokens, batch.lengths)
            reference_logprobs = self.policy.reference_logprobs(batch.tokens, batch.lengths)
        with timer.phase("server_wait"):
            rows = rollout.scored_rows()
            if len(rows) < len(rollout.samples):
                rollout, old_logprobs, reference_logprobs = rollout.select(rows), old_logprobs[rows], reference_logprobs[rows]
                batch = rollout.batch
            scores = self._scores(rollout)
            values = rollout.values.result(width=batch.tokens.shape[1]) if self.config.algorithm.has_critic else None
        experience = algorithm.experience(batch, scores, values, old_logprobs, reference_logprobs, coefficient)
        stats = experience_metrics(experience) | staleness_metrics(batch, version=step) | {"kl/coef": coefficient}
        stats |= self._update(step, experience, timer)
        self.kl_controller.update(sequence_kl(experience), len(rollout.samples))
        return stats

    def _scores(self, rollout: RolloutBatch) -> Tensor:
        """Wait for the scores [B], and shape them."""
        return self.algorithm.shaping(rollout.scores.result(), rollout.samples)

    def _update(self, step: int, experience: Experience, timer: PhaseTimer) -> dict[str, float]:
        """The policy's updates and, at the same time on the critic's devices, the critic's."""
        settings = self.config.algorithm
        seed = self.config.seed * 1_000_003 + step
        parts = list(self.algorithm.minibatches(experience, settings.epochs, settings.minibatches, seed))
        critic = self.services.train_critic(
            [
                (part.tokens, part.returns, part.values, part.mask)
                for part in parts
                if part.values is not None and part.returns is not None
            ]
        )
        with timer.phase("train"):
            policy_updates = self._train_policy(parts) if step >= settings.critic_warmup_steps else []
        with timer.phase("server_wait"):
            critic_updates = critic.result()
        counted = {"policy/updates": float(len(policy_updates))} if policy_updates else {}
        return counted | update_metrics("policy", policy_updates) | update_metrics("value", critic_updates)

    def _train_policy(self, minibatches: Sequence[Experience]) -> list[dict[str, float]]:
        """An optimizer step on each minibatch, until the policy has moved too far."""
        algorithm, limit = self.algorithm, self.config.algorithm.early_stop_kl
        updates: list[dict[str, float]] = []
        for part in minibatches:
            loss = algorithm.loss(part, self.kl_controller.coefficient)
            stats = self.policy.train(part, loss, denominator=algorithm.denominator(part), group=algorithm.group)
            updates.append(stats)
            if limit is not None and stats.get("approx_kl", 0.0) > limit:
                break
        return updates

    def _resume(self) -> int:
        """Restore policy, critic and coefficient where there is a checkpoint to start from; the first step to do."""
        first = 0
        self.services.start(self.config.server.start_timeout_s, critic_states(self.saved))
        if self.saved:
            start = self.saved[-1]
            first = start.step
            self.policy.load(self.paths.checkpoint(first, "policy"))
            self.kl_controller.coefficient = start.kl_coefficient
            self.pipeline.resume(self.paths.checkpoint(first, "rollouts"), first, start.position)
        if self.recorder is not None:
            self.recorder.truncate_after(first, amends=self._owes_evaluation)
        self.timeline.begin_run(first)
        return first

    def _begin_save(self, step: int, stats: dict[str, float], timer: PhaseTimer) -> None:
        metric = self.checkpoints.metric(stats)
        with timer.phase("checkpoint"):
            self.policy.begin_save(self.paths.checkpoint(step, "policy"))
            self.pipeline.begin_save(step)
            critic = self.services.begin_critic_checkpoint(step)
        updates = 0 if critic is None else critic.updates
        owes = self.ending.is_early and self._is_evaluated(step)
        self._saving = TrainingState(step, self.kl_controller.coefficient, updates, position=0, owes_evaluation=owes), metric
        if not self.config.checkpoint.asynchronous:
            self._finish_save(timer)

    def _finish_save(self, timer: PhaseTimer) -> None:
        """Wait for the checkpoint that is being written, if any; it counts once both models are complete."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        with timer.phase("checkpoint"):
            self.policy.finish_save()
            self.services.finish_critic_checkpoint()
            state, metric = saving
            state = replace(state, position=self.pipeline.finish_save(self.paths.checkpoint(state.step, "rollouts")))
            if self.recorder is not None:
                self.checkpoints.commit(state, metric)
                self.services.keep_critic(critic_states(self.checkpoints.newest()))
                self.checkpoints.prune()

    def _record(self, step: int, outcome: Outcome, times: dict[str, float]) -> None:
        if self.recorder is None:
            return
        samples, seconds = outcome.rollout.samples, times["time/step"]
        throughput = {
            "throughput/samples_per_s": len(samples) / seconds,
            "throughput/tokens_per_s": sum(sample.tokens.numel() for sample in samples) / seconds,
        }
        self.recorder.metrics.write(step, outcome.stats | times | throughput)
        if step == 1 or step % self.config.logging.samples_every == 0:
            self.recorder.write_samples(step, outcome, self.config.logging.samples_count)
