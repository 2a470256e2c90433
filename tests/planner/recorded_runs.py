"""Writes run directories whose metrics and timeline are known exactly."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aligner.config.compose import compose_config, save_config
from aligner.observability.metrics import MetricsWriter
from aligner.observability.timeline import Timeline
from aligner.paths import RunPaths
from aligner.schema import Config

# Recorded by a run of experiment=tiny_ppo on two busy cores: for each step, the seconds of the
# trainer's phases, and of the critic's work.
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

# Recorded by runs of benchmarks.async_pipeline on two busy cores. Each step has its seconds, the
# seconds of the trainer's phases, and for the generator's `generate` and for the weight transfer
# the start within the step and the duration, in seconds.
SYNCHRONOUS = (
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
ASYNCHRONOUS = (
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
SERVER_ENGINE = ("algorithm=rloo", "engine.placement=server", "rollout.micro_batches=1")
ServerEngineSteps = tuple[
    tuple[float, dict[str, float], tuple[tuple[float, float], tuple[float, float]]], ...
]


@functools.cache
def composed(*overrides: str) -> Config:
    return compose_config(["experiment=tiny_ppo", *overrides])


def write_timeline(directory: Path, role: str) -> Timeline:
    """Open the timeline of a role's rank 0, with times in seconds since an arbitrary origin."""
    file = RunPaths(directory).timeline / f"{role}-0.jsonl"
    return Timeline(file, clock=lambda: 0.0, wall_clock=lambda: 1e9)


def write_colocated_run(
    directory: Path, *overrides: str, timeline: bool = True, evaluation_s: float = 0.0
) -> Path:
    """Write a run of PPO whose engine is colocated with the trainer; its steps are `STEPS`."""
    directory.mkdir(exist_ok=True)
    save_config(composed(*overrides), RunPaths(directory).config)
    metrics = MetricsWriter(RunPaths(directory))
    timelines = {}
    if timeline:
        timelines = {
            role: write_timeline(directory, role) for role in ("trainer", "critic", "reward")
        }

    now = 100.0
    for number, step in enumerate(STEPS, 1):
        seconds = {**step, "step": step["step"] + evaluation_s}
        if evaluation_s:
            seconds["evaluate"] = evaluation_s
        metrics.write(number, {f"time/{name}": value for name, value in seconds.items()})
        if timelines:
            _add_colocated_step(timelines, number, now, evaluation_s)
        now += seconds["step"]

    for each in timelines.values():
        each.flush()
    return directory


def _add_colocated_step(
    timelines: dict[str, Timeline], number: int, start: float, evaluation_s: float
) -> None:
    trainer, critic, reward = (timelines[role] for role in ("trainer", "critic", "reward"))
    step = STEPS[number - 1]
    generated = start + step["generate"]
    train = generated + step["logprobs"]
    trained = train + step["train"]
    end = start + step["step"]

    trainer.begin_step(number)
    trainer.add("generate", start, generated)
    trainer.add("train", train, trained)
    trainer.add("wait", trained, trained + step["server_wait"])
    trainer.add("publish", end - step["reshard"], end)
    critic.add("values", start, start + VALUES[number - 1])
    critic.add("critic_train", train, train + CRITIC_TRAIN[number - 1])
    reward.add("score", start, start + 0.001)
    if evaluation_s:
        trainer.add("evaluate", end, end + evaluation_s)
        reward.add("score", end, end + evaluation_s)


def write_server_engine_run(
    directory: Path, steps: ServerEngineSteps, *overrides: str, timeline: bool = True
) -> Path:
    """Write a run whose engine is the generator, with these steps."""
    directory.mkdir(exist_ok=True)
    save_config(composed(*SERVER_ENGINE, *overrides), RunPaths(directory).config)
    metrics = MetricsWriter(RunPaths(directory))
    if not timeline:
        for number, (step_s, phases, _) in enumerate(steps, 1):
            _write_seconds(metrics, number, step_s, phases)
        return directory

    trainer = write_timeline(directory, "trainer")
    generator = write_timeline(directory, "generator")
    now = 100.0
    with ThreadPoolExecutor(1, thread_name_prefix="rollouts") as thread:
        for number, (step_s, phases, (generate, transfer)) in enumerate(steps, 1):
            _write_seconds(metrics, number, step_s, phases)
            trainer.begin_step(number)
            trainer.add("wait", now, now + phases["generate"])
            for name, (start, seconds) in (("generate", generate), ("receive", transfer)):
                generator.add(name, now + start, now + start + seconds)
            if "snapshot" in phases:
                # An asynchronous run sends its weights from another thread.
                begin = now + transfer[0]
                thread.submit(trainer.add, "publish", begin, begin + transfer[1]).result()
                trainer.add("snapshot", now + step_s - phases["snapshot"], now + step_s)
            else:
                trainer.add("publish", now + step_s - phases["reshard"], now + step_s)
            now += step_s
    trainer.flush()
    generator.flush()
    return directory


def _write_seconds(
    metrics: MetricsWriter, number: int, step_s: float, phases: dict[str, float]
) -> None:
    seconds = {"step": step_s} | phases
    metrics.write(number, {f"time/{name}": value for name, value in seconds.items()})
