"""Test of a complete run in which the policy learns not to make its agent fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.data.tool_calls import ToolCall
from benchmarks.runs import run_to_end
from tests.agents.calling_model import called, saved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 10
EPISODES = 32
"""Number of episodes of a step."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that calls the tool `look` or the unknown tool `seek`, half of the time each."""
    conversations = [
        called("why?", ToolCall("000010000", name, {"at": "here"}), "saw", "yes.")
        for name in ("look", "seek")
    ]
    directory = tmp_path / "model"
    directory.mkdir()
    return saved(directory, "qwen", conversations, steps=250)


@pytest.mark.promise("policy-learns-from-failed-agents")
def test_policy_unlearns_calls_of_unknown_tools(model: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    question = json.dumps({"messages": [{"role": "user", "content": "why?"}]})
    tasks.write_text(f"{question}\n" * 4)
    run = run_to_end(
        tmp_path / "run",
        "algorithm=grpo",
        "algorithm.minibatches=1",
        "model.source=directory",
        f"model.path={model}",
        f"data.path={tasks}",
        "data.max_prompt_tokens=400",
        "environment.agent=tests.agents.failing_agents:uses_tools",
        "environment.max_turn_tokens=80",
        "environment.failure_reward=-1",
        "reward=environment",
        "rollout.max_response_tokens=100",
        "rollout.stop_at_eos=true",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=8",
        "evaluation.every=0",
        "logging.samples_every=4",
        "logging.tensorboard=false",
        "actor.optimizer.warmup_steps=0",
        "actor.optimizer.learning_rate=5e-4",
        f"run.steps={STEPS}",
        timeout_s=500,
    )
    rates = [step.get("episode/failures/error", 0.0) / EPISODES for step in run.metrics]
    print("rate of failed episodes by step:", rates)
    assert 0.25 < rates[0] < 0.75
    assert sum(rates[-3:]) / 3 < 0.05
    # every failed episode was trained on
    assert all(step["rollout/skipped"] == 0 for step in run.metrics)
    assert not any("episode/retries/error" in step for step in run.metrics)
