"""Tests of Inspect tasks, as an evaluation of a served model and as an agent in training.

Inspect runs in its own virtual environment.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.peer_environment import installed_python
from benchmarks.runs import REPOSITORY, run_to_end
from tests.agents.calling_model import saved
from tests.agents.serving_model import served

PYTHON, EXAMPLES = installed_python("inspect"), REPOSITORY / "docs" / "examples"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        PYTHON is None, reason="not installed: python -m benchmarks.peer_environment inspect"
    ),
]
LEARNED = [(2, 3), (7, 8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned the answers to two of the questions."""
    conversations = [
        [
            {"role": "user", "content": f"{a}*{b}?"},
            {"role": "assistant", "content": str(a * b)},
        ]
        for a, b in LEARNED
    ]
    return saved(tmp_path_factory.mktemp("model"), "qwen", conversations, ())


def test_inspect_evaluates_a_served_model(model: Path, tmp_path: Path) -> None:
    command = [
        *(str(PYTHON), "-m", "inspect_ai", "eval", "inspect_products.py"),
        *("--model", "openai-api/aligner/policy", "--temperature", "0"),
        *("--sample-id", ",".join(f"{a}*{b}" for a, b in [*LEARNED, (9, 9)])),
        *("--max-tokens", "8", "--display", "none"),
        *("--log-dir", str(tmp_path), "--log-format", "json"),
    ]
    with served(model) as url:
        variables = {"ALIGNER_BASE_URL": url, "ALIGNER_API_KEY": "none"}
        subprocess.run(command, cwd=EXAMPLES, check=True, env=os.environ | variables)
    (log_file,) = tmp_path.glob("*.json")
    log = json.loads(log_file.read_text())
    assert log["status"] == "success"
    scores = {sample["id"]: sample["scores"]["exact"]["value"] for sample in log["samples"]}
    assert scores == {"2*3": "C", "7*8": "C", "9*9": "I"}


def test_inspect_task_is_an_agent_in_training(model: Path, tmp_path: Path) -> None:
    lines = subprocess.run(
        [str(PYTHON), "inspect_agent.py", "tasks", "inspect_products:products"],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert len(lines) == 64
    known = {f"{a}*{b}?" for a, b in LEARNED}
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["prompt"] in known))
    run = run_to_end(
        tmp_path / "run",
        "algorithm=grpo",
        "model.source=directory",
        f"model.path={model}",
        f"data.path={tasks}",
        "data.max_prompt_tokens=60",
        f"environment.agent_command=[{PYTHON},{EXAMPLES / 'inspect_agent.py'}]",
        "environment.max_turn_tokens=8",
        "environment.deadline_s=200",
        "reward=environment",
        "rollout.max_response_tokens=100",
        "rollout.stop_at_eos=true",
        "rollout.prompts_per_step=1",
        "rollout.samples_per_prompt=2",
        "rollout.micro_batches=1",
        "algorithm.minibatches=1",
        "engine.exact=true",
        "evaluation.every=0",
        "logging.samples_every=1",
        "logging.tensorboard=false",
        "run.steps=2",
    )
    assert run.code == 0, run.report()
    assert all(
        step["mismatch/logprob_abs"] == 0 and step["rollout/skipped"] == 0 for step in run.metrics
    )
    assert max(step["reward/mean"] for step in run.metrics) > 0
