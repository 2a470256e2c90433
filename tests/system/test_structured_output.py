"""Runs whose agents request structured output: the trainer recomputes the engine's log-probs."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from benchmarks.runs import run_to_end
from tests.agents.calling_model import saved
from tests.agents.test_structured_output import JSON_SCHEMA, SCHEMA
from tests.engines.vllm.shared_clients import INSTALLED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.promise("guided-logprobs-are-exact")
@pytest.mark.parametrize("engine", ["embedded", pytest.param("vllm", marks=INSTALLED)])
def test_generator_sends_structured_output_with_its_grammars(tmp_path: Path, engine: str) -> None:
    model, data = tmp_path / "model", tmp_path / "questions.jsonl"
    model.mkdir()
    saved(model, "qwen", head_dim=32)  # the smallest head size that vLLM supports on CPUs
    log = tmp_path / "answers.jsonl"
    fields = {"log": str(log), "arguments": {"response_format": JSON_SCHEMA}}
    questions = [
        {"prompt": f"why {at}?", "asked": f"why {at}?", "at": at, **fields} for at in range(2)
    ]
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    run = run_to_end(
        tmp_path / "run",
        "algorithm=grpo",
        "model.source=directory",
        f"model.path={model}",
        f"data.path={data}",
        "environment.agent=tests.agents.openai_agents:structures",
        "environment.max_turn_tokens=200",
        "environment.deadline_s=300",
        "reward.function=digit_fraction",
        "data.max_prompt_tokens=200",
        "rollout.max_response_tokens=300",
        "rollout.stop_at_eos=true",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "rollout.micro_batches=1",
        "algorithm.minibatches=1",
        f"engine={engine}",
        *(["engine.vllm.timeout_s=600"] if engine == "vllm" else []),
        "engine.placement=server",
        "server.start_timeout_s=600",
        "server.request_timeout_s=900",
        "evaluation.every=0",
        "logging.tensorboard=false",
        "run.steps=1",
        timeout_s=800,
    )
    assert run.code == 0, run.report()
    (step,) = run.metrics
    # Without the grammars, the trainer's log-probs would be those over all tokens.
    assert step["mismatch/logprob_abs"] < 1e-4 and step["rollout/skipped"] == 0
    answers = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(answers) == 4
    for answer in answers:
        jsonschema.validate(json.loads(answer["content"]), SCHEMA)
