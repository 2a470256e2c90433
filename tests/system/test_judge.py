"""Tests of runs with a judge that fails repeatedly, and that are killed and resumed."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import time
import urllib.request
from pathlib import Path

import pytest

from benchmarks.runs import Launch, run_to_end
from tests.agents.calling_model import saved
from tests.agents.serving_model import served
from tests.rewards.judge_server import JudgeServer, Reply, judging, says

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS, SAMPLES = 6, 16
OVERRIDES = (
    *(
        "algorithm=grpo",
        "reward=judge",
        "reward.judge_model=tester",
        "reward.judge_input_price=1000",
    ),
    *(
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        f"run.stop_after={STEPS}",
        "checkpoint.every=2",
    ),
    "logging.tensorboard=false",
)


class FlakyJudge:
    """A judge that fails on every second request, and on all requests after `most` answers."""

    def __init__(self) -> None:
        self.most: int | None = None
        self.given = 0

    def __call__(self, question: str, number: int) -> Reply:
        if number % 2 or (self.most is not None and self.given >= self.most):
            return Reply(500, b"out of memory")
        self.given += 1
        return self.answer(question, number)

    def answer(self, question: str, number: int) -> Reply:
        """Return the score, which is the number of digits modulo 11."""
        return says(
            f"SCORE: {sum(character.isdigit() for character in question) % 11}", tokens_in=30
        )


class ForwardingJudge(FlakyJudge):
    """A judge that fails equally often, and forwards the other requests to a served model."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.server: JudgeServer

    def answer(self, question: str, number: int) -> Reply:
        """Return the response of the served model."""
        body = json.dumps(self.server.asked[number]).encode()
        with urllib.request.urlopen(f"{self.url}/chat/completions", body, timeout=60) as response:
            return Reply(200, response.read())


def wait_until_silent(server: JudgeServer, most: int, launch: Launch) -> None:
    """Wait until the judge has sent `most` answers, and 2 s more until the run has stored them."""
    end = time.monotonic() + 200
    while len(server.answered) < most:
        assert time.monotonic() < end and not launch.has_ended
        time.sleep(0.1)
    time.sleep(2)


@pytest.mark.promise("judge-answers-each-request-once")
def test_killed_run_repeats_no_judge_request(
    tmp_path: Path,
) -> None:
    judge = FlakyJudge()
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
    again = run.metrics[2:]  # steps after the checkpoint of step 2
    assert sum(step["judge/from_cache"] for step in again) >= SAMPLES
    assert run.metrics[-1]["judge/cost_total"] == pytest.approx(
        len(server.answered) * 30 * 1000 / 1e6
    )


WHICH, GOOD = " WHICH WHICH", " GOOD GOOD"


def judging_model(directory: Path) -> Path:
    """Save a tiny model that prefers B of two texts, and answers yes or no to one text."""
    texts = random.Random(1)

    def text() -> str:
        return "".join(texts.choices("abcdefgh 0123456789.,", k=12))

    asked = [(f"{text()}|{text()}{WHICH}", "B") for _ in range(8)]
    asked += [(f"{text()}{GOOD}", answer) for answer in ("yes", "no") * 4]
    conversations = [
        [{"role": "user", "content": one}, {"role": "assistant", "content": said}]
        for one, said in asked
    ]
    return saved(directory, "qwen", conversations, [])


def test_served_judge_model_gets_no_request_twice(
    tmp_path: Path,
) -> None:
    """The reward is the model's probability of `yes`.

    The evaluation compares responses with references in both orders. The model always prefers B, so
    that every comparison is a tie.
    """
    asks = {"url": "{}", "model": "tiny", "max_tokens": "1", "tries": "1", "input_price": "1000"}
    prompts, steps = 3, 4
    (directory := tmp_path / "judge").mkdir()
    with served(judging_model(directory)) as url, judging(judge := ForwardingJudge(url)) as server:
        judge.server, asks["url"] = server, server.url
        judge.most = 4 * prompts + 2 * SAMPLES + SAMPLES // 2  # in the middle of a step
        overrides = (
            *(
                "algorithm=grpo",
                "reward=judge",
                "reward.judge_asks=yes_no",
                f"reward.judge_template='{{response}}{GOOD}'",
            ),
            *(f"reward.judge_{name}={value}" for name, value in asks.items()),
            *(f"+evaluation.judge.judge_{name}={value}" for name, value in asks.items()),
            f"+evaluation.judge.judge_template='{{response_a}}|{{response_b}}{WHICH}'",
            *("evaluation.every=2", "evaluation.samples=2", "evaluation.function=digit_fraction"),
            "evaluation.prompts=[abc, 12, x]",
            *(
                "rollout.prompts_per_step=4",
                "rollout.samples_per_prompt=4",
                f"run.stop_after={steps}",
                "checkpoint.every=2",
            ),
            "logging.tensorboard=false",
        )
        with Launch(tmp_path / "run", *overrides) as launch:
            wait_until_silent(server, judge.most, launch)
            launch.interrupt(signal.SIGKILL)
            launch.finish(30, orphans_s=60)
        before, judge.most = len(server.answered), None
        run = run_to_end(tmp_path / "run", *overrides, "run.resume=auto")
        assert len(set(server.answered)) == len(server.answered) > before
    assert [step["step"] for step in run.metrics] == list(range(steps + 1))
    assert all(
        0 < step["reward/mean"] < 1 and step["rollout/skipped"] == 0 for step in run.metrics[1:]
    )
    evaluated = [step for step in run.metrics if "eval/score" in step]
    assert [step["step"] for step in evaluated] == [0, 2, 4]
    for step in evaluated:
        assert step["eval/judge_unreadable"] == 0
        assert (
            step["eval/judge_win_rate"],
            step["eval/judge_ties"],
            step["eval/judge_order_bias"],
        ) == (0.5, 1, 1)
    with sqlite3.connect(run.paths.judge / "answers.sqlite") as database:
        answers = [
            json.loads(answer) for (answer,) in database.execute("SELECT answer FROM answers")
        ]
    assert len(answers) == len(server.answered)
    cost = sum(answer["tokens_in"] for answer in answers) * 1000 / 1e6
    assert run.metrics[-1]["judge/cost_total"] == pytest.approx(cost)
