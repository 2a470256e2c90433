from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from aligner.cli import main
from aligner.config.compose import compose_config, save_config
from aligner.errors import ConfigError
from aligner.observability.metrics import MetricsWriter
from aligner.observability.timeline import Timeline
from aligner.paths import RunPaths
from aligner.planner.measured import Measured, read_run
from aligner.planner.phases import HOST
from aligner.planner.simulation import forecast
from aligner.schema import Config

# What a run of experiment=tiny_ppo recorded on two busy cores: seconds of the trainer's phases, and
# of the critic's work.
STEPS = (
    {
        "step": 0.8330,
        "generate": 0.4106,
        "logprobs": 0.1237,
        "server_wait": 0.1226,
        "train": 0.1654,
        "reshard": 0.0039,
    },
    {
        "step": 0.4593,
        "generate": 0.1143,
        "logprobs": 0.1146,
        "server_wait": 0.0684,
        "train": 0.1460,
        "reshard": 0.0034,
    },
    {
        "step": 0.7789,
        "generate": 0.1561,
        "logprobs": 0.0705,
        "server_wait": 0.0885,
        "train": 0.4260,
        "reshard": 0.0319,
    },
    {
        "step": 0.8097,
        "generate": 0.2644,
        "logprobs": 0.1591,
        "server_wait": 0.1755,
        "train": 0.1853,
        "reshard": 0.0211,
    },
    {
        "step": 0.9869,
        "generate": 0.5432,
        "logprobs": 0.1254,
        "server_wait": 0.0003,
        "train": 0.3078,
        "reshard": 0.0036,
    },
    {
        "step": 0.4725,
        "generate": 0.1661,
        "logprobs": 0.0848,
        "server_wait": 0.1070,
        "train": 0.0997,
        "reshard": 0.0028,
    },
)
VALUES = (0.2569, 0.0855, 0.0812, 0.0821, 0.0971, 0.0859)
CRITIC_TRAIN = (0.1205, 0.1867, 0.1345, 0.2748, 0.1347, 0.1713)
MEASURED_S = sum(step["step"] for step in STEPS[1:]) / 5

# What runs of benchmarks.async_pipeline recorded on two cores that others used too, of each step:
# its seconds, those of the trainer's phases, and when after its beginning samples were drawn and
# weights were served, and for how long.
IN_TURN = (
    (
        4.046,
        {"generate": 0.883, "logprobs": 1.280, "train": 1.808, "reshard": 0.071},
        ((0.019, 0.842), (3.995, 0.045)),
    ),
    (
        3.518,
        {"generate": 0.816, "logprobs": 1.092, "train": 1.556, "reshard": 0.049},
        ((0.007, 0.794), (3.487, 0.025)),
    ),
    (
        3.387,
        {"generate": 0.771, "logprobs": 1.124, "train": 1.454, "reshard": 0.036},
        ((0.006, 0.744), (3.369, 0.014)),
    ),
    (
        3.435,
        {"generate": 0.746, "logprobs": 1.092, "train": 1.548, "reshard": 0.047},
        ((0.008, 0.719), (3.404, 0.026)),
    ),
    (
        3.602,
        {"generate": 0.760, "logprobs": 1.107, "train": 1.687, "reshard": 0.045},
        ((0.004, 0.739), (3.571, 0.020)),
    ),
    (
        3.540,
        {"generate": 0.817, "logprobs": 1.124, "train": 1.556, "reshard": 0.039},
        ((0.005, 0.796), (3.517, 0.017)),
    ),
    (
        3.332,
        {"generate": 0.773, "logprobs": 1.091, "train": 1.435, "reshard": 0.030},
        ((0.005, 0.748), (3.314, 0.014)),
    ),
)
BESIDE = (
    (
        4.373,
        {"generate": 1.177, "logprobs": 1.173, "train": 2.013, "snapshot": 0.007},
        ((1.133, 2.813), (0.108, 0.178)),
    ),
    (
        2.929,
        {"generate": 0.003, "logprobs": 1.121, "train": 1.794, "snapshot": 0.006},
        ((0.601, 1.956), (0.387, 0.204)),
    ),
    (
        2.662,
        {"generate": 0.003, "logprobs": 1.099, "train": 1.552, "snapshot": 0.005},
        ((0.086, 2.194), (0.033, 0.047)),
    ),
    (
        2.649,
        {"generate": 0.004, "logprobs": 1.151, "train": 1.484, "snapshot": 0.005},
        ((0.600, 1.813), (0.009, 0.556)),
    ),
    (
        2.755,
        {"generate": 0.020, "logprobs": 1.282, "train": 1.445, "snapshot": 0.005},
        ((0.102, 1.488), (0.064, 0.033)),
    ),
    (
        2.654,
        {"generate": 0.004, "logprobs": 1.117, "train": 1.519, "snapshot": 0.004},
        ((0.051, 2.010), (0.002, 0.044)),
    ),
    (
        2.457,
        {"generate": 0.001, "logprobs": 1.010, "train": 1.439, "snapshot": 0.004},
        ((0.637, 1.758), (0.011, 0.621)),
    ),
    (
        2.512,
        {"generate": 0.012, "logprobs": 1.128, "train": 1.365, "snapshot": 0.004},
        ((0.053, 1.315), (0.019, 0.028)),
    ),
)
GENERATION_BOUND = (
    (
        3.009,
        {"generate": 1.960, "logprobs": 0.449, "train": 0.593, "snapshot": 0.006},
        ((1.960, 1.891), (0.072, 0.134)),
    ),
    (
        1.870,
        {"generate": 0.853, "logprobs": 0.425, "train": 0.583, "snapshot": 0.006},
        ((0.929, 1.735), (0.863, 0.061)),
    ),
    (
        1.789,
        {"generate": 0.805, "logprobs": 0.463, "train": 0.513, "snapshot": 0.005},
        ((0.881, 1.858), (0.814, 0.062)),
    ),
    (
        2.008,
        {"generate": 0.959, "logprobs": 0.437, "train": 0.604, "snapshot": 0.005},
        ((1.784, 1.905), (1.527, 0.252)),
    ),
    (
        2.679,
        {"generate": 1.695, "logprobs": 0.406, "train": 0.570, "snapshot": 0.005},
        ((1.740, 1.808), (1.707, 0.029)),
    ),
    (
        1.867,
        {"generate": 0.882, "logprobs": 0.401, "train": 0.575, "snapshot": 0.005},
        ((1.030, 1.646), (0.918, 0.085)),
    ),
    (
        1.761,
        {"generate": 0.817, "logprobs": 0.439, "train": 0.499, "snapshot": 0.004},
        ((0.872, 1.783), (0.828, 0.038)),
    ),
    (
        1.861,
        {"generate": 0.903, "logprobs": 0.400, "train": 0.550, "snapshot": 0.005},
        ((0.960, 1.652), (0.913, 0.038)),
    ),
)
APART = ("algorithm=rloo", "engine.placement=server", "rollout.micro_batches=1")
ApartSteps = tuple[
    tuple[float, dict[str, float], tuple[tuple[float, float], tuple[float, float]]], ...
]


@functools.cache
def composed(*overrides: str) -> Config:
    return compose_config(["experiment=tiny_ppo", *overrides])


def recorded(
    directory: Path, *overrides: str, timeline: bool = True, evaluation_s: float = 0.0
) -> Path:
    """A run directory with these steps."""
    directory.mkdir(exist_ok=True)
    save_config(composed(*overrides), RunPaths(directory).config)
    writer = MetricsWriter(RunPaths(directory))
    now, lines = 100.0, {}
    if timeline:
        files = {
            role: RunPaths(directory).timeline / f"{role}-0.jsonl"
            for role in ("trainer", "critic", "reward")
        }
        lines = {
            role: Timeline(file, clock=lambda: 0.0, wall_clock=lambda: 1e9)
            for role, file in files.items()
        }
    for number, step in enumerate(STEPS, 1):
        times = {
            **step,
            "step": step["step"] + evaluation_s,
            **({"evaluate": evaluation_s} if evaluation_s else {}),
        }
        writer.write(number, {f"time/{name}": seconds for name, seconds in times.items()})
        if lines:
            lines["trainer"].begin_step(number)
            lines["trainer"].add("generate", now, now + step["generate"])
            began = now + step["generate"] + step["logprobs"]
            lines["trainer"].add("train", began, began + step["train"])
            lines["trainer"].add(
                "wait", began + step["train"], began + step["train"] + step["server_wait"]
            )
            lines["trainer"].add("evaluate", now + step["step"], now + step["step"] + evaluation_s)
            lines["critic"].add("values", now, now + VALUES[number - 1])
            lines["critic"].add("critic_train", began, began + CRITIC_TRAIN[number - 1])
            lines["reward"].add("score", now, now + 0.001)
            if evaluation_s:
                lines["reward"].add("score", now + step["step"], now + step["step"] + evaluation_s)
        now += times["step"]
    for line in lines.values():
        line.flush()
    return directory


def recorded_apart(
    directory: Path, steps: ApartSteps, *overrides: str, timeline: bool = True
) -> Path:
    """A run directory with these steps, of a run whose engine is the generator's."""
    directory.mkdir(exist_ok=True)
    save_config(composed(*APART, *overrides), RunPaths(directory).config)
    writer, now = MetricsWriter(RunPaths(directory)), 100.0
    files = [
        RunPaths(directory).timeline / f"{role}-0.jsonl" if timeline else None
        for role in ("trainer", "generator")
    ]
    trainer, generator = (
        Timeline(file, clock=lambda: 0.0, wall_clock=lambda: 1e9) for file in files
    )
    with ThreadPoolExecutor(1, thread_name_prefix="rollouts") as thread:
        for number, (step_s, phases, (drawn, taken)) in enumerate(steps, 1):
            writer.write(
                number,
                {"time/step": step_s}
                | {f"time/{name}": seconds for name, seconds in phases.items()},
            )
            trainer.begin_step(number)
            trainer.add("wait", now, now + phases["generate"])
            for name, (start, seconds) in (("generate", drawn), ("receive", taken)):
                generator.add(name, now + start, now + start + seconds)
            if "snapshot" in phases:
                thread.submit(trainer.add, "publish", now + taken[0], now + sum(taken)).result()
                trainer.add("snapshot", now + step_s - phases["snapshot"], now + step_s)
            now += step_s
    trainer.flush()
    generator.flush()
    return directory


def seconds_of(run: Measured, name: str) -> float:
    return next(phase.seconds for phase in run.pipeline.phases if phase.name == name)


def mean(seconds: list[float]) -> float:
    return sum(seconds) / len(seconds)


def test_a_run_in_turn_with_a_generator_is_predicted_and_the_run_beside_training_from_it(
    tmp_path: Path,
) -> None:
    measured = read_run(recorded_apart(tmp_path, IN_TURN))
    assert (
        measured.placement == {"trainer": 1, "generator": 1}
        and measured.pipeline.max_staleness == 0
    )
    assert (
        measured.step_s == pytest.approx(mean([step_s for step_s, *_ in IN_TURN[1:]]))
        and measured.counted == 6
    )
    assert forecast(measured.pipeline, measured.placement).step_s == pytest.approx(measured.step_s)
    work = {phase.name: (phase.role, phase.seconds) for phase in measured.pipeline.phases}
    assert work["generate"] == (
        "generator",
        pytest.approx(mean([phases["generate"] for _, phases, _ in IN_TURN[1:]])),
    )
    assert work["load"] == (
        "generator",
        pytest.approx(mean([taken[1] for *_, (_, taken) in IN_TURN[1:]])),
    )
    assert work["publish"][1] + work["load"][1] == pytest.approx(
        mean([phases["reshard"] for _, phases, _ in IN_TURN[1:]])
    )
    beside = replace(measured.pipeline, max_staleness=1)
    assert forecast(beside, measured.placement).step_s == pytest.approx(
        mean([step[0] for step in BESIDE[1:]]), rel=0.1
    )


@pytest.mark.parametrize(
    ("steps", "bottleneck"), [(BESIDE, "trainer"), (GENERATION_BOUND, "generator")]
)
def test_a_run_beside_training_is_predicted_from_what_each_role_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: ApartSteps, bottleneck: str
) -> None:
    measured = read_run(recorded_apart(tmp_path, steps, "rollout.max_staleness=1"))
    expected = mean([step_s for step_s, *_ in steps[1:]])
    assert measured.step_s == pytest.approx(expected) and measured.counted == 7
    assert forecast(measured.pipeline, measured.placement).step_s == pytest.approx(
        expected, rel=0.03
    )
    work = {phase.name: phase.seconds for phase in measured.pipeline.phases}
    assert work["publish"] == pytest.approx(
        mean([phases["snapshot"] for _, phases, _ in steps[1:]])
    )
    # In turn is what they add up to; on shared cores that is more than a run in turn takes.
    assert forecast(
        replace(measured.pipeline, max_staleness=0), measured.placement
    ).step_s == pytest.approx(sum(work.values()))
    with pytest.raises(SystemExit):
        main(["plan", "--measured", str(tmp_path)])
    shown = capsys.readouterr().out
    assert (
        "measured: staleness 1" in shown
        and "its phases are as they took beside each other" in shown
    )
    assert f"bottleneck: {bottleneck}" in shown


def test_a_publish_of_other_layouts_takes_as_long_at_the_rate_that_the_run_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = read_run(recorded_apart(tmp_path, IN_TURN))
    assert measured.publish_s == pytest.approx(
        mean([phases["reshard"] for _, phases, _ in IN_TURN[1:]])
    )
    costs = []
    for override in ([], ["engine.parallel.data=2"]):
        with pytest.raises(SystemExit):
            main(["plan", "--measured", str(tmp_path), "--json", *override])
        costs.append(json.loads(capsys.readouterr().out)["publish"])
    assert costs[0]["seconds"] == pytest.approx(measured.publish_s)
    assert (
        costs[1]["seconds"] == pytest.approx(2 * measured.publish_s)
        and costs[1]["sent"] == 2 * costs[0]["sent"]
    )


def test_a_batch_that_the_trainer_waits_for_is_there_when_the_next_weights_are_served(
    tmp_path: Path,
) -> None:
    bound = [
        read_run(
            recorded_apart(
                tmp_path / how,
                GENERATION_BOUND[:4],
                "rollout.max_staleness=1",
                f"engine.in_flight={how}",
            )
        )
        for how in ("finish", "interrupt")
    ]
    # The weights' way, 0.061 s and then 0.062 s, is not in it, the samples' is: to 1.870 + 0.814 s,
    # to 1.789 + 1.527 s.
    turns = [1.870 + 0.814 - 0.863 - 0.061, 1.789 + 1.527 - 0.814 - 0.062]
    assert seconds_of(bound[0], "generate") == pytest.approx(mean(turns))
    assert seconds_of(bound[0], "load") == pytest.approx(mean([0.061, 0.062]))
    # Weights that interrupt are served by another thread: then it is the generator's own work.
    assert seconds_of(bound[1], "generate") == pytest.approx(mean([1.735, 1.858, 1.905]))


def test_when_nothing_is_drawn_or_trained_on_yet_steps_do_not_count(tmp_path: Path) -> None:
    ahead = ("rollout.max_staleness=2", "run.steps=7")
    assert read_run(recorded_apart(tmp_path, BESIDE[:7], *ahead)).counted == 3
    with pytest.raises(
        ConfigError, match=r"no training step in metrics.jsonl yet that counts; let the run do 6"
    ):
        read_run(recorded_apart(tmp_path / "short", BESIDE[:2], *ahead))


def test_what_the_generator_did_beside_training_is_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"without a timeline .*; measure with logging.timeline=true, or rollout.max_stal",
    ):
        read_run(
            recorded_apart(tmp_path / "beside", BESIDE, "rollout.max_staleness=1", timeline=False)
        )
    in_turn = read_run(recorded_apart(tmp_path / "in_turn", IN_TURN, timeline=False))
    assert forecast(in_turn.pipeline, in_turn.placement).step_s == pytest.approx(in_turn.step_s)
    assert seconds_of(in_turn, "generate") == pytest.approx(
        mean([phases["generate"] for _, phases, _ in IN_TURN[1:]])
    )


def test_a_synchronous_run_is_predicted_from_its_phases(tmp_path: Path) -> None:
    measured = read_run(recorded(tmp_path))
    assert (
        measured.step_s == pytest.approx(MEASURED_S)
        and measured.counted == 5
        and measured.steps == 40
    )
    assert measured.placement == {"trainer": 1, "critic": 1}
    assert forecast(measured.pipeline, measured.placement).step_s == pytest.approx(
        MEASURED_S, rel=0.1
    )
    phases = {phase.name: phase for phase in measured.pipeline.phases}
    assert phases["score"].role == HOST and phases["score"].seconds == pytest.approx(0.001)
    # The trainer waited for the critic's updates in four of the steps; in the fifth they were
    # there.
    seen = [step["train"] + step["server_wait"] for step in STEPS]
    assert phases["critic_train"].seconds == pytest.approx(
        (seen[1] + seen[2] + seen[3] + CRITIC_TRAIN[4] + seen[5]) / 5
    )
    assert phases["generate"].seconds == pytest.approx(
        sum(step["generate"] for step in STEPS[1:]) / 5
    )
    assert measured.pipeline.micro_batches == 2 and measured.pipeline.max_staleness == 0


def test_the_command_tells_what_the_run_would_gain_from_an_engine_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--measured", str(recorded(tmp_path))]
    with pytest.raises(SystemExit):
        main([*arguments, "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["devices"] == {"trainer": 1, "generator": 1, "critic": 1} and plan["steps"] == 40
    assert plan["predicted_measured_step_s"] == pytest.approx(plan["measured_step_s"], rel=0.1)
    assert plan["ideal_s"] <= plan["step_s"] < 0.7 * plan["measured_step_s"]
    with pytest.raises(SystemExit):
        main([*arguments, "--phases", "score=3", "--max-staleness", "0"])
    shown = capsys.readouterr().out
    assert "bottleneck: reward" in shown and "the prediction for the measured run is -" in shown


def test_evaluations_are_no_part_of_a_step(tmp_path: Path) -> None:
    plain, evaluated = (
        read_run(recorded(tmp_path / name, evaluation_s=seconds))
        for name, seconds in (("plain", 0.0), ("evaluated", 5.0))
    )
    assert evaluated.step_s == pytest.approx(plain.step_s)
    steps = [forecast(run.pipeline, run.placement).step_s for run in (plain, evaluated)]
    assert steps[0] == pytest.approx(steps[1])


def test_without_a_timeline_the_wait_for_servers_is_the_trainers_own(tmp_path: Path) -> None:
    measured = read_run(recorded(tmp_path, timeline=False))
    assert not measured.has_servers and measured.placement == {"trainer": 1}
    assert forecast(measured.pipeline, measured.placement).step_s == pytest.approx(MEASURED_S)


def test_a_layout_says_which_ranks_come_together(tmp_path: Path) -> None:
    layout = [
        "actor.parallel.tensor=2",
        "actor.parallel.data=2",
        "engine.parallel.data=2",
        "critic.parallel.pipeline=2",
    ]
    measured = read_run(recorded(tmp_path, *layout))
    assert measured.units == {"trainer": 2, "critic": 2, "reward": 1, "teacher": 1, "generator": 1}
    assert measured.placement == {"trainer": 4, "critic": 2}
    assert {phase.devices for phase in measured.pipeline.phases if phase.name == "generate"} == {2}


def test_runs_without_such_a_pipeline_are_refused(tmp_path: Path) -> None:
    save_config(composed(), RunPaths(tmp_path).config)
    with pytest.raises(ConfigError, match=r"no training step in metrics.jsonl yet"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match=r"algorithm.trainer=sft is no pipeline; allowed: online"):
        read_run(recorded(tmp_path, "algorithm.trainer=sft"))
