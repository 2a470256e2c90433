"""Tests of failed and interrupted runs, which leave an error message but no processes."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from benchmarks.runs import Launch
from tests.observability.traces import checked_trace
from tests.system.scorers import BAD_PROMPT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = ("run.steps=5000", "logging.tensorboard=false")


def test_scorer_error_names_prompt_and_response(tmp_path: Path) -> None:
    with Launch(
        tmp_path / "run",
        "reward.function=tests.system.scorers:raising",
        "rollout.max_skipped_prompts=0",
        *LONG,
    ) as launch:
        run = launch.finish(150)
    assert run.code == 1, run.report()
    complaint = "the scorer function raised LookupError: no rule for this prompt"
    pattern = (
        rf"aligner: error: reward server .*{complaint} for prompt '{BAD_PROMPT}' and response"
        r" ['\"].+"
    )
    assert re.search(pattern, run.error), run.error
    assert run.metrics == []
    assert [event["name"] for event in checked_trace(run.paths.trace)["reward"]][-1] == "score"


def test_interrupted_run_ends_every_process(tmp_path: Path) -> None:
    with Launch(tmp_path / "run", *LONG) as launch:
        launch.wait_for_step(1)
        assert sum(process.name() == "tritonserver" for process in launch.processes()) == 2
        interrupted = time.monotonic()
        launch.interrupt(signal.SIGINT)
        run = launch.finish(15)
    assert run.code == 130, run.report()
    assert {event["args"]["step"] for event in checked_trace(run.paths.trace)["trainer"]} >= {0, 1}
    assert time.monotonic() - interrupted < 15
    assert run.metrics
