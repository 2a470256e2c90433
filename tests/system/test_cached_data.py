"""Whole runs on cached tables of tokenized data: damage, and data at another path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.data.example_table import ROWS_FILE
from benchmarks.runs import Launch, checkpoint_differences, repeatable, run_to_end

pytestmark = pytest.mark.slow

SETTINGS = (
    *("algorithm=sft", "data.max_prompt_tokens=6", "data.max_response_tokens=4"),
    *("data.batch_size=16", "run.steps=6", "checkpoint.every=2", "logging.tensorboard=false"),
)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALIGNER_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "data" / "sums.jsonl"
    file.parent.mkdir()
    sums = ((left, right) for left in range(30) for right in range(30))
    file.write_text(
        "".join(
            json.dumps({"prompt": f"{left}+{right}=", "response": str(left + right)}) + "\n"
            for left, right in sums
        )
    )
    return file


@pytest.mark.promise("damaged-data-are-never-trained-on")
def test_damaged_table_ends_the_run_and_the_next_start_builds_it_again(tmp_path, data):
    expected = run_to_end(tmp_path / "expected", f"data.path={data}", *SETTINGS)
    (rows,) = (tmp_path / "cache" / "data").glob(f"*/{ROWS_FILE}")
    content = bytearray(rows.read_bytes())
    for position in range(2000, len(content) - 4000, 4000):  # in every batch of rows
        content[position] ^= 1
    rows.write_bytes(content)

    with Launch(tmp_path / "run", f"data.path={data}", *SETTINGS) as launch:
        damaged = launch.finish(120)
    assert damaged.code == 1 and f"{rows}: rows " in damaged.error
    assert "do not match their checksum" in damaged.error and damaged.metrics == []

    repaired = run_to_end(tmp_path / "run", f"data.path={data}", *SETTINGS, "run.resume=auto")
    assert checkpoint_differences(expected.paths, repaired.paths, 6) == []


@pytest.mark.promise("tokenized-data-are-reused")
def test_run_resumes_exactly_after_its_data_moved(tmp_path, data):
    expected = run_to_end(tmp_path / "expected", f"data.path={data}", *SETTINGS)
    stopped = tmp_path / "stopped"
    run_to_end(stopped, f"data.path={data}", *SETTINGS, "run.stop_after=4")

    moved = tmp_path / "moved" / data.name
    moved.parent.mkdir()
    data.rename(moved)
    resumed = run_to_end(
        stopped,
        f"data.path={moved}",
        *SETTINGS,
        "run.resume=auto",
        "run.changes=[data.path,run.stop_after]",
    )
    assert checkpoint_differences(expected.paths, resumed.paths, 6) == []
    assert repeatable(resumed.metrics) == repeatable(expected.metrics)
