"""Tests of complete runs whose responses are episodes of an environment."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from aligner.data.collectives import samples_from_tensors
from benchmarks.runs import Finished, Launch, checkpoint_differences, repeatable, run_to_end
from tests.system.environment_workers import kill_environments

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 6
OVERRIDES = (
    "algorithm=grpo",
    "algorithm.minibatches=1",
    "model.source=random",
    "environment.target=tests.agents.teller:Teller",
    "+environment.arguments.turns=3",
    "+environment.arguments.delay_s=0.05",
    "environment.workers=2",
    "environment.retries=3",
    "rollout.prompts_per_step=16",
    "rollout.max_response_tokens=40",
    "engine.exact=true",
    "actor.parallel.data=2",
    "engine.parallel.data=2",
    "evaluation.every=0",
    "actor.optimizer.warmup_steps=0",
    "checkpoint.every=2",
    "logging.samples_every=1",
    "logging.tensorboard=false",
    f"run.steps={STEPS}",
)


BESIDE = (
    *OVERRIDES,
    *("engine.placement=server", "rollout.max_staleness=2", "rollout.spare_prompts=4"),
    *("algorithm.truncated_importance=token", "run.max_restarts=9", "server.max_restarts=9"),
)
"""Overrides of an asynchronous run, which carries partial rollouts over in mid-episode."""
RANKS = (("generator", 1), ("trainer", 0), ("generator", 0))
"""Roles and ranks that are killed, one in each step."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run = run_to_end(
        tmp_path_factory.mktemp("episodes") / "run", *OVERRIDES, experiment="calculator"
    )
    assert run.code == 0, run.report()
    return run


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run = run_to_end(tmp_path_factory.mktemp("beside") / "run", *BESIDE, experiment="calculator")
    assert run.code == 0, run.report()
    return run


def test_samples_and_metrics_contain_turns(
    undisturbed: Finished,
) -> None:
    records = [json.loads(line) for line in undisturbed.paths.samples.read_text().splitlines()]
    turns = [record["turns"] for record in records if "turns" in record]
    assert any(len(each) > 2 for each in turns)
    for record in records:
        speakers = [name for turn in record.get("turns", []) for name in turn]
        assert speakers == (["environment", "policy"] * len(speakers))[: len(speakers)]
        answers = [turn["environment"] for turn in record.get("turns", []) if "environment" in turn]
        assert answers == ["s", "n1;", "n2;"][: len(answers)]
    assert all(step["mismatch/logprob_abs"] == 0 for step in undisturbed.metrics)
    assert max(step["episode/turns"] for step in undisturbed.metrics) > 1
    assert all(step["episode/environment_s"] > 0 for step in undisturbed.metrics)
    spans = "".join(path.read_text() for path in undisturbed.paths.timeline.glob("trainer-*"))
    assert all(f'"name": "{name}"' in spans for name in ("environments", "generate", "wait"))
    assert max(step["reward/mean"] for step in undisturbed.metrics) > 0


@pytest.mark.promise("killed-environments-keep-weights")
def test_killed_environments_and_trainer_keep_the_weights(
    undisturbed: Finished, tmp_path: Path
) -> None:
    killed = 0
    with Launch(tmp_path / "run", *OVERRIDES, experiment="calculator") as launch:
        for step in (1, 3):
            launch.wait_for_step(step)
            killed += kill_environments(launch)
        launch.wait_for_step(4)
        launch.rank("trainer", 1).kill()
        run = launch.finish(200)
        assert launch.processes() == []
    assert run.code == 0, run.report()
    assert killed >= 4
    assert_identical(run, undisturbed)


@pytest.mark.promise("episodes-equal-on-every-placement")
def test_generator_episodes_equal_colocated_episodes(undisturbed: Finished, tmp_path: Path) -> None:
    run = run_to_end(
        tmp_path / "run", *OVERRIDES, "engine.placement=server", experiment="calculator"
    )
    assert_identical(run, undisturbed)
    assert run.paths.samples.read_text() == undisturbed.paths.samples.read_text()


def test_asynchronous_episodes_do_not_depend_on_timing(beside: Finished, tmp_path: Path) -> None:
    assert all(step["rollout/deferred"] == 4 for step in beside.metrics)
    assert max(step["staleness/max"] for step in beside.metrics) > 0
    unfinished_samples = samples_from_tensors(
        {
            name.removeprefix("under_way."): tensor
            for name, tensor in load_file(
                beside.paths.checkpoint(4, "rollouts") / "rollouts.safetensors"
            ).items()
            if name.startswith("under_way.")
        }
    )
    assert any(
        sample.finish_reason == "unfinished" and sample.generated_token_count < len(sample.response)
        for sample in unfinished_samples
    )
    slower = ("environment.arguments.delay_s=0.2", "+environment.arguments.spread=3")
    assert_identical(
        run_to_end(tmp_path / "run", *BESIDE, *slower, experiment="calculator"), beside
    )


def test_killed_roles_with_episodes_keep_weights(beside: Finished, tmp_path: Path) -> None:
    """test_killed_environments_and_trainer_keep_the_weights kills rank 1 of the trainer."""
    with Launch(tmp_path / "run", *BESIDE, experiment="calculator") as launch:
        launch.wait_for_step(1)
        assert kill_environments(launch) >= 2
        for step, (group, rank) in enumerate(RANKS, 2):
            launch.wait_for_step(step)
            time.sleep(random.Random(step).uniform(0, 0.5))
            launch.wait_for_rank(group)  # the role may still be restarting after the previous kill
            launch.rank(group, rank).kill()
        run = launch.finish(200)
        assert launch.processes() == []
    assert run.code == 0, run.report()
    assert run.out.count("; restarting ") == len(RANKS), run.report()
    assert_identical(run, beside)


def test_killed_launcher_with_episodes_keeps_weights(beside: Finished, tmp_path: Path) -> None:
    with Launch(tmp_path / "run", *BESIDE, experiment="calculator") as launch:
        launch.wait_for_step(2)
        launch.interrupt(signal.SIGKILL)
        launch.finish(200, orphans_s=15)
        assert launch.processes() == []
    run = run_to_end(tmp_path / "run", *BESIDE, "run.resume=auto", experiment="calculator")
    assert_identical(run, beside)


@pytest.mark.promise("recorded-answers-are-replayed")
def test_resumed_run_replays_recorded_tool_answers(tmp_path: Path) -> None:
    live = (
        *OVERRIDES,
        "environment.target=tests.agents.teller:Fickle",
        "checkpoint.every=4",
        "run.steps=6",
    )
    with Launch(tmp_path / "run", *live, experiment="calculator") as launch:
        launch.wait_for_step(5)
        before = launch.paths.samples.read_text().splitlines()
        launch.rank("trainer", 0).kill()
        run = launch.finish(200)
    assert run.code == 0, run.report()
    recorded_answers = [
        turn["environment"]
        for line in before
        for turn in json.loads(line).get("turns", [])
        if "environment" in turn
    ]
    assert len({*recorded_answers}) > 4
    assert run.paths.samples.read_text().splitlines()[: len(before)] == before


def assert_identical(run: Finished, expected: Finished) -> None:
    assert repeatable(run.metrics) == repeatable(expected.metrics)
    assert checkpoint_differences(expected.paths, run.paths, STEPS) == []
