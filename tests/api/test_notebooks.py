"""Tests that execute the notebooks like Jupyter."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def execute_notebook(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Execute a notebook and return the text output of each code cell, by the cell's code."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(NOTEBOOKS.parent), os.environ.get("PYTHONPATH", "")])
    )
    book = nbformat.read(NOTEBOOKS / name, as_version=4)
    client = NotebookClient(
        book, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(directory)}}
    )
    client.execute()
    assert "\\u001b" not in nbformat.writes(book), "a cell shows escape codes"
    shown = {}
    for cell in book.cells:
        if cell.cell_type != "code":
            continue
        outputs = [
            output.get("text") or output.get("data", {}).get("text/plain", "")
            for output in cell.get("outputs", ())
        ]
        shown[cell.source] = "\n".join(outputs)
    return shown


def output_of_cell(shown: dict[str, str], text: str) -> str:
    """Return the output of the first cell whose code contains this text."""
    return next(output for code, output in shown.items() if text in code)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_first_run_notebook_increases_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = execute_notebook("first_run.ipynb", tmp_path, monkeypatch)
    progress = output_of_cell(shown, 'reward="gsm8k"')
    assert "step 30/30  reward" in progress and "aligner: chosen" not in progress[-2000:]
    change = next(line for line in progress.splitlines() if line.startswith("│ reward "))
    assert float(change.split("│")[4]) > 0.05, change
    assert "Figure" in output_of_cell(shown, "plot") and "9+9=" in output_of_cell(
        shown, "aligner.generate"
    )
    assert "answer" in output_of_cell(shown, "run.samples()") or "response" in output_of_cell(
        shown, "run.samples()"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_custom_reward_notebook_increases_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = execute_notebook("own_reward_and_agent.ipynb", tmp_path, monkeypatch)
    for code in ("reward=vowels", 'reward="environment"'):
        change = next(
            line
            for line in output_of_cell(shown, code).splitlines()
            if line.startswith("│ reward ")
        )
        assert float(change.split("│")[4]) > 0, change
    assert "%%writefile my_reward.py" in output_of_cell(shown, "reward=lambda")


@pytest.mark.parametrize("name", [path.name for path in NOTEBOOKS.glob("*.ipynb")])
def test_notebooks_are_stored_without_outputs(name: str) -> None:
    book = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(book)
    assert not [cell for cell in book.cells if cell.get("outputs") or cell.get("execution_count")]
