"""Reading of a measured run: the counted steps, the phases, and the usage of each role."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from aligner.config.compose import save_config
from aligner.errors import ConfigError
from aligner.paths import RunPaths
from aligner.planner.measured_run import REQUESTS, MeasuredRun, RoleUsage, read_measured_run
from aligner.planner.pipeline_model import HOST, Phase, predict_step_seconds
from tests.planner.recorded_runs import (
    ASYNCHRONOUS,
    CRITIC_TRAIN,
    GENERATION_BOUND,
    STEPS,
    SYNCHRONOUS,
    ServerEngineSteps,
    composed,
    write_colocated_run,
    write_server_engine_run,
    write_timeline,
)

MEASURED_S = sum(step["step"] for step in STEPS[1:]) / 5


def phase(run: MeasuredRun, name: str) -> Phase:
    return next(phase for phase in run.pipeline.phases if phase.name == name)


def usage(run: MeasuredRun, role: str) -> RoleUsage:
    return next(usage for usage in run.usage if usage.role == role)


def mean(seconds: list[float]) -> float:
    return sum(seconds) / len(seconds)


def test_synchronous_phases_reproduce_the_measured_step(tmp_path: Path) -> None:
    run = read_measured_run(write_server_engine_run(tmp_path, SYNCHRONOUS))
    counted = SYNCHRONOUS[1:]
    assert run.placement == {"trainer": 1, "generator": 1}
    assert run.pipeline.max_staleness == 0
    assert run.measured_steps == 6
    assert run.step_s == pytest.approx(mean([step_s for step_s, *_ in counted]))
    assert predict_step_seconds(run.pipeline, run.placement) == pytest.approx(run.step_s)

    generate, load, publish = (phase(run, name) for name in ("generate", "load", "publish"))
    reshard_s = mean([phases["reshard"] for _, phases, _ in counted])
    assert (generate.role, load.role) == ("generator", "generator")
    assert generate.mean_seconds == pytest.approx(
        mean([phases["generate"] for _, phases, _ in counted])
    )
    assert load.mean_seconds == pytest.approx(mean([transfer[1] for *_, (_, transfer) in counted]))
    assert publish.mean_seconds + load.mean_seconds == pytest.approx(reshard_s)


def test_asynchronous_step_is_predicted_from_synchronous_run(tmp_path: Path) -> None:
    run = read_measured_run(write_server_engine_run(tmp_path, SYNCHRONOUS))
    asynchronous = replace(run.pipeline, max_staleness=1)
    measured_s = mean([step_s for step_s, *_ in ASYNCHRONOUS[1:]])
    predicted_s = predict_step_seconds(asynchronous, run.placement)
    assert predicted_s == pytest.approx(measured_s, rel=0.1)


@pytest.mark.parametrize(
    ("steps", "limiting_role"), [(ASYNCHRONOUS, "trainer"), (GENERATION_BOUND, "generator")]
)
def test_asynchronous_phases_reproduce_the_measured_step(
    tmp_path: Path, steps: ServerEngineSteps, limiting_role: str
) -> None:
    run = read_measured_run(write_server_engine_run(tmp_path, steps, "rollout.max_staleness=1"))
    measured_s = mean([step_s for step_s, *_ in steps[1:]])
    assert run.step_s == pytest.approx(measured_s)
    assert run.measured_steps == 7
    assert predict_step_seconds(run.pipeline, run.placement) == pytest.approx(measured_s, rel=0.03)
    assert run.limiting_role == limiting_role
    assert phase(run, "publish").mean_seconds == pytest.approx(
        mean([phases["snapshot"] for _, phases, _ in steps[1:]])
    )


def test_generation_ends_when_the_next_transfer_starts(tmp_path: Path) -> None:
    runs = {
        in_flight: read_measured_run(
            write_server_engine_run(
                tmp_path / in_flight,
                GENERATION_BOUND[:4],
                "rollout.max_staleness=1",
                f"engine.in_flight={in_flight}",
            )
        )
        for in_flight in ("finish", "interrupt")
    }
    # A cycle contains the transport of the samples, not the weight transfer. The measured cycles
    # end at 1.870 + 0.814 s and at 1.789 + 1.527 s.
    cycles = [1.870 + 0.814 - 0.863 - 0.061, 1.789 + 1.527 - 0.814 - 0.062]
    assert phase(runs["finish"], "generate").mean_seconds == pytest.approx(mean(cycles))
    assert phase(runs["finish"], "load").mean_seconds == pytest.approx(mean([0.061, 0.062]))

    # Weights that interrupt generation arrive in another thread: only the generator's spans count.
    assert phase(runs["interrupt"], "generate").mean_seconds == pytest.approx(
        mean([1.735, 1.858, 1.905])
    )


def test_asynchronous_run_leaves_out_first_and_last_steps(tmp_path: Path) -> None:
    overrides = ("rollout.max_staleness=2", "run.steps=7")
    run = read_measured_run(write_server_engine_run(tmp_path, ASYNCHRONOUS[:7], *overrides))
    assert run.measured_steps == 3
    short = write_server_engine_run(tmp_path / "short", ASYNCHRONOUS[:2], *overrides)
    with pytest.raises(
        ConfigError, match=r"no step of the run can be measured yet; .* at least 6 steps"
    ):
        read_measured_run(short)


def test_colocated_run_is_measured_with_critic_and_host(tmp_path: Path) -> None:
    run = read_measured_run(write_colocated_run(tmp_path))
    assert run.step_s == pytest.approx(MEASURED_S)
    assert run.measured_steps == 5
    assert run.placement == {"trainer": 1, "critic": 1}
    assert run.pipeline.micro_batches == 2
    assert run.pipeline.is_colocated
    assert predict_step_seconds(run.pipeline, run.placement) == pytest.approx(MEASURED_S, rel=0.1)

    assert phase(run, "score").role == HOST
    assert phase(run, "score").mean_seconds == pytest.approx(0.001)
    assert phase(run, "generate").mean_seconds == pytest.approx(
        mean([step["generate"] for step in STEPS[1:]])
    )
    # The trainer waited for the critic's update in four of the steps; in the fifth measured step
    # the update had arrived before.
    answered = [step["train"] + step["server_wait"] for step in STEPS]
    expected = [answered[1], answered[2], answered[3], CRITIC_TRAIN[4], answered[5]]
    assert phase(run, "critic_train").mean_seconds == pytest.approx(mean(expected))


def test_idle_share_is_measured_over_trained_steps(tmp_path: Path) -> None:
    run = read_measured_run(write_server_engine_run(tmp_path, SYNCHRONOUS))
    counted = SYNCHRONOUS[1:]
    total_s = sum(step_s for step_s, *_ in counted)
    waited_s = sum(phases["generate"] for _, phases, _ in counted)
    trainer = usage(run, "trainer")
    assert trainer.waited_for == pytest.approx({"generator": waited_s / total_s}, rel=1e-3)
    assert trainer.busy + trainer.waited == pytest.approx(1)


def test_limiting_role_counts_the_transport_of_requests(tmp_path: Path) -> None:
    run = read_measured_run(write_server_engine_run(tmp_path, SYNCHRONOUS))
    # The trainer waited for `generate` longer than the generator worked on it.
    assert run.phase_shares["generator"] > usage(run, "generator").busy
    assert sum(run.phase_shares.values()) == pytest.approx(1)
    assert run.limiting_role == "trainer"


def test_wait_is_attributed_to_the_role_that_worked(tmp_path: Path) -> None:
    run = read_measured_run(write_colocated_run(tmp_path))
    trainer, critic, reward = (usage(run, role) for role in ("trainer", "critic", "reward"))
    assert next(iter(trainer.waited_for)) == "critic"
    assert set(critic.waited_for) == set(reward.waited_for) == {REQUESTS}
    assert (trainer.devices, critic.devices, reward.devices) == (1, 1, 0)
    assert reward.busy < 0.01
    for each in (trainer, critic, reward):
        assert each.busy + each.waited == pytest.approx(1)


def test_busy_share_is_the_mean_over_ranks(tmp_path: Path) -> None:
    directory = write_colocated_run(tmp_path)
    before = usage(read_measured_run(directory), "critic").busy
    idle_rank = write_timeline(directory, "critic.1")  # a replica that has no work
    idle_rank.add("version", 0.0, 0.001)
    idle_rank.flush()
    assert usage(read_measured_run(directory), "critic").busy == pytest.approx(before / 2)


def test_evaluations_are_not_part_of_a_step(tmp_path: Path) -> None:
    plain, evaluated = (
        read_measured_run(write_colocated_run(tmp_path / name, evaluation_s=seconds))
        for name, seconds in (("plain", 0.0), ("evaluated", 5.0))
    )
    assert evaluated.step_s == pytest.approx(plain.step_s)
    assert predict_step_seconds(evaluated.pipeline, evaluated.placement) == pytest.approx(
        predict_step_seconds(plain.pipeline, plain.placement)
    )
    for role in ("trainer", "critic", "reward"):
        assert usage(evaluated, role).busy == pytest.approx(usage(plain, role).busy, abs=0.02)


def test_steps_missing_in_timeline_do_not_count(tmp_path: Path) -> None:
    directory = write_colocated_run(tmp_path)
    file = RunPaths(directory).timeline / "trainer-0.jsonl"
    lines = file.read_text().splitlines()
    kept = [line for line in lines if '"step": 1,' not in line and '"step": 2}' not in line]
    kept = [line for line in kept if not line.endswith(('"step": 1}', '"step": 2}'))]
    file.write_text("\n".join(kept) + "\n")
    # Step 3 may have lost its beginning.
    run = read_measured_run(directory)
    assert run.measured_steps == 3
    assert run.step_s == pytest.approx(mean([step["step"] for step in STEPS[3:]]))


def test_placement_unit_is_one_model_replica(tmp_path: Path) -> None:
    layout = [
        "actor.parallel.pipeline=2",
        "actor.parallel.data=2",
        "engine.parallel.tensor=4",
    ]
    server = write_server_engine_run(tmp_path / "server", SYNCHRONOUS, *layout)
    assert read_measured_run(server).units == {"trainer": 2, "generator": 4}
    # The engine of a colocated run spans the trainer's ranks.
    colocated = read_measured_run(
        write_colocated_run(tmp_path / "colocated", *layout, "critic.parallel.pipeline=2")
    )
    assert colocated.units == {"trainer": 4, "critic": 2}
    assert colocated.placement == {"trainer": 4, "critic": 2}


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_run_without_timeline_is_refused(tmp_path: Path, max_staleness: int) -> None:
    override = f"rollout.max_staleness={max_staleness}"
    write_server_engine_run(tmp_path, ASYNCHRONOUS, override, timeline=False)
    with pytest.raises(
        ConfigError, match=r"no timeline, .*; set logging.timeline=true and repeat the run"
    ):
        read_measured_run(tmp_path)


def test_run_without_a_second_step_is_refused(tmp_path: Path) -> None:
    directory = write_server_engine_run(tmp_path, SYNCHRONOUS[:1])
    with pytest.raises(
        ConfigError, match=r"no step of the run can be measured yet; .* at least 2 steps"
    ):
        read_measured_run(directory)


def test_offline_run_is_refused(tmp_path: Path) -> None:
    save_config(composed("algorithm.trainer=sft"), RunPaths(tmp_path).config)
    with pytest.raises(
        ConfigError, match=r"algorithm.trainer=sft has no pipeline of roles; .*trainer=online"
    ):
        read_measured_run(tmp_path)
