"""Tests of failed and interrupted runs, which leave an error message but no processes."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aligner.errors import RESUMABLE
from aligner.observability.metrics import read_metrics
from aligner.paths import find_complete_steps
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
    complaint = "the scorer function raised LookupError in scorers.py:\\d+: no rule for this prompt"
    pattern = (
        rf"(?s)aligner: error: LookupError in scorers.py:.*reward server .*{complaint} for prompt '{BAD_PROMPT}' and response"
        r" ['\"].+"
    )
    assert re.search(pattern, run.error), run.error
    assert run.metrics == []
    assert [event["name"] for event in checked_trace(run.paths.trace)["reward"]][-1] == "score"


def test_ctrl_c_saves_a_checkpoint_and_prints_the_resume_command(tmp_path: Path) -> None:
    with Launch(tmp_path / "run", *LONG) as launch:
        launch.wait_for_step(1)
        launch.interrupt(signal.SIGINT)
        run = launch.finish(60)
    assert run.code == RESUMABLE, run.report()
    assert re.search(
        r"^Ctrl-C: finishing step \d+, then saving a checkpoint", run.out, re.MULTILINE
    )
    match = re.search(r"^stopped; resume the run with: aligner (launch .+)$", run.out, re.MULTILINE)
    assert match is not None, run.out
    steps = int(run.metrics[-1]["step"])
    assert steps in find_complete_steps(run.paths.checkpoints)

    command = [sys.executable, "-m", "aligner", *shlex.split(match[1])]
    subprocess.run([*command, f"run.stop_after={steps + 1}"], check=True, timeout=120)
    assert [record["step"] for record in read_metrics(run.paths.metrics)][-1] == steps + 1


def test_second_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    with Launch(tmp_path / "run", *LONG) as launch:
        launch.wait_for_step(1)
        assert sum(process.name() == "tritonserver" for process in launch.processes()) == 2
        interrupted = time.monotonic()
        launch.rank("trainer", 0).suspend()  # it cannot finish its step
        launch.interrupt(signal.SIGINT)
        time.sleep(0.5)
        launch.rank("trainer", 0).resume()
        launch.interrupt(signal.SIGINT)
        run = launch.finish(15)
    assert run.code == 130, run.report()
    assert {event["args"]["step"] for event in checked_trace(run.paths.trace)["trainer"]} >= {0, 1}
    assert time.monotonic() - interrupted < 15
    assert run.metrics
