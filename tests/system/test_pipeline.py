"""Tests of asynchronous runs with a separate generator, and of killed and suspended roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fault_draws import GROUPS, random_faults
from benchmarks.faults import BESIDE, CHECKPOINT_EVERY, run_disturbed
from benchmarks.runs import Finished, Launch, checkpoint_differences, repeatable, run_to_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS, SEED = 6, 2
OVERRIDES = (
    *BESIDE,
    *("evaluation.every=2", "evaluation.prompts=[one,two,three]", "evaluation.asynchronous=true"),
    "+evaluation.suites.digits={prompts: [four, five], samples: 2, function: digit_fraction}",
    "actor.parallel.data=2",
    "data.curriculum.target=0.3",
    "data.pass_threshold=null",
    f"run.stop_after={STEPS}",
    f"checkpoint.every={CHECKPOINT_EVERY}",
    "logging.tensorboard=false",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """An asynchronous run with two trainer ranks and one generator rank."""
    return run_to_end(tmp_path_factory.mktemp("undisturbed") / "run", *OVERRIDES)


def test_asynchronous_samples_are_one_version_old(undisturbed: Finished) -> None:
    steps = undisturbed.metrics[1:]  # the first record is the evaluation of the initial policy
    assert [step["staleness/max"] for step in steps] == [0, *[1] * (STEPS - 1)]
    assert [step["staleness/mean"] for step in steps] == [0, *[1] * (STEPS - 1)]
    assert all("time/reshard" not in step and step["time/snapshot"] >= 0 for step in steps)
    for step in steps:
        assert 0 <= step["verify/version"] < step["step"]
        assert step["verify/logprob_abs"] < 1e-4


@pytest.mark.promise("every-role-killed-keeps-weights")
def test_run_with_every_role_killed_keeps_the_weights(
    undisturbed: Finished, tmp_path: Path
) -> None:
    """The run also trains on equal samples in equal order.

    All restarts, also those of the trainer, are within one launch.
    """
    faults = random_faults(SEED, GROUPS["all"], STEPS, 0.4, {"trainer": 2})
    disturbed = run_disturbed(tmp_path / "run", faults, *OVERRIDES)
    run = disturbed.run
    assert run.code == 0, run.report()
    assert [fault for fault, _ in disturbed.done] == faults, run.report()
    assert disturbed.in_time, run.report()
    assert repeatable(run.metrics) == repeatable(undisturbed.metrics)
    assert checkpoint_differences(undisturbed.paths, run.paths, STEPS) == []


@pytest.mark.promise("killed-trainer-keeps-running-critic")
def test_killed_trainer_resumes_with_the_running_critic(
    undisturbed: Finished, tmp_path: Path
) -> None:
    with Launch(tmp_path / "run", *OVERRIDES) as launch:
        launch.wait_for_step(CHECKPOINT_EVERY + 2)  # the checkpoint is complete a step later
        launch.rank("trainer", 0).kill()
        run = launch.finish(200)
    assert run.code == 0, run.report()
    assert "; restarting trainer" in run.out and "; restarting critic" not in run.out, run.out
    assert repeatable(run.metrics) == repeatable(undisturbed.metrics)
    assert checkpoint_differences(undisturbed.paths, run.paths, STEPS) == []


@pytest.mark.promise("every-role-killed-keeps-weights")
def test_killed_replica_of_the_generator_changes_no_sample(tmp_path: Path) -> None:
    """Each of the two replicas decodes two samples at a time, so that samples wait for them."""
    overrides = (*OVERRIDES, "engine.parallel.data=2", "engine.batch_size=2", "engine.exact=true")
    # The checkpoints contain the name of the run, so both directories have the same one.
    directories = [tmp_path / kind / "run" for kind in ("whole", "killed")]
    for directory in directories:
        directory.parent.mkdir()
    whole = run_to_end(directories[0], *overrides)
    with Launch(directories[1], *overrides) as launch:
        launch.wait_for_step(2, 200)
        launch.rank("generator", 1).kill()
        killed = launch.finish(300)
    assert killed.code == 0, killed.report()
    assert "; restarting generator" in killed.out, killed.out
    assert repeatable(killed.metrics) == repeatable(whole.metrics)
    assert checkpoint_differences(whole.paths, killed.paths, STEPS) == []


@pytest.mark.promise("every-role-killed-keeps-weights")
def test_suspended_reward_and_critic_are_replaced(undisturbed: Finished, tmp_path: Path) -> None:
    with Launch(
        tmp_path / "run", *OVERRIDES, "reward.replicas=2", "server.health_timeout_s=10"
    ) as launch:
        launch.wait_for_step(1)
        launch.rank("reward", 0).suspend()
        launch.wait_for_step(3)
        launch.rank("critic", 0).suspend()
        run = launch.finish(200)
    assert run.code == 0, run.report()
    for group in ("reward", "critic"):
        silent = (
            f"{group} rank 0 sent no heartbeat for 10 s (server.health_timeout_s) and was killed"
        )
        assert f"{silent}; restarting {group} (1 of 3 in the last hour)" in run.out, run.out
    assert repeatable(run.metrics) == repeatable(undisturbed.metrics)
    assert checkpoint_differences(undisturbed.paths, run.paths, STEPS) == []


def test_asynchronous_evaluation_equals_synchronous(undisturbed: Finished, tmp_path: Path) -> None:
    between = run_to_end(tmp_path / "run", *OVERRIDES, "evaluation.asynchronous=false")
    for metric in ("eval/score", "eval/digits/pass@2"):
        assert [step["step"] for step in between.metrics if metric in step] == [0, 2, 4, 6]
    assert repeatable(between.metrics) == repeatable(undisturbed.metrics)
