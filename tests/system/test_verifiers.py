"""Test of a complete run with an unmodified environment of `verifiers`.

The environment runs in its own virtual environment.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aligner.data.tool_calls import ToolCall
from benchmarks.peer_environment import installed_python
from benchmarks.runs import REPOSITORY, run_to_end
from tests.agents.calling_model import called, saved

PYTHON, EXAMPLES = installed_python("verifiers"), REPOSITORY / "docs" / "examples"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        PYTHON is None, reason="not installed: python -m benchmarks.peer_environment verifiers"
    ),
]
NUMBERS: dict[str, Any] = {name: {"title": name.upper(), "type": "integer"} for name in "ab"}
# The tool's schema in the form that verifiers sends.
MULTIPLY: dict[str, Any] = {
    "name": "multiply",
    "description": "Multiply two numbers.",
    "parameters": {
        "type": "object",
        "properties": NUMBERS,
        "required": ["a", "b"],
        "title": "multiplyArguments",
    },
}
LEARNED = [(2, 3), (7, 8)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that was trained for a few steps to call the calculator."""
    conversations = [
        called(
            f"{a}*{b}?", ToolCall("000010000", "multiply", {"a": a, "b": b}), str(a * b), str(a * b)
        )
        for a, b in LEARNED
    ]
    directory = tmp_path / "model"
    directory.mkdir()
    return saved(directory, "qwen", conversations, [{"type": "function", "function": MULTIPLY}])


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """The tasks of the environment that the model was trained on."""
    command = [str(PYTHON), "verifiers_agent.py", "tasks", "verifiers_products"]
    lines = subprocess.run(
        command, cwd=EXAMPLES, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(lines) == 64
    known = {f"{a}*{b}?" for a, b in LEARNED}
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["prompt"] in known))
    return file


def test_verifiers_run_trains_on_generated_tokens(
    model: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFIERS_PYTHON", str(PYTHON))
    monkeypatch.setenv("VERIFIERS_TASKSET", "verifiers_products")
    run = run_to_end(
        tmp_path / "run",
        "algorithm=grpo",
        "model.source=directory",
        f"model.path={model}",
        f"data.path={tasks}",
        "data.max_prompt_tokens=400",
        "environment.agent=docs.examples.verifiers_agent:run",
        "environment.max_turn_tokens=80",
        "environment.deadline_s=100",
        "reward=environment",
        "rollout.max_response_tokens=600",
        "rollout.stop_at_eos=true",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=4",
        "rollout.micro_batches=1",
        "algorithm.minibatches=1",
        "engine.exact=true",
        "evaluation.every=0",
        "logging.samples_every=1",
        "logging.tensorboard=false",
        "actor.optimizer.learning_rate=1e-4",
        "run.steps=3",
    )
    assert run.code == 0, run.report()
    assert all(
        step["mismatch/logprob_abs"] == 0 and step["rollout/skipped"] == 0 for step in run.metrics
    )
    assert max(step["reward/mean"] for step in run.metrics) > 0 and len(run.metrics) == 3
    turns = [
        turn
        for line in run.paths.samples.read_text().splitlines()
        for turn in json.loads(line).get("turns", [])
    ]
    assert any("<tool_call>" in turn.get("policy", "") for turn in turns)
    assert any("<tool_response>\n56\n" in turn.get("environment", "") for turn in turns)
