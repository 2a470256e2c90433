"""Test timed checkpoints and the timeline of the training loop."""

from __future__ import annotations

from pathlib import Path

from tests.training import loop_jobs
from tests.worker_pool import WorkerPool


def test_timed_checkpoint_is_due_on_all_ranks_at_once(pool: WorkerPool) -> None:
    # Rank 0's clock does not advance; rank 1's advances by 40 s per step. 60 s have elapsed after
    # every second step.
    assert pool.run(loop_jobs.saves, 2, 1.0) == [[False, True, False, True, False, True]] * 2
    assert pool.run(loop_jobs.saves, 2, 0.0) == [[False] * 6] * 2


def test_spans_are_written_before_metrics(pool: WorkerPool, tmp_path: Path) -> None:
    # In the other order, a run that is killed between both would leave a timeline without the step.
    [steps_with_spans] = pool.run(loop_jobs.steps_with_spans, 1, str(tmp_path))
    assert steps_with_spans == {0: set(), 1: {1}, 2: {1, 2}}
