"""Test of a complete offline run, which has one trainer rank, no engine and no servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.data.export import export, find_source
from aligner.data.model_directory import check_model_directory
from benchmarks.runs import run_to_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_sft_run_learns_and_is_converted(tmp_path: Path) -> None:
    data = tmp_path / "sums.jsonl"
    sums = [(left, right) for left in range(8) for right in range(8)]
    data.write_text(
        "".join(
            json.dumps({"prompt": f"{left}+{right}=", "response": str(left + right)}) + "\n"
            for left, right in sums
        )
    )
    finished = run_to_end(
        tmp_path / "run",
        *(
            "algorithm=sft",
            f"data.path={data}",
            "data.max_prompt_tokens=4",
            "data.max_response_tokens=3",
        ),
        *("data.batch_size=16", "data.held_out=8", "evaluation.every=5", "run.steps=20"),
        *("actor.optimizer.learning_rate=3e-3", "logging.tensorboard=false"),
    )
    metrics = finished.metrics
    assert [step["step"] for step in metrics] == list(range(1, 21))
    assert metrics[-1]["sft/loss"] < 0.7 * metrics[0]["sft/loss"]
    assert metrics[-1]["eval/loss"] < 0.7 * metrics[0]["sft/loss"]
    assert {path.name for path in (finished.paths.root / "logs").iterdir()} == {
        "prepare-0.log",
        "trainer-0.log",
    }
    log = (finished.paths.root / "logs" / "trainer-0.log").read_text()
    assert (
        "sft: 56 rows, 8 held out; 16 rows per step, 3.5 steps per epoch; run.steps=20 is 5.71"
        " epochs" in log
    )

    assert export(find_source(finished.paths.root), tmp_path / "model") == []
    check_model_directory(tmp_path / "model")
