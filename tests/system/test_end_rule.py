"""Tests of complete runs that end when a metric reaches its target."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from aligner.launcher.status import read_status
from aligner.paths import find_complete_steps
from benchmarks.runs import checkpoint_differences, repeatable, run_to_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TARGET = 0.25
GIVEN = (
    "algorithm=grpo",
    f"run.end_at=reward/mean:{TARGET}",
    "run.steps=30",
    "logging.tensorboard=false",
)


@pytest.mark.promise("stop-criterion-is-independent-of-resumes")
def test_run_ends_at_target_and_continues_without_it(tmp_path: Path) -> None:
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()  # both runs need the same name, which checkpoints contain
    run = run_to_end(tmp_path / "whole" / "run", *GIVEN)
    rewards = [step["reward/mean"] for step in run.metrics]
    last = len(rewards)
    assert 3 <= last < 30 and rewards[-1] >= TARGET > max(rewards[:-1])
    why = (
        f"ended after step {last}: reward/mean {rewards[-1]:.6g} has reached"
        f" run.end_at=reward/mean:{TARGET}"
    )
    assert f"\n{why}\n" in run.out and why in run.paths.log("trainer", 0).read_text()
    assert find_complete_steps(run.paths.checkpoints) == [last]
    status = read_status(run.paths.root)
    assert (status.state, status.resumable, status.exit_code, status.note) == (
        "finished",
        False,
        0,
        why,
    )

    directory = tmp_path / "stopped" / "run"
    stopped = run_to_end(directory, *GIVEN, "run.stop_after=2")
    assert len(stopped.metrics) == 2 and read_status(directory).state == "stopped"
    resumed = run_to_end(directory, *GIVEN, "run.resume=true")
    assert f"\n{why}\n" in resumed.out
    assert repeatable(resumed.metrics) == repeatable(run.metrics)
    assert checkpoint_differences(run.paths, resumed.paths, last) == []

    again = run_to_end(directory, *GIVEN, "run.resume=true")
    assert f"\n{why}\n" in again.out and len(again.metrics) == last
    on = next(line for line in again.out.splitlines() if "continue to the last step" in line)
    words = [
        word
        for word in shlex.split(on, comments=True)
        if word.startswith("run.") and not word.startswith("run.dir=")
    ]
    assert "run.end_at=null" in words
    further = run_to_end(
        directory,
        "algorithm=grpo",
        "logging.tensorboard=false",
        *words,
        f"run.stop_after={last + 1}",
    )
    assert len(further.metrics) == last + 1
    assert read_status(directory).state == "stopped"
