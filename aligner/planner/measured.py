"""The phases of a run that was measured, from its directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from aligner.config.compose import load_config
from aligner.config.paths import RunPaths
from aligner.config.reward_sources import has_reward_model
from aligner.config.schema import Config
from aligner.errors import ConfigError
from aligner.observability.metrics import read_metrics
from aligner.observability.trace import WAIT, Span, read_spans
from aligner.planner.model import BATCHES, HOST, Phase, Pipeline

_TRAINER = {"logprobs": "logprobs", "train": "train", "reshard": "publish"}
"""The trainer's timed phases, and what the planner calls them."""
_SERVERS = ("score", "values", "critic_train")
_NEWEST = 3 * BATCHES
"""Steps that are counted, at most"""
_ANSWERED_US = 1000
"""Who waited for less did not wait: the answer was there."""
_NO_PART = ("evaluate", "checkpoint")
"""What is not part of every step."""


@dataclass(frozen=True)
class Measured:
    """A synchronous run, as the planner sees it."""

    pipeline: Pipeline
    """Synchronous, with the engine on the trainer's devices"""
    placement: dict[str, int]
    units: dict[str, int]
    """Of the generator too, should it get devices of its own"""
    steps: int
    """Of the whole run, as configured"""
    step_s: float
    """Mean of the measured steps, evaluations and checkpoints left out"""
    counted: int
    """Steps that this is the mean of"""
    has_servers: bool
    """Whether a timeline tells what the servers computed, rather than how long the trainer waited for them"""


def read_run(directory: Path) -> Measured:
    """Read `config.yaml`, `metrics.jsonl` and, where there is one, the timeline.

    The newest steps count, but not the run's first, which warms up. Raises ConfigError for a directory
    without them, and for runs that have no such pipeline.
    """
    paths = RunPaths(directory)
    config = load_config(paths.config)
    if config.algorithm.trainer != "online":
        raise ConfigError(
            f"--measured {directory}: algorithm.trainer={config.algorithm.trainer} is no pipeline; allowed: online"
        )
    if config.engine.placement != "colocated":
        raise ConfigError(
            f"--measured {directory}: engine.placement={config.engine.placement}, where phases overlap and hide each other;"
            " measure with engine.placement=colocated, or give --phases"
        )
    steps = [record for record in read_metrics(paths.metrics) if record["step"] > 0 and "time/step" in record]
    steps = (steps[1:] or steps)[-_NEWEST:]
    if not steps:
        raise ConfigError(f"--measured {directory}: no training step in metrics.jsonl yet; let the run do two or more")
    return _measured(config, steps, read_spans(paths))


def _measured(config: Config, steps: Sequence[Mapping[str, float]], spans: Sequence[Span]) -> Measured:
    def seconds(phase: str) -> list[float]:
        return [record.get(f"time/{phase}", 0.0) for record in steps]

    ranks = config.actor.parallel.ranks
    phases = [_phase("generate", "trainer", seconds("generate"), config.engine.parallel.ranks)]
    phases += [_phase(ours, "trainer", seconds(name), ranks) for name, ours in _TRAINER.items()]
    numbers = [int(record["step"]) for record in steps]
    served = _served(spans, set(numbers))
    # Without a timeline it is not known what the trainer waited for: as good as work of its own.
    beside = [*_NO_PART, *_TRAINER, "generate", *(["server_wait"] if served else [])]
    other = [max(0.0, step - sum(parts)) for step, *parts in zip(seconds("step"), *map(seconds, beside), strict=True)]
    phases.append(_phase("other", "trainer", other, ranks))
    phases += _server_phases(config, served, numbers, _answered(spans))
    whole = [step - sum(parts) for step, *parts in zip(seconds("step"), *map(seconds, _NO_PART), strict=True)]
    return Measured(
        pipeline=Pipeline(tuple(phases), micro_batches=config.rollout.micro_batches, max_staleness=0, seed=config.seed),
        placement={phase.role: phase.devices for phase in phases if phase.role != HOST} | {"trainer": ranks},
        units=_units(config),
        steps=config.run.steps,
        step_s=sum(whole) / len(whole),
        counted=len(whole),
        has_servers=bool(served),
    )


def _served(spans: Sequence[Span], numbers: Set[int]) -> list[Span]:
    """What the servers' first ranks computed for training in the steps of these numbers."""
    evaluations = [span for span in spans if span.name == "evaluate" and span.role == "trainer" and span.rank == 0]
    own = (span for span in spans if span.name in _SERVERS and span.rank == 0 and span.step in numbers)
    return [span for span in own if not any(during.start <= span.start < during.end for during in evaluations)]


def _answered(spans: Sequence[Span]) -> dict[int, float]:
    """By step, seconds from the request for the critic's updates to their answer, where the trainer waited for it."""
    own = [span for span in spans if span.role == "trainer" and span.rank == 0]
    trained = {span.step: span for span in own if span.name == "train"}
    seconds = {}
    for wait in own:
        train = trained.get(wait.step) if wait.name == WAIT else None
        if train is not None and wait.start >= train.end and wait.end - wait.start > _ANSWERED_US and wait.step is not None:
            seconds[wait.step] = (wait.end - train.start) * 1e-6
    return seconds


def _phase(name: str, role: str, seconds: Sequence[float], devices: int) -> Phase:
    """A phase that took so long in each of the steps."""
    mean = sum(seconds) / len(seconds)
    return Phase(name, role, mean, devices, varies=tuple(each / mean for each in seconds) if mean else (1.0,))


def _server_phases(
    config: Config, spans: Sequence[Span], numbers: Sequence[int], answered: Mapping[int, float]
) -> list[Phase]:
    """What the servers computed in each of the steps of these numbers, by their first ranks; replicas share it.

    The critic's updates take as long as the trainer saw them take, which is more than they were computed for.
    """
    phases = []
    for name in _SERVERS:
        own = [span for span in spans if span.name == name]
        if not own:
            continue
        role, replicas = own[0].role.partition(".")[0], len({span.role for span in own})
        ranks = (config.critic if role == "critic" else config.reward).parallel.ranks * replicas
        if role == "reward" and not has_reward_model(config.reward):
            role, ranks = HOST, 1  # a function needs none of the devices
        spent = {number: sum(span.end - span.start for span in own if span.step == number) for number in numbers}
        seconds = [microseconds * 1e-6 / replicas for microseconds in spent.values()]
        if name == "critic_train":
            seconds = [max(each, answered.get(number, 0.0)) for each, number in zip(seconds, numbers, strict=True)]
        phases.append(_phase(name, role, seconds, ranks))
    return phases


def _units(config: Config) -> dict[str, int]:
    """Ranks of a replica of each role."""
    layouts = {"trainer": config.actor.parallel, "critic": config.critic.parallel, "reward": config.reward.parallel}
    units = {role: layout.tensor * layout.pipeline * layout.context for role, layout in layouts.items()}
    return units | {"generator": config.engine.parallel.tensor}
