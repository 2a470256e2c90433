"""Tests of `aligner launch --multirun` with real launches of tiny runs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TINY = [
    "experiment=tiny_ppo",
    "run.steps=2",
    "rollout.prompts_per_step=4",
    "logging.tensorboard=false",
]
SCORER = """\
def score(requests):
    return [0.5 for _ in requests]


def fail(requests):
    raise ValueError("no score")
"""


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "COLUMNS": "60"}
    command = [sys.executable, "-m", "aligner", "launch", *arguments]
    return subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def launch(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = start(directory, *arguments)
    output, errors = process.communicate(timeout=400)
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def read_rows(output: str) -> list[list[str]]:
    """Return the cells of the rows of the final table."""
    lines = output.rpartition(" overrides ")[2].partition("run directories: ")[0].splitlines()
    return [line.split() for line in lines if "=" in line]


@pytest.mark.slow
def test_failed_run_does_not_end_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCORER)
    sweep = ["-m", *TINY, "reward.function=mine:fail,mine:score", "run.name=both"]
    done = launch(tmp_path, *sweep)
    assert done.returncode == 1, done.stderr
    assert "aligner: error: sweep: 1 of 2 runs failed: 1" in done.stderr
    assert "ValueError: no score" in done.stdout + done.stderr

    root = tmp_path / "runs" / "both"
    entries = json.loads((root / "sweep.json").read_text())["runs"]
    assert [entry["directory"] for entry in entries] == ["1", "2"]
    _, _, table = done.stdout.rpartition(" overrides ")
    assert all(len(line) <= 60 for line in table.partition("run directories")[0].splitlines())
    failed, finished = read_rows(done.stdout)
    assert failed[2] == "failed" and finished[2:] == ["finished", "2/2", "reward", "0.500"]
    metrics = (root / "2" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == 2

    # The printed command repeats only the failed run.
    (tmp_path / "mine.py").write_text(
        SCORER.replace('raise ValueError("no score")', "return [1.0]")
    )
    command = done.stdout.rpartition("resume the sweep with: ")[2].splitlines()[0]
    again = launch(tmp_path, *shlex.split(command)[2:])
    assert "run 2/2: reward.function=mine:score: finished already" in again.stdout
    assert (root / "2" / "metrics.jsonl").read_text().splitlines() == metrics


@pytest.mark.slow
def test_interrupted_sweep_is_resumed(tmp_path: Path) -> None:
    many_steps = [text.replace("steps=2", "steps=6") for text in TINY]
    process = start(tmp_path, "-m", *many_steps, "seed=1,2", "run.dir=sweep")
    metrics = tmp_path / "sweep" / "1" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not metrics.is_file() or not metrics.read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 75, output + errors
    assert [row[2] for row in read_rows(output)] == ["stopped", "not"]
    assert not (tmp_path / "sweep" / "2").exists()
    completed = len(metrics.read_text().splitlines())
    assert completed < 6

    command = output.rpartition("resume the sweep with: ")[2].splitlines()[0]
    done = launch(tmp_path, *shlex.split(command)[2:])
    assert done.returncode == 0, done.stderr
    assert [row[2:4] for row in read_rows(done.stdout)] == [["finished", "6/6"]] * 2
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_sweep_prints_json_events(tmp_path: Path) -> None:
    done = launch(tmp_path, "--json", "--multirun", *TINY, "seed=1,2", "run.dir=sweep")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events if event["event"].startswith("sweep")] == [
        "sweep_start",
        "sweep_run",
        "sweep_run",
        "sweep",
    ]
    (sweep,) = (event for event in events if event["event"] == "sweep")
    assert [(run["overrides"], run["state"], run["step"]) for run in sweep["runs"]] == [
        (["seed=1"], "finished", 2),
        (["seed=2"], "finished", 2),
    ]
    assert all("reward/mean" in run["metrics"] for run in sweep["runs"])


def test_invalid_run_prevents_the_sweep(tmp_path: Path) -> None:
    done = launch(tmp_path, "-m", *TINY, "algorithm=ppo,grppo")
    assert done.returncode == 2 and "did you mean algorithm=grpo?" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--dry-run", "--show-config"])
def test_options_for_a_single_run_are_refused(tmp_path: Path, option: str) -> None:
    done = launch(tmp_path, "-m", *TINY, "seed=1,2", option)
    assert done.returncode == 2
    assert f"{option}: cannot be combined with --multirun" in done.stderr


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ({"config.yaml": "seed: 1\n"}, [], "contains a run; with --multirun, run.dir is"),
        ({"sweep.json": '{"runs": []}'}, [], "contains a sweep already; resume the sweep with"),
        (
            {"sweep.json": '{"runs": []}'},
            ["run.resume=auto"],
            "contains a sweep with other overrides",
        ),
    ],
)
def test_directory_of_another_launch_is_refused(
    tmp_path: Path, content: dict[str, str], arguments: list[str], message: str
) -> None:
    (tmp_path / "sweep").mkdir()
    for name, text in content.items():
        (tmp_path / "sweep" / name).write_text(text)
    done = launch(tmp_path, "-m", *TINY, "seed=1,2", "run.dir=sweep", *arguments)
    assert done.returncode == 2 and message in done.stderr
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == sorted(content)
