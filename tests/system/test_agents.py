"""Whole runs whose responses are episodes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import psutil
import pytest

from benchmarks.runs import Finished, Launch, checkpoint_differences, repeatable, run_to_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 6
OVERRIDES = (
    "algorithm=grpo",
    "algorithm.minibatches=1",
    "model.source=random",
    "environment.target=tests.engines.teller:Teller",
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run = run_to_end(tmp_path_factory.mktemp("episodes") / "run", *OVERRIDES, experiment="calculator")
    assert run.code == 0, run.report()
    return run


def test_what_was_said_is_in_the_samples_and_what_was_given_in_the_scores(undisturbed: Finished) -> None:
    records = [json.loads(line) for line in undisturbed.paths.samples.read_text().splitlines()]
    turns = [record["turns"] for record in records if "turns" in record]
    assert any(len(each) > 2 for each in turns)
    for record in records:
        said = [name for turn in record.get("turns", []) for name in turn]
        assert said == (["environment", "policy"] * len(said))[: len(said)]
        answers = [turn["environment"] for turn in record.get("turns", []) if "environment" in turn]
        assert answers == ["s", "n1;", "n2;"][: len(answers)]
    assert all(step["mismatch/logprob_abs"] == 0 for step in undisturbed.metrics)
    assert max(step["episode/turns"] for step in undisturbed.metrics) > 1
    assert max(step["reward/mean"] for step in undisturbed.metrics) > 0


def test_a_run_whose_environments_and_trainer_are_killed_ends_with_the_same_weights(
    undisturbed: Finished, tmp_path: Path
) -> None:
    killed = 0
    with Launch(tmp_path / "run", *OVERRIDES, experiment="calculator") as launch:
        for step in (1, 3):
            launch.wait_for_step(step)
            for process in launch.processes():
                with contextlib.suppress(psutil.Error):
                    if "aligner.environments.environment_worker" in " ".join(process.cmdline()):
                        process.kill()
                        killed += 1
        launch.wait_for_step(4)
        launch.rank("trainer", 1).kill()
        run = launch.finish(200)
        assert launch.processes() == []
    assert run.code == 0, run.report()
    assert killed >= 4
    assert repeatable(run.metrics) == repeatable(undisturbed.metrics)
    assert checkpoint_differences(undisturbed.paths, run.paths, STEPS) == []
