"""Test of a complete run with trackers, JSON logs and `aligner status`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.launcher.status import read_status
from benchmarks.runs import Launch, run_to_end
from tests.observability.tracker_readers import mlflow_steps, wandb_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WATCHED = (
    "logging.wandb.enabled=true",
    "logging.mlflow.enabled=true",
    "logging.format=json",
    "run.steps=16",
)


def test_resumed_run_is_tracked_as_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The reader in this test needs the variable; the run sets it itself.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    directory = tmp_path / "run"
    # The end of the block kills the run with all its processes.
    with Launch(directory, *WATCHED, "checkpoint.every=2") as launch:
        launch.wait_for_step(3)
        launch.wait_for_checkpoint(2)
        assert read_status(directory).state == "running"
    status = read_status(directory)
    assert (status.state, status.resumable) == ("stopped", True)
    finished = run_to_end(directory, "run.resume=true", *WATCHED)
    assert [step["step"] for step in finished.metrics] == list(range(1, 17))
    assert wandb_steps(finished.paths) == finished.metrics
    assert mlflow_steps(finished.paths) == finished.metrics
    assert read_status(directory).state == "finished"
    # The logs of servers may contain lines without JSON, from helpers such as Python's resource
    # tracker.
    for role in ("prepare", "trainer"):
        records = [
            json.loads(line)
            for line in (directory / "logs" / f"{role}-0.log").read_text().splitlines()
        ]
        assert all((record["role"], record["rank"]) == (role, 0) for record in records)
    lines = (directory / "logs" / "critic-0.log").read_text().splitlines()
    records_of_critic = [json.loads(line) for line in lines if line.startswith("{")]
    assert [
        record["level"] for record in records_of_critic if "critic: ready at" in record["message"]
    ] == [
        "info",
        "info",
    ]
