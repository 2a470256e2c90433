"""Training loop shared by all trainers: weight sync, evaluation, metrics, checkpoints, resuming."""

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import FrameType

import torch
import torch.distributed as dist

from aligner.data.fencing import fenced_write
from aligner.errors import STOP_SIGNAL
from aligner.files import write_file
from aligner.megatron.world import World
from aligner.observability.metrics import Record, read_metrics
from aligner.observability.timeline import PhaseTimer, Timeline, report_phase, report_stage
from aligner.paths import get_run_paths
from aligner.schema import Config
from aligner.training.end_rule import EndRule
from aligner.training.run_checkpoints import RunCheckpoints, TrainingState
from aligner.training.services import run_and_broadcast_result
from aligner.training.step_metrics import Recorder, StepResult
from aligner.training.step_profiler import StepProfiler

_log = logging.getLogger(__name__)


class StopCondition:
    """Decides after which step a run ends: its last step, or the step during which it receives the
    stop signal. Also decides when a checkpoint is due because of the elapsed time.

    Every rank of the trainer has an instance. All ranks reach the same two decisions by one
    all-reduce before the first step and after each step. The end rule of `TrainingLoop` is a
    separate decision.
    """

    def __init__(
        self, config: Config, world: World, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Install the handler of the stop signal in this process; only the main thread may do
        this."""
        self.last_step = min(config.run.steps, config.run.stop_after or config.run.steps)
        self.is_early = False
        """Whether the run received the stop signal and ends before `last_step`."""
        self.is_timed_save_due = False
        """Whether `checkpoint.every_minutes` had elapsed on some rank at the last call of
        `should_stop_early` or `should_stop`."""
        self._world = world
        self._clock = clock
        self._save_interval_s = 60 * config.checkpoint.every_minutes
        self._last_save_time = clock()
        self._is_stop_requested = False
        signal.signal(STOP_SIGNAL, self._handle_stop_signal)
        # The launcher starts ranks with the signal blocked, because a signal that arrives before
        # its handler is installed would kill the process.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {STOP_SIGNAL})

    def _handle_stop_signal(self, signal_number: int, frame: FrameType | None) -> None:
        # A signal can arrive in the middle of a collective, so the handler only sets a flag. The
        # ranks exchange their flags between two steps.
        self._is_stop_requested = True

    def should_stop_early(self, completed_steps: int) -> bool:
        """Return whether the run was asked to stop while steps remain. Collective.

        Also sets `is_early` and `is_timed_save_due`.
        """
        is_save_overdue = 0 < self._save_interval_s <= self._clock() - self._last_save_time
        # One rank's signal or clock decides for all ranks: otherwise some ranks would start a
        # step, or a checkpoint, that the others do not.
        is_stop_requested, is_timed_save_due = self._world.all_reduce_max(
            torch.tensor(
                [int(self._is_stop_requested), int(is_save_overdue)], device=self._world.device
            )
        ).tolist()
        self.is_early = bool(is_stop_requested) and completed_steps < self.last_step
        self.is_timed_save_due = bool(is_timed_save_due)
        return self.is_early

    def should_stop(self, completed_steps: int) -> bool:
        """Return whether the run ends after `completed_steps` steps. Collective."""
        return self.should_stop_early(completed_steps) or completed_steps == self.last_step

    def restart_save_interval(self) -> None:
        """Restart the interval of `checkpoint.every_minutes`, because a checkpoint is being
        saved."""
        self._last_save_time = self._clock()


@dataclass(kw_only=True)
class TrainingLoop:
    """Training loop of one trainer rank; the base class of all trainers.

    Every rank runs the same program and calls every method with the same arguments.
    """

    config: Config
    checkpoints: RunCheckpoints | None
    """Checkpoints of the run; None for a run without checkpoints."""
    recorder: Recorder | None
    """Writer of metrics and samples on rank 0; None on the other ranks."""
    timeline: Timeline
    stop_condition: StopCondition
    _saved_states: Sequence[TrainingState] = field(default=(), init=False)
    """States of the checkpoints that the run may resume from, in order of their steps."""
    _pending_checkpoint: tuple[TrainingState, float | None] | None = field(default=None, init=False)
    """State of the checkpoint whose files are being written, and its value of
    `checkpoint.best_metric`."""
    _running_evaluation_step: int | None = field(default=None, init=False)
    """Step whose weights are being evaluated while the next step trains; None without one."""
    _metric_history: list[float] = field(default_factory=list, init=False)
    """Values so far of the metric in which `run.end_without_gain` requires a gain; filled on rank 0
    only."""
    _end_reason: str | None = field(default=None, init=False)
    """Reason why the end rule ended the run; None if it did not."""

    def __post_init__(self) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._profiler = StepProfiler(self.config, rank)

    def run(self) -> None:
        """Train from the last completed step to the end of the run."""
        first_step = self._resume()
        if self.stop_condition.should_stop_early(first_step):
            return
        report_stage(self.config, "trainer", "syncing the weights to the engine")

        self.begin(first_step)
        timer = PhaseTimer(
            on_end=self.timeline.add,
            on_begin=partial(report_phase, self.config),
            open_range=self._profiler.open_range,
        )
        self._evaluate_initial(first_step, timer)
        # A run that the end rule ended must not train another step when it is resumed. The recorded
        # metrics also restore `_metric_history`.
        if not self._apply_end_rule(self._read_recorded_metrics()):
            self._train(first_step, timer)

        self._finish_save(timer)
        self.finish()
        self._write_end_reason()
        self.timeline.flush()

    def _train(self, first_step: int, timer: PhaseTimer) -> None:
        for step in range(first_step, self.stop_condition.last_step):
            with self._profiler.profile(step + 1):
                if self._train_step(step, timer):
                    break

    def _train_step(self, step: int, timer: PhaseTimer) -> bool:
        """Run, record and save one step; return whether the run ends after it."""
        # The metrics, spans and checkpoint of a step carry the number of completed steps, which is
        # also the version of its weights.
        completed_steps = step + 1
        self.timeline.begin_step(completed_steps)
        result = self.step(step, timer)

        is_last = self.stop_condition.should_stop(completed_steps)
        # Publish before evaluating: the engine evaluates the published weights, and the end
        # rule needs the metrics of that evaluation.
        self.publish(completed_steps, timer, is_last=is_last)
        self._finish_evaluation(timer)

        # After a stop signal, do not evaluate: the checkpoint needs the time that remains until
        # the scheduler kills the run (`cluster.slurm.grace_s`).
        if not self.stop_condition.is_early:
            # Evaluations depend on the step alone: a checkpoint that is saved because of the
            # elapsed time causes none.
            eval_metrics = self._evaluate(
                completed_steps,
                timer,
                is_saved=self._is_save_due(completed_steps, is_last=is_last),
                is_concurrent=not is_last,
            )
            result.metrics.update(eval_metrics)
            if self._apply_end_rule([{"step": completed_steps, **result.metrics}]):
                is_last = True
                # The last step must be evaluated. If an evaluation was started above, no next
                # step will complete it.
                result.metrics.update(
                    eval_metrics
                    or self._evaluate(completed_steps, timer, is_saved=True, is_final=True)
                )

        is_save_due = self._is_save_due(completed_steps, is_last=is_last)
        self._record(completed_steps, result, timer.take())
        if timer.on_begin is not None:  # stages are reported until the first step is complete
            timer.on_begin = None
            report_stage(self.config, "trainer", None)

        # Complete the checkpoint that was started at an earlier step; only one is pending at a
        # time.
        self._finish_save(timer)
        if is_save_due:
            self._begin_save(completed_steps, result.metrics, timer)
        elif self.checkpoints is not None and self.stop_condition.is_timed_save_due:
            self._begin_save(completed_steps, None, timer)
        return is_last

    def resume(self, states: Sequence[TrainingState]) -> int:
        """Restore the last of these checkpoints, if there is one, and return the number of
        completed steps."""
        raise NotImplementedError

    def begin(self, first_step: int) -> None:
        """Prepare the first step of this process.

        Args:
            first_step: Number of steps completed before it.
        """

    def step(self, step: int, timer: PhaseTimer) -> StepResult:
        """Run one training step; `step` is the number of steps completed before it."""
        raise NotImplementedError

    def publish(self, version: int, timer: PhaseTimer, *, is_last: bool) -> None:
        """Send the weights to the processes that use them.

        Args:
            version: Version of the weights, which is the number of completed steps.
            is_last: Whether the run ends here because of its last step or a stop signal. The end
                rule is applied only later, so it can still end the run if this is false.
        """

    def should_evaluate(self, step: int, *, is_saved: bool) -> bool:
        """Return whether the weights after `step` must be evaluated.

        Args:
            is_saved: Whether a checkpoint of the step is saved.
        """
        return False

    def begin_evaluation(self, step: int) -> bool:
        """Start to evaluate the weights after `step` concurrently with the next step.

        Returns:
            Whether an evaluation was started, whose metrics `evaluate` returns after the next step.
            False if the trainer does not support this, so that `evaluate` does all of the work.
        """
        return False

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the weights after `step` and return the metrics `eval/…`."""
        raise NotImplementedError

    def begin_save(self, step: int) -> TrainingState:
        """Start to write the parts of a checkpoint, and return its state."""
        raise NotImplementedError

    def finish_save(self, state: TrainingState) -> TrainingState:
        """Wait until all parts of the checkpoint are written.

        Returns:
            The state of the checkpoint, including the values that become known only then.
        """
        raise NotImplementedError

    def on_checkpoint_complete(self, states: Sequence[TrainingState]) -> None:
        """Handle the completion of a checkpoint. Rank 0 only.

        Args:
            states: States of the checkpoints that the run may now resume from, in order.
        """

    def finish(self) -> None:
        """Complete the work of this process after its last step."""

    def close(self) -> None:
        """Release the resources of the run."""

    def _resume(self) -> int:
        if self.checkpoints is not None and self.config.run.should_resume:
            self._saved_states = self.checkpoints.read_newest_states()

        first_step = self.resume(self._saved_states)
        if self.recorder is not None:
            # An earlier process may have recorded steps after its last checkpoint; this process
            # trains them again.
            self.recorder.truncate_after(first_step, owes_evaluation=self._owes_evaluation)
            with fenced_write():
                # The file contains the reason why the end rule ended the run in an earlier process.
                # If the rule still applies, `_write_end_reason` writes the file again.
                get_run_paths(self.config).end.unlink(missing_ok=True)
        self.timeline.begin_run(first_step)
        return first_step

    @property
    def _owes_evaluation(self) -> bool:
        """Whether the step that the run resumes from must be evaluated, because the process that
        saved its checkpoint did not complete its evaluation."""
        return (
            bool(self._saved_states)
            and self._saved_states[-1].owes_evaluation
            and self.should_evaluate(self._saved_states[-1].step, is_saved=True)
        )

    def _evaluate_initial(self, first_step: int, timer: PhaseTimer) -> None:
        """Evaluate the initial weights, or those of a checkpoint whose evaluation is owed."""
        owes_evaluation = self._owes_evaluation
        is_concurrent = owes_evaluation and first_step < self.stop_condition.last_step
        eval_metrics = {}
        if owes_evaluation or first_step == 0:
            eval_metrics = self._evaluate(
                first_step, timer, is_saved=owes_evaluation, is_concurrent=is_concurrent
            )

        if not eval_metrics:
            return

        eval_metrics |= {"time/evaluate": timer.take()["time/evaluate"]}
        if owes_evaluation:
            # The step already has a record, from the process that trained it.
            self._record_evaluation(first_step, eval_metrics)
        elif self.recorder is not None:
            self.recorder.metrics_writer.write(first_step, eval_metrics)

    def _record_evaluation(self, step: int, eval_metrics: Mapping[str, float]) -> None:
        """Add the metrics of an evaluation to the record of `step`, which is the last one.

        If the step has a checkpoint, also store its value of `checkpoint.best_metric` there, and
        mark the checkpoint as evaluated.
        """
        metric = None if self.checkpoints is None else self.checkpoints.get_metric(eval_metrics)
        # A checkpoint that is still being written has no manifest yet, so change its state in
        # memory. A checkpoint that was saved because of the elapsed time is not compared with
        # others, and has no metric.
        if self._pending_checkpoint is not None and self._pending_checkpoint[0].step == step:
            state = replace(self._pending_checkpoint[0], owes_evaluation=False)
            self._pending_checkpoint = (state, None if state.by_time else metric)

        if self.recorder is None:
            return
        self.recorder.metrics_writer.amend(step, eval_metrics)
        if self.checkpoints is not None and self.checkpoints.list_steps()[-1:] == [step]:
            self.checkpoints.record_evaluation(step, metric)

    def _evaluate(
        self,
        step: int,
        timer: PhaseTimer,
        *,
        is_saved: bool,
        is_final: bool = False,
        is_concurrent: bool = False,
    ) -> dict[str, float]:
        """Evaluate the weights after `step` if an evaluation is due.

        Args:
            is_saved: Whether a checkpoint of the step is saved.
            is_final: Whether to evaluate as if this were step `run.steps`, the last one.
            is_concurrent: Whether to evaluate concurrently with the next step if the trainer
                supports this.

        Returns:
            The metrics; empty if no evaluation is due, or if it runs concurrently with the next
            step.
        """
        if not self.should_evaluate(self.config.run.steps if is_final else step, is_saved=is_saved):
            return {}
        with timer.phase("evaluate"):
            if is_concurrent and self.begin_evaluation(step):
                self._running_evaluation_step = step
                return {}
            self._running_evaluation_step = None  # this call completes an evaluation, if any
            return self.evaluate(step)

    def _finish_evaluation(self, timer: PhaseTimer) -> None:
        """Wait for the evaluation that was started one step ago, if any, and record it for its
        step."""
        step = self._running_evaluation_step
        self._running_evaluation_step = None
        if step is None:
            return
        with timer.phase("evaluate"):
            eval_metrics = self.evaluate(step)
        if self.checkpoints is not None:
            self.checkpoints.check_metric(eval_metrics)
        self._record_evaluation(step, eval_metrics)

    def _is_save_due(self, step: int, *, is_last: bool) -> bool:
        """Return whether a checkpoint of `step` is due for a reason other than the elapsed time."""
        return self.checkpoints is not None and (
            is_last or is_due(self.config.checkpoint.every, step)
        )

    @cached_property
    def _end_rule(self) -> EndRule | None:
        """Rule that can end the run early; None without one.

        Runs without checkpoints have none: they train no weights, but write a fixed set of records.
        """
        return None if self.checkpoints is None else EndRule.from_config(self.config)

    def _read_recorded_metrics(self) -> list[dict[str, float]]:
        """Return the recorded metrics of the completed steps for the end rule; empty on ranks other
        than 0, and without an end rule."""
        if self.recorder is None or self._end_rule is None:
            return []
        return read_metrics(get_run_paths(self.config).metrics)

    def _apply_end_rule(self, records: Sequence[Record]) -> bool:
        """Return whether `run.end_kl`, `run.end_at` or `run.end_without_gain` ends the run after
        the last of these steps. Collective; rank 0 decides.

        Also adds the records' values to `_metric_history`, and sets `_end_reason`. The metrics of
        the initial policy never end the run.

        Args:
            records: Metrics of the steps since the previous call.
        """
        rule = self._end_rule
        if rule is None:
            return False

        def find_end_reason() -> str | None:
            """Return why the end rule ends the run after these records; None to continue."""
            metrics: Record = {}
            for metrics in map(self._without_extra_evaluation, records):
                if rule.metric in metrics:
                    self._metric_history.append(metrics[rule.metric])
            # The rule applies to the last of the records; step 0 is the initial policy.
            step = int(metrics.get("step", 0))
            reason = rule.find_end_reason(metrics, self._metric_history) if step else None
            return reason and f"ended after step {step}: {reason}"

        # Only rank 0 has the metrics of the servers, and only it reads the recorded metrics.
        self._end_reason = run_and_broadcast_result(
            lambda: None if self.recorder is None else find_end_reason()
        )
        return self._end_reason is not None

    def _without_extra_evaluation(self, record: Record) -> Record:
        """Return a step's metrics without those of an evaluation that ran only because the process
        stopped after this step.

        The step after which the end rule ends a run must not depend on where the run was
        interrupted.
        """
        step = int(record["step"])
        is_saved = self._is_save_due(step, is_last=False)
        if self.should_evaluate(step, is_saved=is_saved):
            return record
        return {name: value for name, value in record.items() if not name.startswith("eval/")}

    def _write_end_reason(self) -> None:
        """Write the reason why the end rule ended the run to a file. Call this after the checkpoint
        is complete."""
        if self.recorder is not None and self._end_reason is not None:
            _log.info("%s", self._end_reason)
            with fenced_write():
                write_file(get_run_paths(self.config).end, f"{self._end_reason}\n")

    def _record(self, step: int, result: StepResult, times: dict[str, float]) -> None:
        """Write the metrics, the samples and the timeline of a step on rank 0."""
        # Every rank checks the name of the metric, so that all ranks fail together.
        if self.checkpoints is not None:
            self.checkpoints.check_metric(result.metrics)
        if self.recorder is None:
            return

        throughput = {
            f"throughput/{unit}_per_s": count / times["time/step"]
            for unit, count in result.processed_counts.items()
        }
        if step == 1 or step % self.config.logging.samples_every == 0:
            self.recorder.write_samples(step, result, self.config.logging.samples_count)
        self.recorder.write_all_samples(step, result)
        # A run without checkpoints resumes after the last step that has metrics, so the samples
        # must be written before the metrics.
        if self.checkpoints is None:
            self.recorder.wait_until_written(step)

        judge_metrics = (
            {} if self.recorder.judge_meter is None else self.recorder.judge_meter.metrics()
        )
        # Flush first: every step in metrics.jsonl has its spans, even if the run is killed here.
        self.timeline.flush()
        self.recorder.metrics_writer.write(
            step, result.metrics | judge_metrics | times | throughput
        )

    def _begin_save(
        self, step: int, metrics: Mapping[str, float] | None, timer: PhaseTimer
    ) -> None:
        """Start to save a checkpoint of `step`.

        Args:
            metrics: Metrics of the step. None for a checkpoint that is saved only because of the
                elapsed time; it is not compared with other checkpoints.
        """
        assert self.checkpoints is not None
        self.stop_condition.restart_save_interval()
        metric = None if metrics is None else self.checkpoints.get_metric(metrics)
        with timer.phase("checkpoint"):
            state = self.begin_save(step)

        # A run that resumes from this checkpoint must repeat the step's evaluation if it is still
        # running now, or run the one that the stop signal prevented.
        owes_evaluation = self._running_evaluation_step == step or (
            self.stop_condition.is_early and self.should_evaluate(step, is_saved=True)
        )
        state = replace(state, owes_evaluation=owes_evaluation, by_time=metrics is None)
        self._pending_checkpoint = state, metric
        if not self.config.checkpoint.asynchronous:
            self._finish_save(timer)

    def _finish_save(self, timer: PhaseTimer) -> None:
        """Wait for the checkpoint that is being written, if any.

        A checkpoint is valid only when all of its files are written.
        """
        pending_checkpoint = self._pending_checkpoint
        self._pending_checkpoint = None
        if pending_checkpoint is None or self.checkpoints is None:
            return
        state, metric = pending_checkpoint
        with timer.phase("checkpoint"):
            state = self.finish_save(state)
            if self.recorder is not None:
                # A resumed run does not repeat the checkpoint's steps, so their samples must be
                # stored before the manifest makes the checkpoint valid.
                self.recorder.wait_until_written(state.step)
                self.checkpoints.commit(state, metric)
                self.on_checkpoint_complete(self.checkpoints.read_newest_states())
                # Delete old checkpoints last: until here, a resume may need them.
                self.checkpoints.prune()


def is_due(every: int, step: int) -> bool:
    """Return whether an action with an interval of `every` steps is due after `step`; never if
    `every` is 0."""
    return every > 0 and step > 0 and step % every == 0
