"""Tests of complete runs whose agents use only the OpenAI client."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks.runs import Finished, Launch, checkpoint_differences, repeatable, run_to_end
from tests.agents.calling_model import saved
from tests.system.environment_workers import kill_environments

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 4
OVERRIDES = (
    "algorithm=grpo",
    "algorithm.minibatches=1",
    "model.source=random",
    "environment.target=null",
    "environment.agent=tests.agents.openai_agents:calculates",
    "environment.retries=5",
    "rollout.prompts_per_step=8",
    "reward.function=digit_fraction",
    "engine.exact=true",
    "evaluation.every=0",
    "actor.optimizer.warmup_steps=0",
    "checkpoint.every=2",
    "logging.samples_every=1",
    "logging.tensorboard=false",
    f"run.steps={STEPS}",
)


BESIDE = (
    *OVERRIDES,
    *(
        "environment.agent=tests.agents.openai_agents:calculates_slowly",
        "engine.placement=server",
        "rollout.max_staleness=1",
    ),
    *(
        "algorithm.truncated_importance=token",
        "run.max_restarts=9",
        "server.max_restarts=9",
        "server.request_timeout_s=900",
    ),
)
"""Overrides of an asynchronous run."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run = run_to_end(tmp_path_factory.mktemp("agents") / "run", *OVERRIDES, experiment="calculator")
    assert run.code == 0, run.report()
    return run


def test_agent_trains_on_its_generated_tokens(undisturbed: Finished) -> None:
    records = [json.loads(line) for line in undisturbed.paths.samples.read_text().splitlines()]
    answers = [
        turn["environment"]
        for record in records
        for turn in record.get("turns", [])
        if "environment" in turn
    ]
    assert answers and all(answer.lstrip("]").endswith(";") for answer in answers)
    assert all(
        step["mismatch/logprob_abs"] == 0 and step["rollout/skipped"] == 0
        for step in undisturbed.metrics
    )
    assert (
        len(undisturbed.metrics) == STEPS
        and max(step["reward/std"] for step in undisturbed.metrics) > 0
    )


def test_rewards_of_turns_and_metrics_reach_trainer_and_files(tmp_path: Path) -> None:
    run = run_to_end(
        tmp_path / "run",
        *OVERRIDES,
        "environment.agent=tests.agents.crediting_agents:rewards_products",
        "reward=environment",
        "algorithm.advantage=grpo_turns",
        "algorithm.gamma=0.5",
        "evaluation.every=2",
        "evaluation.count=4",
        "run.steps=2",
        experiment="calculator",
    )
    assert run.code == 0, run.report()
    steps = [step for step in run.metrics if "reward/mean" in step]
    for step in steps:
        # two digits in the first turn are a reward, but not the other way round
        assert 0 <= step["episode/metrics/digits"] <= step["reward/mean"]
        assert step["mismatch/logprob_abs"] == 0
    assert max(step["reward/std"] for step in steps) > 0
    assert any("eval/metrics/digits" in step for step in run.metrics)
    records = [json.loads(line) for line in run.paths.samples.read_text().splitlines()]
    assert all(record["failure"] is None and record["retries"] == [] for record in records)
    assert {*records[0]["metrics"]} == {"digits"}


@pytest.mark.promise("agents-equal-on-every-placement")
def test_generator_agents_equal_colocated_agents(undisturbed: Finished, tmp_path: Path) -> None:
    server = ("engine.placement=server", "server.request_timeout_s=900")
    run = run_to_end(tmp_path / "run", *OVERRIDES, *server, experiment="calculator")
    assert_identical(run, undisturbed)
    assert run.paths.samples.read_text() == undisturbed.paths.samples.read_text()


@pytest.mark.promise("killed-agent-endpoint-keeps-weights")
def test_killed_agent_endpoint_keeps_the_weights(
    tmp_path: Path,
) -> None:
    """In an asynchronous run; the generator with its endpoint and the trainer are killed."""
    beside = run_to_end(tmp_path / "beside", *BESIDE, experiment="calculator")
    assert [step["staleness/max"] for step in beside.metrics] == [0, 1, 1, 1]
    assert all(step["staleness/mean"] == step["staleness/max"] for step in beside.metrics)
    with Launch(tmp_path / "run", *BESIDE, experiment="calculator") as launch:
        for step, role in ((1, "generator"), (2, "trainer")):
            launch.wait_for_step(step)
            time.sleep(0.3)
            launch.rank(role, 0).kill()
        run = launch.finish(250)
        assert launch.processes() == []
    assert run.code == 0, run.report()
    assert run.out.count("; restarting ") == 2
    assert_identical(run, beside)


def test_killed_colocated_endpoint_keeps_the_weights(undisturbed: Finished, tmp_path: Path) -> None:
    killed = 0
    with Launch(
        tmp_path / "run", *OVERRIDES, "run.max_restarts=9", experiment="calculator"
    ) as launch:
        for step in (1, 2):
            launch.wait_for_step(step)
            killed += kill_environments(launch)
        launch.wait_for_step(3)
        time.sleep(0.1)
        launch.rank("trainer", 0).kill()
        run = launch.finish(200)
        assert launch.processes() == []
    assert run.code == 0, run.report()
    assert killed >= 2
    assert run.out.count("; restarting trainer") == 1
    assert_identical(run, undisturbed)


@pytest.mark.parametrize("placement", ["colocated", "server"])
def test_agents_train_with_tensor_parallel_engine(tmp_path: Path, placement: str) -> None:
    tensor = (
        "engine.parallel.tensor=2",
        "engine.parallel.data=1",
        f"engine.placement={placement}",
        "engine.exact=false",
    )
    layout = (
        ("actor.parallel.data=2",)
        if placement == "colocated"
        else ("server.request_timeout_s=900",)
    )
    run = run_to_end(tmp_path / "run", *OVERRIDES, *tensor, *layout, experiment="calculator")
    assert len(run.metrics) == STEPS
    assert all(
        step["mismatch/logprob_abs"] < 1e-3 and step["rollout/skipped"] == 0 for step in run.metrics
    )
    records = [json.loads(line) for line in run.paths.samples.read_text().splitlines()]
    assert any("environment" in turn for record in records for turn in record.get("turns", []))


def test_agent_program_is_trained_and_evaluated(tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "questions.jsonl"
    model.mkdir()
    saved(model, "qwen")
    data.write_text(
        "".join(
            json.dumps({"prompt": f"why {at}?", "asked": f"why {at}?"}) + "\n" for at in range(4)
        )
    )
    run = run_to_end(
        tmp_path / "run",
        "algorithm=grpo",
        "model.source=directory",
        f"model.path={model}",
        f"data.path={data}",
        f"environment.agent_command=[{sys.executable},-m,tests.agents.openai_agents]",
        "environment.max_turn_tokens=80",
        "data.max_prompt_tokens=200",
        "rollout.max_response_tokens=400",
        "rollout.stop_at_eos=true",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "rollout.micro_batches=1",
        "algorithm.minibatches=1",
        "engine.exact=true",
        "evaluation.every=2",
        f"evaluation.path={data}",
        "evaluation.count=2",
        "logging.samples_every=1",
        "logging.tensorboard=false",
        "run.steps=2",
    )
    assert run.code == 0, run.report()
    steps = [step for step in run.metrics if "mismatch/logprob_abs" in step]
    assert len(steps) == 2 and all(
        step["mismatch/logprob_abs"] == 0 and step["rollout/skipped"] == 0 for step in steps
    )
    assert any("eval/score" in step for step in run.metrics)
    assert not any("eval/lost_episodes" in step for step in run.metrics)
    records = [json.loads(line) for line in run.paths.samples.read_text().splitlines()]
    assert any(
        "<tool_call>" in turn.get("policy", "")
        for record in records
        for turn in record.get("turns", [])
    )


def assert_identical(run: Finished, expected: Finished) -> None:
    assert repeatable(run.metrics) == repeatable(expected.metrics)
    assert checkpoint_differences(expected.paths, run.paths, STEPS) == []
