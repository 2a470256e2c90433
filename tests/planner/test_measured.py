from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from aligner.cli import main
from aligner.config.compose import compose_config, save_config
from aligner.config.paths import RunPaths
from aligner.config.schema import Config
from aligner.errors import ConfigError
from aligner.observability.metrics import MetricsWriter
from aligner.observability.timeline import Timeline
from aligner.planner.measured import read_run
from aligner.planner.model import HOST
from aligner.planner.simulation import forecast

# What a run of experiment=tiny_ppo recorded on two busy cores: seconds of the trainer's phases, and of the critic's work.
STEPS = (
    {"step": 0.8330, "generate": 0.4106, "logprobs": 0.1237, "server_wait": 0.1226, "train": 0.1654, "reshard": 0.0039},
    {"step": 0.4593, "generate": 0.1143, "logprobs": 0.1146, "server_wait": 0.0684, "train": 0.1460, "reshard": 0.0034},
    {"step": 0.7789, "generate": 0.1561, "logprobs": 0.0705, "server_wait": 0.0885, "train": 0.4260, "reshard": 0.0319},
    {"step": 0.8097, "generate": 0.2644, "logprobs": 0.1591, "server_wait": 0.1755, "train": 0.1853, "reshard": 0.0211},
    {"step": 0.9869, "generate": 0.5432, "logprobs": 0.1254, "server_wait": 0.0003, "train": 0.3078, "reshard": 0.0036},
    {"step": 0.4725, "generate": 0.1661, "logprobs": 0.0848, "server_wait": 0.1070, "train": 0.0997, "reshard": 0.0028},
)
VALUES = (0.2569, 0.0855, 0.0812, 0.0821, 0.0971, 0.0859)
CRITIC_TRAIN = (0.1205, 0.1867, 0.1345, 0.2748, 0.1347, 0.1713)
MEASURED_S = sum(step["step"] for step in STEPS[1:]) / 5


@functools.cache
def composed(*overrides: str) -> Config:
    return compose_config(["experiment=tiny_ppo", *overrides])


def recorded(directory: Path, *overrides: str, timeline: bool = True, evaluation_s: float = 0.0) -> Path:
    """A run directory with these steps."""
    directory.mkdir(exist_ok=True)
    save_config(composed(*overrides), RunPaths(directory).config)
    writer = MetricsWriter(RunPaths(directory), tensorboard=False)
    now, lines = 100.0, {}
    if timeline:
        files = {role: RunPaths(directory).timeline / f"{role}-0.jsonl" for role in ("trainer", "critic", "reward")}
        lines = {role: Timeline(file, clock=lambda: 0.0, wall_clock=lambda: 1e9) for role, file in files.items()}
    for number, step in enumerate(STEPS, 1):
        times = {**step, "step": step["step"] + evaluation_s, **({"evaluate": evaluation_s} if evaluation_s else {})}
        writer.write(number, {f"time/{name}": seconds for name, seconds in times.items()})
        if lines:
            lines["trainer"].begin_step(number)
            lines["trainer"].add("generate", now, now + step["generate"])
            began = now + step["generate"] + step["logprobs"]
            lines["trainer"].add("train", began, began + step["train"])
            lines["trainer"].add("wait", began + step["train"], began + step["train"] + step["server_wait"])
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


def test_a_synchronous_run_is_predicted_from_its_phases(tmp_path: Path) -> None:
    measured = read_run(recorded(tmp_path))
    assert measured.step_s == pytest.approx(MEASURED_S) and measured.counted == 5 and measured.steps == 40
    assert measured.placement == {"trainer": 1, "critic": 1}
    assert forecast(measured.pipeline, measured.placement).step_s == pytest.approx(MEASURED_S, rel=0.1)
    phases = {phase.name: phase for phase in measured.pipeline.phases}
    assert phases["score"].role == HOST and phases["score"].seconds == pytest.approx(0.001)
    # The trainer waited for the critic's updates in four of the steps; in the fifth they were there.
    seen = [step["train"] + step["server_wait"] for step in STEPS]
    assert phases["critic_train"].seconds == pytest.approx((seen[1] + seen[2] + seen[3] + CRITIC_TRAIN[4] + seen[5]) / 5)
    assert phases["generate"].seconds == pytest.approx(sum(step["generate"] for step in STEPS[1:]) / 5)
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
        read_run(recorded(tmp_path / name, evaluation_s=seconds)) for name, seconds in (("plain", 0.0), ("evaluated", 5.0))
    )
    assert evaluated.step_s == pytest.approx(plain.step_s)
    steps = [forecast(run.pipeline, run.placement).step_s for run in (plain, evaluated)]
    assert steps[0] == pytest.approx(steps[1])


def test_without_a_timeline_the_wait_for_servers_is_the_trainers_own(tmp_path: Path) -> None:
    measured = read_run(recorded(tmp_path, timeline=False))
    assert not measured.has_servers and measured.placement == {"trainer": 1}
    assert forecast(measured.pipeline, measured.placement).step_s == pytest.approx(MEASURED_S)


def test_a_layout_says_which_ranks_come_together(tmp_path: Path) -> None:
    layout = ["actor.parallel.tensor=2", "actor.parallel.data=2", "engine.parallel.data=2", "critic.parallel.pipeline=2"]
    measured = read_run(recorded(tmp_path, *layout))
    assert measured.units == {"trainer": 2, "critic": 2, "reward": 1, "generator": 1}
    assert measured.placement == {"trainer": 4, "critic": 2}
    assert {phase.devices for phase in measured.pipeline.phases if phase.name == "generate"} == {2}


def test_runs_without_such_a_pipeline_are_refused(tmp_path: Path) -> None:
    save_config(composed(), RunPaths(tmp_path).config)
    with pytest.raises(ConfigError, match=r"no training step in metrics.jsonl yet"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match=r"algorithm.trainer=sft is no pipeline; allowed: online"):
        read_run(recorded(tmp_path, "algorithm.trainer=sft"))
