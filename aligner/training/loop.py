"""Training loop shared by all trainers: weight sync, evaluation, metrics, checkpoints, resuming."""

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import FrameType

import torch

from aligner.data.fencing import fenced_write
from aligner.errors import STOP_SIGNAL
from aligner.files import write_file
from aligner.megatron.world import World
from aligner.observability.metrics import Record, read_metrics
from aligner.observability.timeline import PhaseTimer, Timeline, report_phase, report_stage
from aligner.paths import run_paths
from aligner.schema import Config
from aligner.training.end_rule import EndRule
from aligner.training.run_checkpoints import RunCheckpoints, TrainingState
from aligner.training.services import together
from aligner.training.step_metrics import Recorder, StepResult

_log = logging.getLogger(__name__)


class StopCondition:
    """Decides after which step a run ends: its last step, or the step during which it receives the
    stop signal.

    Every rank of the trainer has an instance; all ranks reach the same decision. The same
    all-reduce also decides whether a checkpoint is due because of the elapsed time.
    """

    def __init__(
        self, config: Config, world: World, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Install the handler of the stop signal in this process; only the main thread may do
        this."""
        self.last = min(config.run.steps, config.run.stop_after or config.run.steps)
        self.is_early = False
        """Whether the run received the stop signal and ends before its last step."""
        self.is_save_due = False
        """Whether `checkpoint.every_minutes` had elapsed on some rank at the last collective
        decision."""
        self._world = world
        self._clock = clock
        self._save_every_s = 60 * config.checkpoint.every_minutes
        self._saved_at = clock()
        self._told = False
        signal.signal(STOP_SIGNAL, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {STOP_SIGNAL})

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._told = True

    def is_early_after(self, done: int) -> bool:
        """Return whether the run was asked to stop while steps remain. Collective.

        Also sets `is_early` and `is_save_due`.

        Args:
            done: Number of completed training steps.
        """
        overdue = 0 < self._save_every_s <= self._clock() - self._saved_at
        # One rank's signal or clock decides for all ranks: otherwise some ranks would start a
        # step, or a checkpoint, that the others do not.
        is_stopped, is_save_due = self._world.all_reduce_max(
            torch.tensor([int(self._told), int(overdue)], device=self._world.device)
        ).tolist()
        self.is_early = bool(is_stopped) and done < self.last
        self.is_save_due = bool(is_save_due)
        return self.is_early

    def is_after(self, done: int) -> bool:
        """Return whether the run ends after step `done`, the number of completed steps.
        Collective."""
        return self.is_early_after(done) or done == self.last

    def count_anew(self) -> None:
        """Restart the interval of `checkpoint.every_minutes`, because a checkpoint is being
        saved."""
        self._saved_at = self._clock()


@dataclass(kw_only=True)
class TrainingLoop:
    """Training loop of one trainer rank; the base class of all trainers.

    Every rank runs the same program and calls every method with the same arguments.
    """

    config: Config
    checkpoints: RunCheckpoints | None
    """Checkpoints of the run; None for a run without checkpoints."""
    recorder: Recorder | None
    timeline: Timeline
    stop: StopCondition
    _saved: Sequence[TrainingState] = field(default=(), init=False)
    """Checkpoints that the run may resume from, in order of their steps."""
    _saving: tuple[TrainingState, float | None] | None = field(default=None, init=False)
    """Checkpoint whose files are being written, and the value of its metric."""
    _evaluating: int | None = field(default=None, init=False)
    """Step whose weights are being evaluated while the next step trains."""
    _evaluations: list[float] = field(default_factory=list, init=False)
    """Values measured so far of the metric that `run.end_without_gain` uses; filled on rank 0
    only."""
    _reached: str | None = field(default=None, init=False)
    """Reason why the run ended before its last step; None if it did not."""

    def run(self) -> None:
        """Train from the last completed step to the end of the run."""
        first = self._resume()
        if self.stop.is_early_after(first):
            return
        report_stage(self.config, "trainer", "syncing the weights to the engine")

        self.begin(first)
        timer = PhaseTimer(listener=self.timeline.add, on_begin=partial(report_phase, self.config))
        self._evaluate_beforehand(first, timer)
        if not self._has_reached_its_end(self._recorded()):
            self._train(first, timer)

        self._finish_save(timer)
        self.finish()
        self._tell_what_was_reached()
        self.timeline.flush()

    def _train(self, first: int, timer: PhaseTimer) -> None:
        for step in range(first, self.stop.last):
            done = step + 1
            self.timeline.begin_step(done)
            # The metrics, spans and checkpoint of a step carry the number of completed steps,
            # which is also the version of its weights.
            result = self.step(step, timer)

            ends = self.stop.is_after(done)
            self.publish(done, timer, last=ends)
            self._finish_evaluation(timer)

            if not self.stop.is_early:  # reserve the rest of the grace period for the checkpoint
                # Evaluations depend on the step alone: a checkpoint that is saved because of the
                # elapsed time causes none.
                evaluated = self._evaluate(
                    done, timer, saves=self._saves(done, ends=ends), beside=not ends
                )
                result.metrics.update(evaluated)
                if self._has_reached_its_end([{"step": done, **result.metrics}]):
                    ends = True
                    result.metrics.update(
                        evaluated or self._evaluate(done, timer, saves=True, as_last=True)
                    )

            saves = self._saves(done, ends=ends)
            self._record(done, result, timer.take())
            if timer.on_begin is not None:  # stages are reported until the first step is done
                timer.on_begin = None
                report_stage(self.config, "trainer", None)

            self._finish_save(timer)  # the checkpoint that was started one step ago
            if saves:
                self._begin_save(done, result.metrics, timer)
            elif self.checkpoints is not None and self.stop.is_save_due:
                self._begin_save(done, None, timer)
            if ends:
                break

    def resume(self, saved: Sequence[TrainingState]) -> int:
        """Restore the last of these checkpoints, if there is one, and return the number of
        completed steps."""
        raise NotImplementedError

    def begin(self, first: int) -> None:
        """Prepare the first step of this process; `first` is the number of completed steps."""

    def step(self, step: int, timer: PhaseTimer) -> StepResult:
        """Run one training step; `step` is the number of steps completed before it."""
        raise NotImplementedError

    def publish(self, version: int, timer: PhaseTimer, *, last: bool) -> None:
        """Send the weights to the processes that use them.

        Args:
            version: Version of the weights, which is the number of completed steps.
            last: Whether no further step follows.
        """

    def is_evaluated(self, step: int, *, saves: bool) -> bool:
        """Return whether the weights after `step` must be evaluated.

        Args:
            saves: Whether a checkpoint of the step is saved.
        """
        return False

    def begin_evaluation(self, step: int) -> bool:
        """Start to evaluate the weights after `step` concurrently with the next step.

        Returns:
            Whether an evaluation was started, whose result `evaluate` returns after the next step.
            False if `evaluate` does all of the work.
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

    def committed(self, kept: Sequence[TrainingState]) -> None:
        """Handle the completion of a checkpoint; `kept` are now the newest checkpoints. Rank 0
        only."""

    def finish(self) -> None:
        """Complete the work of this process after its last step."""

    def close(self) -> None:
        """Release the resources of the run."""

    def _resume(self) -> int:
        if self.checkpoints is not None and self.config.run.resumes:
            self._saved = self.checkpoints.newest()

        first = self.resume(self._saved)
        if self.recorder is not None:
            self.recorder.truncate_after(first, amends=self._owes_evaluation)
            with fenced_write():
                # The file states why an earlier process ended the run; the run now continues.
                run_paths(self.config).end.unlink(missing_ok=True)  # it may go on from there now
        self.timeline.begin_run(first)
        return first

    @property
    def _owes_evaluation(self) -> bool:
        """Whether the step that the run resumes from has not been evaluated yet, but must be."""
        return (
            bool(self._saved)
            and self._saved[-1].owes_evaluation
            and self.is_evaluated(self._saved[-1].step, saves=True)
        )

    def _evaluate_beforehand(self, first: int, timer: PhaseTimer) -> None:
        """Evaluate the initial weights, or the weights of a checkpoint whose evaluation is
        pending."""
        owes = self._owes_evaluation
        beside = owes and first < self.stop.last
        evaluated = (
            self._evaluate(first, timer, saves=owes, beside=beside) if owes or first == 0 else {}
        )

        if not evaluated:
            return

        evaluated |= {"time/evaluate": timer.take()["time/evaluate"]}
        if owes:
            self._amend(first, evaluated)
        elif self.recorder is not None:
            self.recorder.metrics.write(first, evaluated)

    def _amend(self, step: int, evaluated: Mapping[str, float]) -> None:
        """Add the evaluation's metrics to the last recorded step, and to its checkpoint if there is
        one."""
        metric = None if self.checkpoints is None else self.checkpoints.metric(evaluated)
        # A checkpoint that is still being written has no manifest yet; its state is changed in
        # memory.
        if self._saving is not None and self._saving[0].step == step:
            state = replace(self._saving[0], owes_evaluation=False)
            self._saving = state, None if state.by_time else metric

        if self.recorder is None:
            return
        self.recorder.metrics.amend(step, evaluated)
        if self.checkpoints is not None and self.checkpoints.steps()[-1:] == [step]:
            self.checkpoints.settle(step, metric)

    def _evaluate(
        self,
        step: int,
        timer: PhaseTimer,
        *,
        saves: bool,
        as_last: bool = False,
        beside: bool = False,
    ) -> dict[str, float]:
        """Evaluate the weights after `step` if an evaluation is due.

        Args:
            saves: Whether a checkpoint of the step is saved.
            as_last: Evaluate if an evaluation is due after the last step of the run.
            beside: Evaluate concurrently with the next step if the trainer supports this.

        Returns:
            The metrics; empty if no evaluation is due, or if it runs concurrently with the next
            step.
        """
        if not self.is_evaluated(self.config.run.steps if as_last else step, saves=saves):
            return {}
        with timer.phase("evaluate"):
            if beside and self.begin_evaluation(step):
                self._evaluating = step
                return {}
            self._evaluating = None  # this call completes an evaluation that was started
            return self.evaluate(step)

    def _finish_evaluation(self, timer: PhaseTimer) -> None:
        """Wait for the evaluation that was started one step ago, if any, and record it for its
        step."""
        step = self._evaluating
        self._evaluating = None
        if step is None:
            return
        with timer.phase("evaluate"):
            evaluated = self.evaluate(step)
        if self.checkpoints is not None:
            self.checkpoints.check_metric(evaluated)
        self._amend(step, evaluated)

    def _saves(self, step: int, *, ends: bool) -> bool:
        """Return whether a checkpoint of `step` is due for a reason other than the elapsed time."""
        return self.checkpoints is not None and (ends or is_due(self.config.checkpoint.every, step))

    @cached_property
    def _end_rule(self) -> EndRule | None:
        return None if self.checkpoints is None else EndRule.of(self.config)

    def _recorded(self) -> list[dict[str, float]]:
        """Return the recorded metrics of the completed steps; empty on ranks other than 0 and
        without an end rule."""
        return (
            []
            if self.recorder is None or self._end_rule is None
            else read_metrics(run_paths(self.config).metrics)
        )

    def _has_reached_its_end(self, records: Sequence[Record]) -> bool:
        """Return whether `run.end_kl`, `run.end_at` or `run.end_without_gain` ends the run.
        Collective.

        The metrics of the initial policy never end the run. Rank 0 decides.

        Args:
            records: Metrics of the steps since the previous call.
        """
        rule = self._end_rule
        if rule is None:
            return False

        def reason() -> str | None:
            measured: Record = {}
            for measured in map(self._comparable, records):
                if rule.metric in measured:
                    self._evaluations.append(measured[rule.metric])
            done = int(measured.get("step", 0))
            end_reason = rule.reason(measured, self._evaluations) if done else None
            return end_reason and f"ended after step {done}: {end_reason}"

        self._reached = together(lambda: None if self.recorder is None else reason())
        return self._reached is not None

    def _comparable(self, record: Record) -> Record:
        """Return a step's metrics without those of an evaluation that ran only because the run
        stopped there.

        The step at which a run ends must not depend on where the run was interrupted.
        """
        step = int(record["step"])
        if self.is_evaluated(step, saves=self._saves(step, ends=False)):
            return record
        return {name: value for name, value in record.items() if not name.startswith("eval/")}

    def _tell_what_was_reached(self) -> None:
        """Write to a file why the run ended before its last step, after its checkpoint is
        complete."""
        if self.recorder is not None and self._reached is not None:
            _log.info("%s", self._reached)
            with fenced_write():
                write_file(run_paths(self.config).end, f"{self._reached}\n")

    def _record(self, step: int, result: StepResult, times: dict[str, float]) -> None:
        """Write the metrics, the samples and the timeline of a step on rank 0."""
        if self.checkpoints is not None:
            self.checkpoints.check_metric(result.metrics)
        if self.recorder is None:
            return

        throughput = {
            f"throughput/{unit}_per_s": count / times["time/step"]
            for unit, count in result.processed.items()
        }
        if step == 1 or step % self.config.logging.samples_every == 0:
            self.recorder.write_samples(step, result, self.config.logging.samples_count)
        self.recorder.keep(step, result)
        if self.checkpoints is None:  # the run resumes after the last step that has metrics
            self.recorder.settle(step)

        judged = {} if self.recorder.judges is None else self.recorder.judges.metrics()
        # Flush first: every step in metrics.jsonl has its spans, even if the run is killed here.
        self.timeline.flush()
        self.recorder.metrics.write(step, result.metrics | judged | times | throughput)

    def _begin_save(
        self, step: int, metrics: Mapping[str, float] | None, timer: PhaseTimer
    ) -> None:
        """Start to save a checkpoint of `step`.

        Args:
            metrics: Metrics of the step. None for a checkpoint that is saved only because of the
                elapsed time; it is not compared with other checkpoints.
        """
        assert self.checkpoints is not None
        self.stop.count_anew()
        metric = None if metrics is None else self.checkpoints.metric(metrics)
        with timer.phase("checkpoint"):
            state = self.begin_save(step)

        owes = self._evaluating == step or (
            self.stop.is_early and self.is_evaluated(step, saves=True)
        )
        self._saving = replace(state, owes_evaluation=owes, by_time=metrics is None), metric
        if not self.config.checkpoint.asynchronous:
            self._finish_save(timer)

    def _finish_save(self, timer: PhaseTimer) -> None:
        """Wait for the checkpoint that is being written, if any.

        A checkpoint is valid only when all of its files are written.
        """
        saving = self._saving
        self._saving = None
        if saving is None or self.checkpoints is None:
            return
        with timer.phase("checkpoint"):
            state = self.finish_save(saving[0])
            if self.recorder is not None:
                self.recorder.settle(state.step)  # a resumed run does not repeat these steps
                self.checkpoints.commit(state, saving[1])
                self.committed(self.checkpoints.newest())
                self.checkpoints.prune()


def is_due(every: int, step: int) -> bool:
    """Return whether an action with an interval of `every` steps is due after `step`; never if
    `every` is 0."""
    return every > 0 and step > 0 and step % every == 0
