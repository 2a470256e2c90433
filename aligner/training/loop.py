"""The training loop: what is done around a step, and how a run goes on from where it stood, is the
same for every trainer."""

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
from aligner.rollout.services import together
from aligner.schema import Config
from aligner.training.end_rule import EndRule
from aligner.training.run_checkpoints import RunCheckpoints, TrainingState
from aligner.training.step_metrics import Recorder, StepResult

_log = logging.getLogger(__name__)


class StopCondition:
    """After which step a run ends: its last, or the one that it is at when it is told to stop. One
    rank's view; all agree.

    In the same breath they agree on whether the time for a checkpoint has come.
    """

    def __init__(
        self, config: Config, world: World, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Takes over the signal to stop in this process; only the main thread may."""
        self.last = min(config.run.steps, config.run.stop_after or config.run.steps)
        self.is_early = False
        """Whether the run was told to stop, and has ended before its last step."""
        self.is_save_due = False
        """Whether on some rank `checkpoint.every_minutes` were over, when the ranks were last
        asked."""
        self._world, self._clock = world, clock
        self._save_every_s, self._saved_at = 60 * config.checkpoint.every_minutes, clock()
        self._told = False
        signal.signal(STOP_SIGNAL, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {STOP_SIGNAL})

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._told = True

    def is_early_after(self, done: int) -> bool:
        """Whether the run was told to stop, with so many steps done and others to come.
        Collective."""
        overdue = 0 < self._save_every_s <= self._clock() - self._saved_at
        told, due = self._world.all_reduce_max(
            torch.tensor([int(self._told), int(overdue)], device=self._world.device)
        ).tolist()
        self.is_early, self.is_save_due = bool(told) and done < self.last, bool(due)
        return self.is_early

    def is_after(self, done: int) -> bool:
        """Whether the run ends after the step `done`: with that many done, none follows.
        Collective."""
        return self.is_early_after(done) or done == self.last

    def count_anew(self) -> None:
        """A checkpoint is taken: the time to the next one begins."""
        self._saved_at = self._clock()


@dataclass(kw_only=True)
class TrainingLoop:
    """One rank of the trainer. Every rank runs the same program, and calls every method with the
    same arguments."""

    config: Config
    checkpoints: RunCheckpoints | None
    """None: the run keeps none."""
    recorder: Recorder | None
    timeline: Timeline
    stop: StopCondition
    _saved: Sequence[TrainingState] = field(default=(), init=False)
    """The checkpoints that the run may resume from, the newest last."""
    _saving: tuple[TrainingState, float | None] | None = field(default=None, init=False)
    """A checkpoint that is being written, and its metric."""
    _evaluating: int | None = field(default=None, init=False)
    """The step whose weights are evaluated beside the one after it."""
    _evaluations: list[float] = field(default_factory=list, init=False)
    """What evaluations have found so far of the metric that `run.end_without_gain` counts by. Rank
    0's."""
    _reached: str | None = field(default=None, init=False)
    """Why the run has ended before its last step, where it has."""

    def run(self) -> None:
        """Train from where the run stands to its end."""
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
            result = self.step(step, timer)
            ends = self.stop.is_after(done)
            self.publish(done, timer, last=ends)
            self._finish_evaluation(timer)
            if not self.stop.is_early:  # what is left of a grace period is for the checkpoint
                # What is measured hangs on steps alone: a checkpoint for the time that has passed
                # has no part in it.
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
            if timer.on_begin is not None:  # how long steps take is known from here on
                timer.on_begin = None
                report_stage(self.config, "trainer", None)
            self._finish_save(timer)  # one that was begun a step ago
            if saves:
                self._begin_save(done, result.metrics, timer)
            elif self.checkpoints is not None and self.stop.is_save_due:
                self._begin_save(done, None, timer)
            if ends:
                break

    def resume(self, saved: Sequence[TrainingState]) -> int:
        """Restore what the last of these checkpoints holds, if there is one; the steps that are
        done."""
        raise NotImplementedError

    def begin(self, first: int) -> None:
        """What comes before the first step of this process, with so many done."""

    def step(self, step: int, timer: PhaseTimer) -> StepResult:
        """One training step, `step` of them done before it."""
        raise NotImplementedError

    def publish(self, version: int, timer: PhaseTimer, *, last: bool) -> None:
        """Take the weights, of as many steps, to where they are used, before a `last` step or
        others."""

    def is_evaluated(self, step: int, *, saves: bool) -> bool:
        """Whether the weights of a step are to be evaluated, with a checkpoint of them or
        without."""
        return False

    def begin_evaluation(self, step: int) -> bool:
        """Begin to evaluate the weights of a step, which `evaluate` is asked for after the next
        one; False: it does all."""
        return False

    def evaluate(self, step: int) -> dict[str, float]:
        """What the weights of a step are worth: `eval/…`."""
        raise NotImplementedError

    def begin_save(self, step: int) -> TrainingState:
        """Begin to write the parts of a checkpoint."""
        raise NotImplementedError

    def finish_save(self, state: TrainingState) -> TrainingState:
        """Wait until all parts of the checkpoint are written; its state, with what is known only
        now."""
        raise NotImplementedError

    def committed(self, kept: Sequence[TrainingState]) -> None:
        """A checkpoint is complete, and these are the newest now. Rank 0 alone."""

    def finish(self) -> None:
        """What comes after the last step of this process."""

    def close(self) -> None:
        """Let go of what the run has used."""

    def _resume(self) -> int:
        if self.checkpoints is not None and self.config.run.resumes:
            self._saved = self.checkpoints.newest()
        first = self.resume(self._saved)
        if self.recorder is not None:
            self.recorder.truncate_after(first, amends=self._owes_evaluation)
            with fenced_write():
                run_paths(self.config).end.unlink(missing_ok=True)  # it may go on from there now
        self.timeline.begin_run(first)
        return first

    @property
    def _owes_evaluation(self) -> bool:
        """Whether the step that the run resumes from is still to be evaluated."""
        return (
            bool(self._saved)
            and self._saved[-1].owes_evaluation
            and self.is_evaluated(self._saved[-1].step, saves=True)
        )

    def _evaluate_beforehand(self, first: int, timer: PhaseTimer) -> None:
        """Evaluate the initial weights, or those of a checkpoint whose evaluation is owed."""
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
        """Add what its evaluation has found to the last step that was recorded, and to its
        checkpoint if there is one."""
        metric = None if self.checkpoints is None else self.checkpoints.metric(evaluated)
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
        """Evaluate a step where one is due: that of a run's last step with `as_last`.

        `beside` the next one, if the trainer can: then nothing is known yet.
        """
        if not self.is_evaluated(self.config.run.steps if as_last else step, saves=saves):
            return {}
        with timer.phase("evaluate"):
            if beside and self.begin_evaluation(step):
                self._evaluating = step
                return {}
            self._evaluating = None  # it may be what was begun
            return self.evaluate(step)

    def _finish_evaluation(self, timer: PhaseTimer) -> None:
        """Wait for what is still to be found by the evaluation that was begun a step ago, if any:
        it is that step's."""
        step, self._evaluating = self._evaluating, None
        if step is None:
            return
        with timer.phase("evaluate"):
            evaluated = self.evaluate(step)
        if self.checkpoints is not None:
            self.checkpoints.check_metric(evaluated)
        self._amend(step, evaluated)

    def _saves(self, step: int, *, ends: bool) -> bool:
        """Whether a checkpoint of a step is taken that is not for the time that has passed."""
        return self.checkpoints is not None and (ends or is_due(self.config.checkpoint.every, step))

    @cached_property
    def _end_rule(self) -> EndRule | None:
        return None if self.checkpoints is None else EndRule.of(self.config)

    def _recorded(self) -> list[dict[str, float]]:
        """The metrics of the steps that are done, if they are asked for. Rank 0's."""
        return (
            []
            if self.recorder is None or self._end_rule is None
            else read_metrics(run_paths(self.config).metrics)
        )

    def _has_reached_its_end(self, records: Sequence[Record]) -> bool:
        """Whether the run ends by what it reached after the last of these steps, which follow those
        of the call before.

        The initial policy ends none. Collective; rank 0 decides.
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
            why = rule.reason(measured, self._evaluations) if done else None
            return why and f"ended after step {done}: {why}"

        self._reached = together(lambda: None if self.recorder is None else reason())
        return self._reached is not None

    def _comparable(self, record: Record) -> Record:
        """A step's metrics without an evaluation that is there because the run stopped or ended
        then: where it ends must not hang on where it was stopped."""
        step = int(record["step"])
        if self.is_evaluated(step, saves=self._saves(step, ends=False)):
            return record
        return {name: value for name, value in record.items() if not name.startswith("eval/")}

    def _tell_what_was_reached(self) -> None:
        """Leave why the run has ended before its last step, once its checkpoint is complete, for
        whoever asks."""
        if self.recorder is not None and self._reached is not None:
            _log.info("%s", self._reached)
            with fenced_write():
                write_file(run_paths(self.config).end, f"{self._reached}\n")

    def _record(self, step: int, result: StepResult, times: dict[str, float]) -> None:
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
        if self.checkpoints is None:  # the run goes on behind the last step that has metrics
            self.recorder.settle(step)
        judged = {} if self.recorder.judges is None else self.recorder.judges.metrics()
        # A run that is killed once a step is in metrics.jsonl still has the step's spans.
        self.timeline.flush()
        self.recorder.metrics.write(step, result.metrics | judged | times | throughput)

    def _begin_save(
        self, step: int, metrics: Mapping[str, float] | None, timer: PhaseTimer
    ) -> None:
        """`metrics` are the step's; None: it is saved for the time that has passed, and not
        compared with others."""
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
        """Wait for the checkpoint that is being written, if any; it counts once all of it is
        there."""
        saving, self._saving = self._saving, None
        if saving is None or self.checkpoints is None:
            return
        with timer.phase("checkpoint"):
            state = self.finish_save(saving[0])
            if self.recorder is not None:
                self.recorder.settle(state.step)  # the steps that a resumed run does not do again
                self.checkpoints.commit(state, saving[1])
                self.committed(self.checkpoints.newest())
                self.checkpoints.prune()


def is_due(every: int, step: int) -> bool:
    """Whether something that is done every so many steps, never where 0, is done after this one."""
    return every > 0 and step > 0 and step % every == 0
