from __future__ import annotations

from collections.abc import Iterator

import pytest

from aligner.observability.timeline import PhaseTimer


def clock(times: list[float]) -> Iterator[float]:
    yield from times


def test_blocks_of_a_phase_add_up_and_taking_starts_anew() -> None:
    ticks = clock([0, 1, 3, 4, 9, 10, 12, 13])
    timer = PhaseTimer(lambda: next(ticks))
    with timer.phase("train"):  # 1 to 3
        pass
    with timer.phase("train"):  # 4 to 9
        pass
    assert timer.take() == {"time/step": 10, "time/train": 7}
    assert timer.take() == {"time/step": 2}


def test_overlapping_phases_each_count_their_own_time() -> None:
    ticks = clock([0, 1, 2, 4, 8, 9])
    timer = PhaseTimer(lambda: next(ticks))
    with timer.phase("generate"), timer.phase("server_wait"):
        pass
    assert timer.take() == {"time/step": 9, "time/generate": 7, "time/server_wait": 2}


def test_a_phase_is_counted_when_its_block_raises() -> None:
    ticks = clock([0, 1, 3, 4])
    timer = PhaseTimer(lambda: next(ticks))
    with pytest.raises(RuntimeError), timer.phase("train"):
        raise RuntimeError
    assert timer.take()["time/train"] == 2


def test_a_phase_inside_itself_an_open_phase_and_the_name_step_are_refused() -> None:
    timer = PhaseTimer()
    with pytest.raises(ValueError, match="'train' is already being timed"), timer.phase("train"), timer.phase("train"):
        pass
    with pytest.raises(ValueError, match="still being timed: train"), timer.phase("train"):
        timer.take()
    with pytest.raises(ValueError, match="'step' is taken"), timer.phase("step"):
        pass
