"""Tests of complete runs whose chat template is not append-only, so that episodes have branches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from aligner.data.collectives import samples_from_tensors
from aligner.data.types import Sample
from benchmarks.runs import Finished, Launch, run_to_end
from tests.agents.test_branches import forgetful_model
from tests.system.environment_workers import kill_environments
from tests.system.test_agents import assert_identical

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.promise("killed-run-with-branches"),
]

OVERRIDES = (
    *(
        "algorithm=grpo",
        "algorithm.minibatches=1",
        "algorithm.kl_coefficient=0.01",
        "reward.function=digit_fraction",
    ),
    *("model.source=directory", "data.max_prompt_tokens=12", "data.long_prompts=error"),
    *(
        "environment.target=tests.agents.teller:Caller",
        "environment.max_turn_tokens=20",
        "environment.max_turns=6",
    ),
    *(
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=2",
        "rollout.max_response_tokens=100",
    ),
    *("environment.retries=3", "environment.deadline_s=40", "+environment.arguments.turns=5"),
    *(
        "rollout.stop_at_eos=true",
        "engine.exact=true",
        "evaluation.every=0",
        "actor.optimizer.warmup_steps=0",
    ),
    *("checkpoint.every=2", "logging.samples_every=1", "logging.tensorboard=false", "run.steps=6"),
)
BESIDE = (
    *(
        "engine.placement=server",
        "rollout.max_staleness=2",
        "rollout.spare_prompts=3",
        "algorithm.truncated_importance=token",
        "seed=2",  # leaves episodes unfinished behind a branch
    ),
    *("run.max_restarts=9", "server.max_restarts=9"),
)
"""Overrides of an asynchronous run, whose partial rollouts are carried over within a branch."""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    directory = tmp_path_factory.mktemp("given")
    asked = [{"messages": [{"role": "user", "content": f"{at}?"}]} for at in range(40)]
    (directory / "asked.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    (directory / "model").mkdir()
    model = forgetful_model(directory / "model", kept=1)
    return (*OVERRIDES, f"model.path={model}", f"data.path={directory / 'asked.jsonl'}")


@pytest.mark.parametrize(
    ("beside", "killed"), [((), "trainer"), (BESIDE, "generator")], ids=["in turn", "beside"]
)
def test_killed_run_with_branches_keeps_the_weights(
    tmp_path: Path, given: tuple[str, ...], beside: tuple[str, ...], killed: str
) -> None:
    expected = run_to_end(tmp_path / "expected", *given, *beside)
    assert expected.code == 0, expected.report()
    assert min(step["episode/branches"] for step in expected.metrics) > 0.1
    assert all(
        step["mismatch/logprob_abs"] == 0 for step in expected.metrics[: 1 if beside else None]
    )
    assert logs(expected).count("starts a new branch (logged for the first episode only)") == 1
    if beside:
        left = [
            sample
            for file in expected.paths.checkpoints.rglob("rollouts.safetensors")
            for sample in samples_in_flight(file)
        ]
        assert any(sample.branches and sample.finish_reason == "unfinished" for sample in left)
    with Launch(tmp_path / "run", *given, *beside) as launch:
        launch.wait_for_step(3)
        assert kill_environments(launch)
        launch.rank(killed, 0).kill()
        run = launch.finish(200, orphans_s=15)
        assert launch.processes() == []
    assert run.code == 0, run.report()
    assert_identical(run, expected)
    assert run.paths.samples.read_text() == expected.paths.samples.read_text()


def samples_in_flight(file: Path) -> list[Sample]:
    tensors = load_file(file).items()
    left = {
        name.removeprefix("under_way."): part
        for name, part in tensors
        if name.startswith("under_way.")
    }
    return samples_from_tensors(left)


def logs(run: Finished) -> str:
    return "".join(path.read_text() for path in run.paths.root.rglob("*.log"))
