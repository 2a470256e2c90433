"""Output of the command `aligner plan`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aligner.cli import main
from tests.planner.recorded_runs import (
    ASYNCHRONOUS,
    GENERATION_BOUND,
    SYNCHRONOUS,
    write_colocated_run,
    write_server_engine_run,
)


def plan_output(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> str:
    with pytest.raises(SystemExit) as exited:
        main(["plan", str(run), *options])
    assert exited.value.code == 0
    return capsys.readouterr().out


def json_plan(capsys: pytest.CaptureFixture[str], run: Path) -> dict[str, Any]:
    return dict(json.loads(plan_output(capsys, run, "--json")))


def test_tables_show_usage_limit_and_predictions(tmp_path: Path) -> None:
    """Run the command in a process of its own, which must not import torch."""
    command = (
        "import sys; from aligner.cli import main\ntry: main()\nfinally: assert 'torch' not in"
        " sys.modules"
    )
    run = write_server_engine_run(tmp_path, SYNCHRONOUS)
    done = subprocess.run(
        [sys.executable, "-c", command, "plan", str(run)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stderr
    assert f"measured over 6 steps of {run} (rollout.max_staleness=0): 3.47 s per" in done.stdout
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in done.stdout.splitlines()
        if line.startswith("│")
    ]
    assert ["trainer", "1", "78%", "22%", "generator"] in rows
    assert ["generator", "1", "22%", "78%", "trainer requests"] in rows
    assert "limiting role: trainer (its phases take 77% of a step)" in done.stdout
    assert ["trainer 2, generator 1", "3", "2.13 s", "-38%"] in rows
    assert (
        "predicted step time for rollout.max_staleness=1 with the same devices: 2.67 s (-23%)"
        in done.stdout
    )
    note = done.stdout.splitlines()[-1]
    assert note.startswith("assumption: a phase's time is inversely proportional to its role's")
    assert "at most 10% if every role has its own core" in note
    assert note.endswith("for other splits, not measured")


def test_json_has_shares_that_add_up_to_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = json_plan(capsys, write_server_engine_run(tmp_path, SYNCHRONOUS))
    assert plan["measured_steps"] == 6
    assert plan["limiting_role"] == "trainer"
    assert plan["model_error"] == pytest.approx(0, abs=1e-6)
    assert plan["max_staleness_1"]["predicted_step_s"] < plan["step_s"]
    for usage in plan["roles"].values():
        assert usage["busy"] + usage["waited"] == pytest.approx(1)
        assert sum(usage["waited_for"].values()) == pytest.approx(usage["waited"])


def test_split_gives_devices_to_the_limiting_role(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_server_engine_run(
        tmp_path,
        GENERATION_BOUND,
        "rollout.max_staleness=1",
        "actor.parallel.data=4",
        "engine.parallel.data=4",
    )
    plan = json_plan(capsys, run)
    assert plan["limiting_role"] == "generator"
    assert 1 <= len(plan["splits"]) <= 5
    assert plan["splits"][0]["devices"]["generator"] > 4
    changes = [split["change"] for split in plan["splits"]]
    assert changes == sorted(changes)
    assert all(change < 0 for change in changes)


def test_asynchronous_run_predicts_no_synchronous_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From an asynchronous run such predictions were wrong by up to 29%."""
    run = write_server_engine_run(tmp_path, ASYNCHRONOUS, "rollout.max_staleness=1")
    assert "max_staleness_1" not in json_plan(capsys, run)
    text = plan_output(capsys, run)
    assert "predicted step time for rollout.max_staleness" not in text
    assert "at most 10%" not in text


def test_colocated_run_reports_how_to_get_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_colocated_run(tmp_path)
    plan = json_plan(capsys, run)
    assert plan["is_colocated"] and "max_staleness_1" not in plan
    assert all(set(split["devices"]) == {"trainer", "critic"} for split in plan["splits"])
    text = plan_output(capsys, run)
    assert "To get predictions for engine.placement=server and rollout.max_staleness=1" in text


def test_missing_run_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["plan", "nowhere"])
    assert exited.value.code == 2
    assert "nowhere/config.yaml: no such configuration file" in capsys.readouterr().err
