"""Tests of prerequisite experiments, which one launcher runs once, with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.launcher.test_launch import HEALTHY, LAUNCHER, finish, processes_of, wait_for

PAIRS = """# @package _global_
defaults:
  - override /algorithm: preferences
run: {steps: 7}
rollout: {max_response_tokens: 16}
cluster: {stop_timeout_s: 2}
"""
JUDGE = """# @package _global_
defaults:
  - override /algorithm: reward_model
data: {path: "experiment:pairs", normalization: "experiment:pairs/responses.jsonl"}
run: {steps: 7}
cluster: {stop_timeout_s: 2}
"""
POLICY = """# @package _global_
defaults: [tiny_ppo]
reward: {kind: model, path: "experiment:judge"}
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory with custom experiments; processes that were started there are killed."""
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    for name, content in {"pairs": PAIRS, "judge": JUDGE, "policy": POLICY}.items():
        (tmp_path / "conf" / "experiment" / f"{name}.yaml").write_text(content)
    yield tmp_path
    for process in processes_of(tmp_path):
        process.kill()


def start(
    place: Path, name: str = "run", experiment: str = "judge", **behaviors: str
) -> subprocess.Popen[str]:
    given = [f"experiment={experiment}", f"run.dir={place / name}"]
    command = [
        sys.executable,
        str(LAUNCHER),
        json.dumps(given),
        json.dumps({**HEALTHY, **behaviors}),
        str(place / "conf"),
    ]
    environment = {**os.environ, "COLUMNS": "120", "ALIGNER_CACHE": str(place / "cache")}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def entry(place: Path) -> Path:
    """Return the cache directory of the experiment `pairs`."""
    (found,) = (place / "cache" / "experiments").glob("pairs-*")
    return found


def recorded_runs(place: Path) -> set[str]:
    """Return the directories of the runs that are recorded as users of the experiment `pairs`."""
    records = place / "cache" / "uses" / "experiments" / entry(place).name
    return {record.read_text() for record in records.iterdir()}


def trainer_starts(place: Path) -> int:
    return (
        (entry(place) / "run" / "logs" / "trainer-0.log").read_text().count("trainer rank 0 of 1")
    )


@pytest.mark.slow
def test_prerequisite_runs_first_and_only_once(place: Path) -> None:
    code, out, error = finish(start(place), place)
    assert code == 0, error
    lines = out.splitlines()
    assert lines[0] == f"run directory: {place / 'run'}", "the launch's own comes first"
    first = lines.index(
        "running prerequisite experiment pairs (preferences) first; run directory:"
        f" {entry(place) / 'run'}"
    )
    result = f"prerequisite experiment pairs: result in {entry(place) / 'result'}"
    done = lines.index(result)
    assert first < lines.index("step 7/7  reward 0.700  KL 0.0100  0.50 s/step  ETA 0:00:00") < done
    assert sum(line.startswith("step 7/7") for line in lines[done:]) == 1
    config = yaml.safe_load((place / "run" / "config.yaml").read_text())
    assert config["data"]["path"] == str(entry(place) / "result" / "preferences.jsonl")
    assert config["run"]["inputs"]["data.normalization"] == "experiment:pairs/responses.jsonl"

    code, out, error = finish(start(place, "again"), place)
    assert code == 0, error
    assert "running prerequisite" not in out
    assert result in out.splitlines()
    assert trainer_starts(place) == 1
    assert recorded_runs(place) == {str(place / "run"), str(place / "again")}


@pytest.mark.slow
def test_launches_wait_for_a_shared_prerequisite(place: Path) -> None:
    one = start(place, "one", trainer="train_slowly")
    wait_for(lambda: list(place.glob("cache/experiments/pairs-*/run/metrics.jsonl")), "first step")
    assert recorded_runs(place) == {str(place / "one")}, "recorded before the run itself starts"
    two, three, four = (start(place, name) for name in ("two", "three", "four"))
    for waiting in (two, three, four):
        assert waiting.stdout is not None
        shown = ""
        while not shown.startswith("waiting for"):
            shown = waiting.stdout.readline()
            assert shown, finish(waiting, place)
        message = (
            rf"waiting for prerequisite experiment pairs in {entry(place)}, which process {one.pid}"
            r" on \S+ since .+ is running\n"
        )
        assert re.fullmatch(message, shown), shown
    three.send_signal(signal.SIGINT)
    three.communicate(timeout=30)
    assert three.returncode == 130, "one that waits ends when it is told to"
    four.send_signal(signal.SIGUSR1)
    out, _ = four.communicate(timeout=30)
    assert (four.returncode, "stopped on request before training started" in out) == (75, True)
    one.send_signal(signal.SIGTERM)
    one.communicate(timeout=30)
    assert one.returncode == 143
    code, out, error = finish(two, place)
    assert code == 0, error
    assert "running prerequisite experiment pairs" in out
    resume = yaml.safe_load((entry(place) / "run" / "config.yaml").read_text())["run"]["resume"]
    assert resume == "true", "it went on where the other was"
    assert trainer_starts(place) == 2


def test_stop_request_during_conversion_exits_75(place: Path) -> None:
    launch = start(place, experiment="policy")
    wait_for(
        lambda: list(place.glob("cache/experiments/judge-*/run/logs/convert-0.log")), "conversion"
    )
    launch.send_signal(signal.SIGUSR1)
    code, out, error = finish(launch, place)
    assert (code, error) == (75, "")
    assert (
        "stopped on request before training started\nstopped; resume the run with: aligner launch "
        in out
    )


def test_failed_prerequisite_fails_the_launch(place: Path) -> None:
    code, _, error = finish(start(place, trainer="raise"), place)
    assert code == 1
    message = (
        "prerequisite experiment pairs: trainer rank 0 exited with code 1; last lines of its log:"
    )
    assert error.startswith(f"{message}\n")
    assert error.rstrip().endswith(f"log: {entry(place) / 'run' / 'logs' / 'trainer-0.log'}")
    assert not (place / "run").exists()
    assert not (entry(place) / "result").exists()
