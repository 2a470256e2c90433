"""Sample files: columns, steps, resumes and the size limit."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from aligner.observability.sample_files import SampleFiles, read_samples, sample_steps
from aligner.paths import RunPaths

ROWS = [
    {
        "group": 0,
        "sample": 0,
        "branch": 0,
        "prompt": "2+2=",
        "response": "4.",
        "response_tokens": 2,
        "score": 1.0,
        "cut": False,
    },
    {
        "group": 0,
        "sample": 1,
        "branch": 0,
        "prompt": "2+2=",
        "response": "five",
        "response_tokens": 1,
        "score": None,
    },
]
ROWS[0]["score_parts"] = {"math": 0.75, "length": 0.25}


def columns(rows: list[dict]) -> dict[str, list]:
    """Return rows as columns; missing values are None."""
    return {
        name: [row.get(name) for row in rows]
        for name in {name: None for row in rows for name in row}
    }


TOKENS = {
    "token_id": np.array([4, 9, 7]),
    "text": np.array(["4", ".", "five"], dtype=object),
    "drawn": np.array([True, False, True]),
    "engine_logprob": np.array([-0.5, np.nan, -2.0], dtype=np.float32),
    "version": np.ma.MaskedArray([3, 0, 4], mask=[False, True, False]),
}


def files(run: Path, limit_mib: int = 1) -> SampleFiles:
    run.mkdir(exist_ok=True)
    return SampleFiles(RunPaths(run).sample_files, limit_mib)


def noise(count: int) -> dict[str, np.ndarray]:
    """Return values that do not compress."""
    return {"engine_logprob": np.random.default_rng(0).random(count, dtype=np.float32)}


def test_missing_sample_values_are_read_as_null(tmp_path: Path) -> None:
    writer = files(tmp_path)
    writer.write(12, columns(ROWS), TOKENS)
    assert sorted(file.name for file in (tmp_path / "samples").iterdir()) == [
        "step_000012.parquet",
        "tokens_000012.parquet",
    ]
    first, second = read_samples(tmp_path).to_pylist()
    assert (first["step"], first["score"], first["score_parts"]) == (
        12,
        1.0,
        [("math", 0.75), ("length", 0.25)],
    )
    assert (second["sample"], second["response"], second["score"], second["advantage"]) == (
        1,
        "five",
        None,
        None,
    )
    first, second = read_samples(tmp_path, tokens=True).to_pylist()
    assert (first["text"], first["drawn"], first["version"]) == (
        ["4", "."],
        [True, False],
        [3, None],
    )
    assert (first["engine_logprob"], second["engine_logprob"]) == ([-0.5, None], [-2.0])
    assert (second["step"], second["sample"], second["entropy"]) == (12, 1, None)


def test_read_samples_selects_steps_and_columns(tmp_path: Path) -> None:
    assert sample_steps(tmp_path) == [] and read_samples(tmp_path).num_rows == 0
    writer = files(tmp_path)
    for step in (10, 2, 3):
        writer.write(step, columns(ROWS), TOKENS)
    assert sample_steps(tmp_path) == [2, 3, 10]
    table = read_samples(tmp_path, steps=[10, 2, 7], columns=["response", "step"])
    assert table.to_pydict() == {"response": ["4.", "five"] * 2, "step": [2, 2, 10, 10]}
    with pytest.raises(KeyError, match="rewards"):
        read_samples(tmp_path, columns=["rewards"])


def test_step_is_replaced_and_resume_drops_later_steps(tmp_path: Path) -> None:
    writer = files(tmp_path)
    for step in (1, 2, 3):
        writer.write(step, columns(ROWS), TOKENS)
    (tmp_path / "samples" / "step_000004.parquet.tmp").write_bytes(b"PAR1")
    writer.truncate_after(2)
    assert (
        sorted(file.name[-14:] for file in (tmp_path / "samples").iterdir())
        == ["000001.parquet"] * 2 + ["000002.parquet"] * 2
    )
    writer.write(2, columns([{**ROWS[1], "response": "again"}]), {})
    assert read_samples(tmp_path, columns=["step", "response"]).to_pydict() == {
        "step": [1, 1, 2],
        "response": ["4.", "five", "again"],
    }


def test_size_limit_deletes_token_files_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    writer, row = files(tmp_path), {**ROWS[0], "response_tokens": 120_000, "prompt": "p"}
    for step in range(1, 6):  # 0.4 MiB each
        writer.write(step, columns([row]), noise(120_000))
    assert sample_steps(tmp_path) == [1, 2, 3, 4, 5]
    assert read_samples(tmp_path, tokens=True, columns=["step"])["step"].to_pylist() == [4, 5]
    letters = np.random.default_rng(0).integers(97, 123, (5, 500_000), dtype=np.uint8)
    for step, text in zip((6, 7, 8, 9, 10), letters, strict=True):
        writer.write(
            step, columns([{**row, "response": text.tobytes().decode(), "response_tokens": 0}]), {}
        )
    assert sample_steps(tmp_path)[-1] == 10 and sample_steps(tmp_path)[0] > 5
    assert sum(file.stat().st_size for file in (tmp_path / "samples").iterdir()) <= 2**20
    assert caplog.text.count("logging.samples_mib=1") == 1


def test_size_limit_includes_earlier_files(tmp_path: Path) -> None:
    row = {**ROWS[0], "response_tokens": 120_000}
    for step in range(1, 5):  # 0.4 MiB each
        files(tmp_path).write(step, columns([row]), noise(120_000))
    assert read_samples(tmp_path, tokens=True, columns=["step"])["step"].to_pylist() == [3, 4]
