"""Tests of complete runs whose evaluation suites have their own environments, and of
`aligner evaluate --suite`, which gives the results of the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.runs import Finished, run_to_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 2
HELD_OUT = "'function:aligner_examples.calculator:held_out'"
SUITES = {
    # inherits the environment of training
    "turns": "",
    "greedy": ", samples: 1",
    "short": ", environment: {max_turns: 1}",
    # the same settings, with the same processes
    "short_again": ", environment: {max_turns: 1}",
    "plain": ", environment: {target: null}",
    "agent": ", environment: {target: null, agent: 'tests.agents.openai_agents:calculates'}",
    "greedy_agent": (
        ", samples: 1, environment: {target: null, agent: 'tests.agents.openai_agents:calculates'}"
    ),
}
OVERRIDES = (
    "algorithm=grpo",
    "algorithm.minibatches=1",
    "model.source=random",
    "environment.target=tests.agents.teller:Teller",
    "environment.retries=3",
    "rollout.prompts_per_step=8",
    "rollout.max_response_tokens=40",
    "engine.exact=true",
    "actor.optimizer.warmup_steps=0",
    "evaluation.every=2",
    "evaluation.count=6",
    # sampled, because greedy turns of a random model rarely end
    "evaluation.samples=4",
    "checkpoint.every=2",
    "logging.tensorboard=false",
    f"run.steps={STEPS}",
    *(
        f"+evaluation.suites.{name}={{path: {HELD_OUT}, function: digit_fraction{entries}}}"
        for name, entries in SUITES.items()
    ),
)
SERVER = ("engine.placement=server", "server.request_timeout_s=900")
ASYNCHRONOUS = (
    "rollout.max_staleness=1",
    "algorithm.truncated_importance=token",
    "evaluation.asynchronous=true",
)


def read_scores(run: Finished, step: int) -> dict[str, float]:
    """Return the scores and lengths of the evaluation after a step, by metric."""
    (metrics,) = (each for each in run.metrics if each["step"] == step and "eval/score" in each)
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith("eval/") and name.endswith(("/score", "/length"))
    }


def evaluate(run: Finished, *arguments: str) -> dict[str, Any]:
    """Return the output of `aligner evaluate --json`."""
    command = [sys.executable, "-m", "aligner", "evaluate", str(run.paths.root), *arguments]
    finished = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    metrics: dict[str, Any] = json.loads(finished.stdout)
    return metrics


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run = run_to_end(tmp_path_factory.mktemp("suites") / "run", *OVERRIDES, experiment="calculator")
    assert run.code == 0, run.report()
    return run


def test_each_suite_has_its_own_environment(colocated: Finished) -> None:
    scores = read_scores(colocated, STEPS)
    # The rewards of the three turns are 1, 2 and 3, in addition to digit_fraction.
    assert scores["eval/short/score"] < scores["eval/turns/score"]
    assert scores["eval/plain/score"] <= 1
    assert scores["eval/short/length"] < scores["eval/turns/length"] < scores["eval/plain/length"]
    assert scores["eval/turns/score"] != scores["eval/agent/score"] != scores["eval/plain/score"]
    journals = sorted(path.name for path in colocated.paths.episodes.iterdir())
    assert journals == ["trainer-0", "trainer-0-agent", "trainer-0-short"]


@pytest.mark.parametrize("name", ["evaluation", *sorted(SUITES.keys() - {"turns", "short_again"})])
def test_run_and_evaluate_give_equal_metrics(colocated: Finished, name: str) -> None:
    prefix = "eval/" if name == "evaluation" else f"eval/{name}/"
    expected = read_scores(colocated, STEPS)
    metrics = evaluate(colocated, "--suite", name)
    assert metrics["prompts"] == 6
    assert metrics["eval/score"] == expected[f"{prefix}score"]
    assert metrics["eval/length"] == expected[f"{prefix}length"]


@pytest.mark.parametrize("overrides", [SERVER, SERVER + ASYNCHRONOUS], ids=["server", "beside"])
def test_suites_do_not_depend_on_the_placement(
    colocated: Finished, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    run = run_to_end(tmp_path / "run", *OVERRIDES, *overrides, experiment="calculator")
    assert run.code == 0, run.report()
    assert read_scores(run, 0) == read_scores(colocated, 0)
    if overrides == SERVER:
        assert read_scores(run, STEPS) == read_scores(colocated, STEPS)
    else:
        # other weights, since training is one step stale
        assert read_scores(run, STEPS).keys() == read_scores(colocated, STEPS).keys()
