"""Tests of the output of real launches: modes, terminals, pipes, colors and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from aligner.errors import RESUMABLE
from aligner.observability.metrics import read_metrics
from aligner.paths import RunPaths, find_complete_steps
from benchmarks.runs import python_path
from tests.pseudo_terminal import Terminal, find_long_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LAUNCH = ("launch", "experiment=tiny_ppo", "logging.tensorboard=false", "logging.samples_every=1")
SHORT = (*LAUNCH, "run.steps=2")
EVENTS = {"launch", "note", "step", "samples", "error", "end"}


def aligner(
    directory: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": python_path(), "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-m", "aligner", *arguments],
        cwd=directory,
        env=variables | (environment or {}),
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_json_prints_one_object_per_event(tmp_path: Path) -> None:
    done = aligner(tmp_path, *SHORT, "run.dir=run", "--json")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    names = [event["event"] for event in events]
    assert names[0] == "launch" and names[-1] == "end" and set(names) <= EVENTS
    assert events[0]["directory"] == str(tmp_path / "run")
    assert events[-1] == {"event": "end", "exit_code": 0, "error": None}
    steps = [event for event in events if event["event"] == "step"]
    assert [event["metrics"] for event in steps] == read_metrics(tmp_path / "run/metrics.jsonl")
    assert [(event["step"], event["steps"]) for event in steps] == [(1, 2), (2, 2)]
    samples = next(event for event in events if event["event"] == "samples")
    assert samples["step"] == 1 and {"prompt", "response", "reward"} <= samples["samples"][0].keys()
    assert "next steps:" in done.stderr


def test_json_reports_the_error_of_a_failed_launch(tmp_path: Path) -> None:
    done = aligner(tmp_path, *SHORT, "run.dir=run", "reward.function=no_such", "--json")
    end = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, end["event"], end["exit_code"]) == (2, "end", 2)
    assert "no_such" in end["error"] and "no_such" in done.stderr


def test_quiet_prints_only_the_result(tmp_path: Path) -> None:
    done = aligner(tmp_path, *SHORT, "run.dir=run", "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Summary of 2 steps") and "next steps:" in done.stdout
    assert done.stderr == ""


def test_verbose_adds_phases_and_log_lines(tmp_path: Path) -> None:
    done = aligner(tmp_path, *SHORT, "run.dir=run", "--verbose")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("  phases: generate ")]) == 2
    assert [line for line in lines if line.startswith("trainer-0: ")]
    assert [line for line in lines if line.startswith("reward-0: ")]


def test_output_modes_cannot_be_combined(tmp_path: Path) -> None:
    done = aligner(tmp_path, *SHORT, "--quiet", "--json")
    assert done.returncode == 2 and "--quiet and --json: cannot be combined" in done.stderr


def test_forced_colors_reach_pipes_without_a_progress_bar(tmp_path: Path) -> None:
    colored = aligner(
        tmp_path, *SHORT, "run.dir=run", environment={"FORCE_COLOR": "1", "TERM": "xterm"}
    )
    assert "\x1b[" in colored.stdout and "\x1b[2K" not in colored.stdout
    plain = aligner(tmp_path, "report", "missing", environment={"NO_COLOR": "1"})
    assert "\x1b" not in plain.stdout + plain.stderr


def test_dumb_terminal_shows_lines_without_escape_codes(tmp_path: Path) -> None:
    with Terminal(tmp_path, *SHORT, "run.dir=run", environment={"TERM": "dumb"}) as terminal:
        assert terminal.wait() == 0, terminal.lines
        assert "\x1b" not in terminal.raw_output
        assert [line for line in terminal.lines if line.startswith("step 2/2  reward ")]


def test_commands_fit_in_60_columns(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    sampling = ("run", "--prompts", "prompts.jsonl", "--max-new-tokens", "8")
    commands = [
        ("validate", *SHORT[1:]),
        (*SHORT, "run.dir=run"),
        ("status", "run"),
        ("plan", "run"),
        ("generate", *sampling, "--output", "samples.jsonl"),
        ("evaluate", *sampling, "--function", "digit_fraction"),
        ("report", "run"),
        ("convert", "run", "model"),
        ("cache",),
        ("new", "mine"),
        ("validate", "model.path=model", "data.path=missing.jsonl", "reward.function=gsm8k"),
    ]
    for number, command in enumerate(commands):
        with Terminal(tmp_path, *command) as terminal:
            code = terminal.wait()
            assert code == (2 if number == len(commands) - 1 else 0), terminal.lines
            assert find_long_lines(terminal.lines) == [], command
            assert "…" not in "".join(line for line in terminal.lines if "│" in line), command


def test_first_ctrl_c_finishes_the_step_and_saves(tmp_path: Path) -> None:
    with Terminal(tmp_path, *LAUNCH, "run.steps=5000", "run.dir=run") as terminal:
        terminal.read_until("step 1/5000  reward")
        terminal.press_ctrl_c()
        assert terminal.wait() == RESUMABLE, terminal.lines
    text = " ".join(line.strip() for line in terminal.lines)
    notice = re.search(r"finishing step (\d+), then saving a checkpoint", text)
    assert notice is not None and "Ctrl-C again" in text, text
    paths = RunPaths(tmp_path / "run")
    last_step = int(read_metrics(paths.metrics)[-1]["step"])
    assert last_step in find_complete_steps(paths.checkpoints)
    assert last_step >= int(notice[1])
    assert [line for line in terminal.lines if line.startswith("  aligner launch experiment=")]


def test_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    # The first step takes long, so that the second Ctrl-C interrupts it.
    long_step = ("rollout.prompts_per_step=4096", "run.steps=3", "run.dir=run")
    with Terminal(tmp_path, *LAUNCH, *long_step) as terminal:
        terminal.read_until("all servers are healthy")
        terminal.press_ctrl_c()
        terminal.read_until("Ctrl-C again")
        terminal.press_ctrl_c()
        assert terminal.wait() == 130, terminal.lines
    assert "stopped by SIGINT" in " ".join(terminal.lines)
