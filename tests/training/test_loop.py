"""What the trainer's ranks agree on after a step."""

from __future__ import annotations

from pathlib import Path

from tests.training import loop_jobs
from tests.worker_pool import WorkerPool


def test_when_the_time_for_a_checkpoint_has_come_on_one_rank_all_take_it(pool: WorkerPool) -> None:
    # Rank 0's clock stands still, rank 1's goes on by 40 s a step: 60 s are over after two steps,
    # and after two more.
    assert pool.run(loop_jobs.saves, 2, 1.0) == [[False, True, False, True, False, True]] * 2
    assert pool.run(loop_jobs.saves, 2, 0.0) == [[False] * 6] * 2


def test_a_step_whose_metrics_are_written_has_its_spans_in_the_timeline(
    pool: WorkerPool, tmp_path: Path
) -> None:
    # A run that is killed between the two would leave a trace without the step.
    [steps_with_spans] = pool.run(loop_jobs.steps_with_spans, 1, str(tmp_path))
    assert steps_with_spans == {0: set(), 1: {1}, 2: {1, 2}}
