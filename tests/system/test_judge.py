"""A run that a judge scores: what becomes of it where the judge fails, and where the run is killed."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from benchmarks.runs import Launch, run_to_end
from tests.rewards.judge_server import JudgeServer, Reply, judging, says

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS, SAMPLES = 6, 16
OVERRIDES = (
    *("algorithm=grpo", "reward=judge", "reward.judge_model=tester", "reward.judge_input_price=1000"),
    *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", f"run.stop_after={STEPS}", "checkpoint.every=2"),
    "logging.tensorboard=false",
)


class HalfBroken:
    """Fails every other time, and always once it has given `most` answers."""

    def __init__(self) -> None:
        self.most: int | None = None
        self.given = 0

    def __call__(self, question: str, number: int) -> Reply:
        if number % 2 or (self.most is not None and self.given >= self.most):
            return Reply(500, b"out of memory")
        self.given += 1
        return says(f"SCORE: {sum(character.isdigit() for character in question) % 11}", tokens_in=30)


def wait_until_silent(server: JudgeServer, most: int, launch: Launch) -> None:
    """Until the judge has answered so often, and what it said is on disk."""
    end = time.monotonic() + 200
    while len(server.answered) < most:
        assert time.monotonic() < end and not launch.has_ended
        time.sleep(0.1)
    time.sleep(2)


def test_a_run_that_is_killed_and_goes_on_asks_a_judge_that_fails_half_of_the_time_nothing_twice(tmp_path: Path) -> None:
    judge = HalfBroken()
    judge.most = 4 * SAMPLES + SAMPLES // 2  # in the middle of a step
    with judging(judge) as server:
        overrides = (*OVERRIDES, f"reward.judge_url={server.url}")
        with Launch(tmp_path / "run", *overrides) as launch:
            wait_until_silent(server, judge.most, launch)
            before = len(server.answered)
            launch.interrupt(signal.SIGKILL)
            launch.finish(30, orphans_s=60)
        judge.most = None
        run = run_to_end(tmp_path / "run", *overrides, "run.resume=auto")
        assert len(set(server.answered)) == len(server.answered) > before
    assert [step["step"] for step in run.metrics] == list(range(1, STEPS + 1))
    assert all(step["rollout/skipped"] == 0 for step in run.metrics)
    again = run.metrics[2:]  # behind the checkpoint of step 2
    assert sum(step["judge/from_cache"] for step in again) >= SAMPLES
    assert run.metrics[-1]["judge/cost_total"] == pytest.approx(len(server.answered) * 30 * 1000 / 1e6)
