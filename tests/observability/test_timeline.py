"""Timelines of processes, their trace, and the durations of phases."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aligner.errors import AlignerError
from aligner.observability.timeline import PhaseTimer, Timeline, open_timeline
from aligner.observability.trace import (
    Span,
    compute_busy_shares,
    flatten_spans,
    read_spans,
    steps_window,
    write_trace,
)
from aligner.paths import RunPaths
from aligner.schema import Config
from tests.observability.traces import checked_trace


class Clock:
    """A clock that a test advances; its wall time is 1000 s ahead."""

    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1000.0 + self.now


def timeline(path: Path, clock: Clock) -> Timeline:
    return Timeline(path, clock=clock, wall_clock=clock.wall)


def spend(timeline: Timeline, clock: Clock, name: str, seconds: float, **about: int) -> None:
    with timeline.span(name, **about):
        clock.now += seconds
    timeline.flush()


def of(spans: list[Span], role: str) -> list[tuple[str, float, float, int | None]]:
    """Return name, start and end in seconds of the clock, and step of a role's spans."""
    return [
        (s.name, s.start / 1e6 - 1000, s.end / 1e6 - 1000, s.step) for s in spans if s.role == role
    ]


def test_timed_phases_become_spans_of_their_step(tmp_path: Path) -> None:
    clock, paths = Clock(), RunPaths(tmp_path)
    own = Timeline(paths.timeline / "trainer-0.jsonl", {"reshard": "publish"}, clock, clock.wall)
    own.begin_run(0)
    timer = PhaseTimer(clock, on_end=own.add)
    for step in (1, 2):
        own.begin_step(step)
        with timer.phase("train"):
            clock.now += 2
        with timer.phase("reshard"):
            clock.now += 1
        assert timer.take() == {"time/step": 3, "time/train": 2, "time/reshard": 1}
    # Spans of the last step are not written yet.
    assert of(read_spans(paths), "trainer") == [("train", 5, 7, 1), ("publish", 7, 8, 1)]
    own.flush()
    assert of(read_spans(paths), "trainer")[2:] == [("train", 8, 10, 2), ("publish", 10, 11, 2)]


def test_rounded_spans_stay_nested(tmp_path: Path) -> None:
    clock, paths, chance = Clock(), RunPaths(tmp_path), random.Random(3)
    own = timeline(paths.timeline / "trainer-0.jsonl", clock)

    def work(depth: int) -> None:
        with own.span(f"depth {depth}"):
            for _ in range(chance.randrange(4) if depth < 5 else 0):
                clock.now += chance.choice((0.0, 3e-7, 1e-6, 0.1)) * chance.random()
                work(depth + 1)
        clock.now += chance.choice((0.0, 4e-7))

    for _ in range(100):
        work(0)
    own.flush()
    write_trace(paths)
    assert len(checked_trace(paths.trace)["trainer"]) > 300


def test_each_thread_has_its_own_track(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for rank in (0, 1):
        own = Timeline(paths.timeline / f"trainer-{rank}.jsonl")
        with own.span("train"):
            now = time.perf_counter()
            other = threading.Thread(target=own.add, args=("generate", now, now), name="pipeline")
            other.start()
            other.join()
        own.flush()
    write_trace(paths)
    checked_trace(paths.trace)
    events = json.loads(paths.trace.read_text())["traceEvents"]
    threads = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert threads[0] == "rank 0" and threads[1] == "rank 1"
    assert sorted(threads.values()) == ["rank 0", "rank 0 pipeline", "rank 1", "rank 1 pipeline"]


KILLED = """
import os, signal, sys
from pathlib import Path
from aligner.observability.timeline import Timeline
timeline = Timeline(Path(sys.argv[1]))
for step in (1, 2, 3):
    timeline.begin_step(step)
    with timeline.span("train"):
        pass
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_writer_loses_only_its_last_step(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    file = paths.timeline / "trainer-0.jsonl"
    assert (
        subprocess.run([sys.executable, "-c", KILLED, str(file)], check=False).returncode
        == -signal.SIGKILL
    )
    assert [span.step for span in read_spans(paths)] == [1, 2]
    with file.open("a") as torn:
        torn.write('{"name": "tra')  # a crash in the middle of a line
    assert [span.step for span in read_spans(paths)] == [1, 2]
    again = Timeline(file)
    again.begin_step(3)
    with again.span("train"):
        pass
    again.flush()
    assert [span.step for span in read_spans(paths)] == [1, 2, 3]


def train(paths: RunPaths, clock: Clock, done: int, last: int) -> None:
    """Write the timelines of a trainer and a critic for the steps `done` + 1 to `last`, 3 s each."""
    critic = timeline(paths.timeline / "critic-0.jsonl", clock)
    trainer = timeline(paths.timeline / "trainer-0.jsonl", clock)
    spend(critic, clock, "restore", 1)
    trainer.begin_run(done)
    for step in range(done + 1, last + 1):
        trainer.begin_step(step)
        spend(trainer, clock, "train", 2)
        spend(critic, clock, "values", 1, rows=8)
    trainer.flush()


def test_repeated_steps_of_resumed_run_appear_once(tmp_path: Path) -> None:
    clock, paths = Clock(), RunPaths(tmp_path)
    train(paths, clock, 0, 4)
    clock.now = 100
    train(paths, clock, 2, 5)  # from the checkpoint of step 2
    spans = read_spans(paths)
    assert [step for *_, step in of(spans, "trainer")] == [1, 2, 3, 4, 5]
    assert [start for _, start, _, _ in of(spans, "trainer")] == [6, 9, 101, 104, 107]
    values = [(start, step) for name, start, _, step in of(spans, "critic") if name == "values"]
    # The critic's span of step 2 begins after the trainer's, so the resume drops it.
    assert values == [(8, 1), (103, 3), (106, 4), (109, 5)]
    clock.now = 200
    train(paths, clock, 4, 5)
    assert [start for _, start, _, _ in of(read_spans(paths), "trainer")] == [6, 9, 101, 104, 201]
    clock.now = 300
    train(paths, clock, 0, 1)  # resumed without a checkpoint: from the beginning
    assert of(read_spans(paths), "trainer") == [("train", 301, 303, 1)]


def test_server_spans_get_the_step_of_the_trainer(tmp_path: Path) -> None:
    clock, paths = Clock(), RunPaths(tmp_path)
    train(paths, clock, 0, 2)
    critic = [span for span in read_spans(paths) if span.role == "critic"]
    assert [(span.name, span.step, span.attributes) for span in critic] == [
        ("restore", None, {}),
        ("values", 1, {"rows": 8}),
        ("values", 2, {"rows": 8}),
    ]


def test_clock_offset_corrects_spans_of_other_machines(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.timeline.mkdir()
    (paths.timeline / "reward.1-3.jsonl").write_text(
        '{"opened": 10, "clock_offset_us": 500}\n{"name": "score", "start": 20, "us": 5}\n'
    )
    assert read_spans(paths) == [Span("reward.1", 3, "score", 520, 525, attributes={})]


def test_newest_bytes_return_last_spans_of_all_roles(tmp_path: Path) -> None:
    clock, paths = Clock(), RunPaths(tmp_path)
    train(paths, clock, 0, 200)
    whole, newest = read_spans(paths), read_spans(paths, newest_bytes=2000)
    assert newest == whole[-len(newest) :] and 10 < len(newest) < 40
    assert {span.role for span in newest} == {"trainer", "critic"}


def test_size_limit_keeps_the_last_spans_of_all_roles(
    tmp_path: Path,
) -> None:
    """The critic's timeline has no size limit, so that it goes back further than the trainer's."""
    whole = RunPaths(tmp_path / "whole")
    for paths, limit in ((whole, sys.maxsize), (RunPaths(tmp_path / "cut"), 4000)):
        clock = Clock()
        for done in (0, 90):
            trainer = Timeline(
                paths.timeline / "trainer-0.jsonl", clock=clock, wall_clock=clock.wall, limit=limit
            )
            critic = timeline(paths.timeline / "critic-0.jsonl", clock)
            trainer.begin_run(done)
            for step in range(done + 1, done + 101):
                trainer.begin_step(step)
                spend(trainer, clock, "train", 2)
                spend(critic, clock, "values", 1)
                file = paths.timeline / "trainer-0.jsonl"
                assert file.stat().st_size <= limit
    spans, kept = read_spans(whole), read_spans(paths)
    assert kept == spans[-len(kept) :] and 40 < len(kept) < 140
    assert {span.role for span in kept} == {"trainer", "critic"} and kept[0].role == "trainer"


def test_invalid_timeline_file_is_reported(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.timeline.mkdir()
    (paths.timeline / "trainer-0.jsonl").write_text("train 3\n")
    with pytest.raises(AlignerError, match=r"trainer-0\.jsonl: not a valid timeline"):
        read_spans(paths)


def test_disabled_timeline_writes_nothing(tmp_path: Path) -> None:
    config = Config()
    config.run.dir, config.logging.timeline = str(tmp_path), False
    own = open_timeline(config, "trainer", 0)
    own.begin_run(0)
    own.begin_step(1)
    with own.span("train"):
        pass
    own.flush()
    assert write_trace(RunPaths(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def spans(rank: int, *named: tuple[str, int, int]) -> list[Span]:
    return [Span("trainer", rank, name, start, end, step=1) for name, start, end in named]


def test_time_is_attributed_to_the_innermost_span() -> None:
    cut = flatten_spans(
        spans(0, ("evaluate", 0, 10), ("generate", 2, 4), ("score", 4, 5), ("train", 12, 13))
    )
    assert [(span.name, span.start, span.end) for span in cut] == [
        ("evaluate", 0, 2),
        ("generate", 2, 4),
        ("score", 4, 5),
        ("evaluate", 5, 10),
        ("train", 12, 13),
    ]


def test_busy_shares_are_rank_means_without_waits() -> None:
    both = spans(0, ("train", 0, 60), ("wait", 60, 100)) + spans(
        1, ("train", 0, 100), ("score", 50, 70), ("wait", 80, 90)
    )
    other = [Span("trainer", 0, "score", 80, 120, thread="pipeline")]
    assert steps_window(both, 3) == (0, 100)
    shares = compute_busy_shares([*both, *other], (0, 100))
    assert shares == {
        "trainer": {
            "train": pytest.approx((0.6 + 0.7) / 2),
            "score": pytest.approx((0.2 + 0.2) / 2),
        }
    }


def ticking(times: list[float]) -> Iterator[float]:
    yield from times


def test_blocks_of_a_phase_add_up_until_take() -> None:
    ticks = ticking([0, 1, 3, 4, 9, 10, 12, 13])
    timer = PhaseTimer(lambda: next(ticks))
    with timer.phase("train"):  # 1 to 3
        pass
    with timer.phase("train"):  # 4 to 9
        pass
    assert timer.take() == {"time/step": 10, "time/train": 7}
    assert timer.take() == {"time/step": 2}


def test_overlapping_phases_each_count_their_own_time() -> None:
    ticks = ticking([0, 1, 2, 4, 8, 9])
    timer = PhaseTimer(lambda: next(ticks))
    with timer.phase("generate"), timer.phase("server_wait"):
        pass
    assert timer.take() == {"time/step": 9, "time/generate": 7, "time/server_wait": 2}


def test_phase_is_timed_when_its_block_raises() -> None:
    ticks = ticking([0, 1, 3, 4])
    timer = PhaseTimer(lambda: next(ticks))
    with pytest.raises(RuntimeError), timer.phase("train"):
        raise RuntimeError
    assert timer.take()["time/train"] == 2


def test_nested_open_and_reserved_phases_are_refused() -> None:
    timer = PhaseTimer()
    with (
        pytest.raises(ValueError, match="'train' is already being timed"),
        timer.phase("train"),
        timer.phase("train"),
    ):
        pass
    with pytest.raises(ValueError, match="still being timed: train"), timer.phase("train"):
        timer.take()
    with pytest.raises(ValueError, match="'step' is reserved"), timer.phase("step"):
        pass
