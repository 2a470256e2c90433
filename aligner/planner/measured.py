"""The phases of a run that was measured, from its directory."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aligner.config.compose import load_config
from aligner.errors import ConfigError
from aligner.observability.metrics import read_metrics
from aligner.observability.trace import WAIT, Span, innermost, read_spans
from aligner.paths import RunPaths
from aligner.planner.phases import BATCHES, HOST, Phase, PipelineModel
from aligner.schema import Config
from aligner.schema.reward_sources import has_reward_model

_SERVERS = ("score", "values", "teacher_logprobs", "critic_train")
_NEWEST = 3 * BATCHES  # steps that are counted, at most
_ANSWERED_US = 1000  # who waited for less did not wait: the answer was there
_NO_PART = ("evaluate", "checkpoint")  # what is not part of every step


@dataclass(frozen=True)
class Measured:
    """A run, as the planner sees it."""

    pipeline: PipelineModel
    """The run's own: with its engine where it was, and as far ahead"""
    placement: dict[str, int]
    units: dict[str, int]
    """Ranks of a replica of each role; of the generator too, should it get devices of its own"""
    steps: int
    """Of the whole run, as configured"""
    seed: int
    step_s: float
    """Mean of the measured steps, evaluations and checkpoints left out"""
    counted: int
    """Steps that this is the mean of"""
    publish_s: float
    """Mean seconds of a publish, from when the trainer begins to send until the engine has the
    weights"""
    has_servers: bool
    """Whether a timeline tells what the servers computed, rather than how long the trainer waited
    for them"""


def read_run(directory: Path) -> Measured:
    """Read `config.yaml`, `metrics.jsonl` and, where there is one, the timeline.

    The newest steps count, but not the run's first, which warms up, and with samples drawn ahead
    none in which these are not both drawn and trained on. Raises ConfigError for a directory
    without them, and for runs that have no such pipeline.
    """
    paths = RunPaths(directory)
    config = load_config(paths.config)
    if config.algorithm.trainer != "online":
        raise ConfigError(
            f"--measured {directory}: algorithm.trainer={config.algorithm.trainer} is no pipeline;"
            " allowed: online"
        )
    ahead, records = config.rollout.max_staleness, read_metrics(paths.metrics)
    steps = _counted(
        [record for record in records if record["step"] > 0 and "time/step" in record],
        ahead,
        config.run.steps,
    )
    if not steps:
        raise ConfigError(
            f"--measured {directory}: no training step in metrics.jsonl yet that counts; let the"
            f" run do {2 * ahead + 2}"
        )
    spans = read_spans(paths)
    if ahead and not any(span.role == "generator" for span in spans):
        raise ConfigError(
            f"--measured {directory}: without a timeline it is not known what the generator did"
            " beside training; measure with logging.timeline=true, or rollout.max_staleness=0"
        )
    return _measured(_Recording(config, steps, spans))


def _counted(
    steps: Sequence[Mapping[str, float]], ahead: int, last: int
) -> Sequence[Mapping[str, float]]:
    """The newest steps but the first; with samples drawn `ahead`, those that draw one batch and
    train on another, if possible without evaluations, during which the generator draws on.
    """
    if not ahead:
        return (steps[1:] or steps)[-_NEWEST:]
    both = [record for record in steps if ahead < record["step"] <= last - ahead]
    return ([record for record in both if "time/evaluate" not in record] or both)[-_NEWEST:]


class _Recording:
    """The steps of a run that count, and what its processes did."""

    def __init__(
        self, config: Config, steps: Sequence[Mapping[str, float]], spans: Sequence[Span]
    ) -> None:
        self.config, self._steps = config, steps
        self.numbers = [int(record["step"]) for record in steps]
        self.trainer = [span for span in spans if span.role == "trainer" and span.rank == 0]
        evaluations = [span for span in self.trainer if span.name == "evaluate"]
        work = [span for span in spans if span.name in _SERVERS and span.rank == 0]
        # A generator that takes weights while it draws does not draw then.
        work += innermost(span for span in spans if span.role == "generator" and span.rank == 0)
        self._work = [
            span
            for span in work
            if not any(during.start <= span.start < during.end for during in evaluations)
        ]

    def timed(self, phase: str) -> list[float]:
        """Seconds of a phase in each step, as the trainer timed it."""
        return [record.get(f"time/{phase}", 0.0) for record in self._steps]

    def work(self, name: str) -> list[Span]:
        """What the servers' first ranks did for training, under this name."""
        return [span for span in self._work if span.name == name]

    def worked(self, name: str) -> list[float]:
        """Its seconds in each step."""
        spans = self.work(name)
        return [
            sum(span.end - span.start for span in spans if span.step == number) * 1e-6
            for number in self.numbers
        ]


def _measured(run: _Recording) -> Measured:
    config = run.config
    ranks, ahead = config.actor.parallel.ranks, config.rollout.max_staleness
    engine = _engine_ahead(run) if ahead else _engine_in_turn(run)
    answered = _answered(run)
    served = [
        _server_phase(run, name, answered)
        for name in _SERVERS
        if any(s.step in run.numbers for s in run.work(name))
    ]
    trainer = {
        "logprobs": run.timed("logprobs"),
        "train": run.timed("train"),
        "publish": engine.publish,
    }
    beside = [*map(run.timed, _NO_PART), *trainer.values(), *engine.awaited]
    # without a timeline it is not known what the trainer waited for: as good as work of its own
    if served:
        beside.append(run.timed("server_wait"))
    trainer["other"] = [
        max(0.0, step - sum(parts)) for step, *parts in zip(run.timed("step"), *beside, strict=True)
    ]
    role = "trainer" if config.engine.placement == "colocated" else "generator"
    phases = [
        *(
            _phase(name, role, each, config.engine.parallel.ranks)
            for name, each in engine.phases.items()
        ),
        *(_phase(name, "trainer", each, ranks) for name, each in trainer.items()),
        *served,
    ]
    whole = [
        step - sum(parts)
        for step, *parts in zip(run.timed("step"), *map(run.timed, _NO_PART), strict=True)
    ]
    parts = config.rollout.micro_batches
    models = {
        "trainer": config.actor,
        "critic": config.critic,
        "reward": config.reward,
        "teacher": config.teacher,
    }
    layouts = {role: model.parallel for role, model in models.items()}
    units = {
        role: layout.tensor * layout.pipeline * layout.context for role, layout in layouts.items()
    }
    units |= {"generator": config.engine.parallel.tensor}
    return Measured(
        pipeline=PipelineModel(
            tuple(phases), micro_batches=parts, max_staleness=ahead, stepwise=True
        ),
        placement={"trainer": ranks}
        | {phase.role: phase.devices for phase in phases if phase.role != HOST},
        units=units,
        steps=config.run.steps,
        seed=config.seed,
        step_s=sum(whole) / len(whole),
        counted=len(whole),
        publish_s=sum(
            phase.seconds
            for phase in phases
            if phase.name == "load" or (phase.name == "publish" and not ahead)
        ),
        has_servers=bool(served),
    )


@dataclass(frozen=True)
class _Engine:
    """Seconds of the engine's work for each batch, and of the trainer's towards it in each step."""

    phases: Mapping[str, Sequence[float]]
    """The engine's own, the way of the trainer's requests included"""
    publish: Sequence[float]
    """The trainer's, without the time that the engine takes the weights for"""
    awaited: Sequence[Sequence[float]]
    """What of the trainer's steps is no work of its own"""


def _engine_in_turn(run: _Recording) -> _Engine:
    """Where the trainer waits for all that the engine does."""
    generate, load = run.timed("generate"), run.worked("receive")
    publish = [
        max(0.0, whole - taken) for whole, taken in zip(run.timed("reshard"), load, strict=True)
    ]
    return _Engine(
        {"generate": generate} | ({"load": load} if any(load) else {}), publish, [generate, load]
    )


def _engine_ahead(run: _Recording) -> _Engine:
    """Where samples are drawn ahead of the steps."""
    load, generate = run.worked("receive"), run.worked("generate")
    if run.config.engine.in_flight == "finish" and (cycles := _generator_cycles(run)):
        load, generate = (list(each) for each in zip(*cycles, strict=True))
    # Each step's work was for the batch that so many steps later trained on; of the last steps, for
    # the first ones.
    place = len(load) - run.config.rollout.max_staleness % len(load)
    phases = {
        "load": [*load[place:], *load[:place]],
        "generate": [*generate[place:], *generate[:place]],
    }
    return _Engine(phases, publish=run.timed("snapshot"), awaited=[run.timed("generate")])


def _generator_cycles(run: _Recording) -> list[tuple[float, float]]:
    """Seconds in which a thread of the trainer's rank 0 had a version served, and then the batch
    drawn that it admits.

    The thread goes on with the next version as soon as that is there. Where it waited for it, the
    batch counts until the generator had drawn the last of it, for when the thread had it is not
    known.
    """
    offers = [span.end for span in run.trainer if span.name == "snapshot"]
    drawn, cycles = run.work("generate"), []
    for served, following in itertools.pairwise(
        span for span in run.trainer if span.name == "publish" and span.thread
    ):
        ends = [span.end for span in drawn if served.end <= span.start < following.start]
        if not ends or served.step not in run.numbers:
            continue
        awaited = any(ends[-1] < offered <= following.start for offered in offers)
        there = ends[-1] if awaited else following.start
        cycles.append(((served.end - served.start) * 1e-6, (there - served.end) * 1e-6))
    return cycles


def _answered(run: _Recording) -> dict[int, float]:
    """By step, seconds from the request for the critic's updates to their answer, where the trainer
    waited for it."""
    trained = {span.step: span for span in run.trainer if span.name == "train"}
    seconds = {}
    for wait in run.trainer:
        train = trained.get(wait.step) if wait.name == WAIT else None
        if (
            train is not None
            and wait.start >= train.end
            and wait.end - wait.start > _ANSWERED_US
            and wait.step is not None
        ):
            seconds[wait.step] = (wait.end - train.start) * 1e-6
    return seconds


def _phase(name: str, role: str, seconds: Sequence[float], devices: int) -> Phase:
    """A phase that took so long in each of the steps."""
    mean = sum(seconds) / len(seconds)
    return Phase(
        name, role, mean, devices, varies=tuple(each / mean for each in seconds) if mean else (1.0,)
    )


def _server_phase(run: _Recording, name: str, answered: Mapping[int, float]) -> Phase:
    """What a server's first ranks computed in each step, shared by replicas; of the critic's
    updates what the trainer saw."""
    own = [span.role for span in run.work(name) if span.step in run.numbers]
    role, replicas, config = own[0].partition(".")[0], len(set(own)), run.config
    models = {"critic": config.critic, "reward": config.reward, "teacher": config.teacher}
    ranks = models[role].parallel.ranks * replicas
    if role == "reward" and not has_reward_model(config.reward):
        role, ranks = HOST, 1  # a function needs none of the devices
    seconds = [each / replicas for each in run.worked(name)]
    if name == "critic_train":
        seconds = [
            max(each, answered.get(number, 0.0))
            for each, number in zip(seconds, run.numbers, strict=True)
        ]
    return _phase(name, role, seconds, ranks)
