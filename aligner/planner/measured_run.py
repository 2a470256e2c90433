"""Measurement of a run: the seconds of each phase, and how long each role worked and waited."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from aligner.config.compose import load_config
from aligner.errors import ConfigError
from aligner.observability.metrics import read_metrics
from aligner.observability.trace import WAIT, Span, flatten_spans, read_spans
from aligner.paths import RunPaths
from aligner.placement.roles import get_role
from aligner.planner.pipeline_model import DEVICE_ROLES, HOST, Phase, PipelineModel
from aligner.schema import Config
from aligner.schema.reward_sources import has_reward_model

_SERVER_PHASES = ("score", "values", "teacher_logprobs", "critic_train")
# Maximum number of steps that are measured.
_NEWEST_STEPS = 48

# Spans that are not part of every step.
_EXCLUDED = ("evaluate", "checkpoint")

# A wait shorter than this number of microseconds means that the response had already arrived.
_ANSWERED_US = 1000

REQUESTS = "trainer requests"
"""Name of the event that an idle server waits for."""

# Name of the role in a wait during which no role worked.
_UNKNOWN = "unknown"

Interval = tuple[int, int]
"""Start and end, in microseconds since the epoch."""


@dataclass(frozen=True)
class RoleUsage:
    """Mean shares of a step that a role's ranks worked and waited."""

    role: str
    devices: int
    """Number of devices; 0 for a reward function, which runs on the CPU."""
    busy: float
    """Share of a step that the role worked."""
    waited_for: Mapping[str, float]
    """Share of a step by the role or event waited for. With `busy`, the shares add up to 1."""

    @property
    def waited(self) -> float:
        """Share of a step that the role waited."""
        return sum(self.waited_for.values())


@dataclass(frozen=True)
class MeasuredRun:
    """Results that the planner reads from a run directory."""

    pipeline: PipelineModel
    placement: dict[str, int]
    """Number of devices of each role that uses devices."""
    units: dict[str, int]
    """Devices of one model replica of each role, the smallest change of its placement."""
    usage: tuple[RoleUsage, ...]
    step_s: float
    """Mean seconds of a measured step, without evaluations and checkpoints."""
    measured_steps: int
    """Number of measured steps."""

    @property
    def phase_shares(self) -> dict[str, float]:
        """Share of a step that each role's phases take, the transport of requests included.

        The transport counts because the trainer waits for it as well as for the work.
        """
        shares: dict[str, float] = defaultdict(float)
        for phase in self.pipeline.phases:
            role = "reward" if phase.role == HOST else phase.role
            shares[role] += phase.mean_seconds / self.step_s
        return dict(shares)

    @property
    def limiting_role(self) -> str:
        """The role whose phases take the largest share of a step."""
        shares = self.phase_shares
        return max(shares, key=shares.__getitem__)


def read_measured_run(directory: Path) -> MeasuredRun:
    """Read the configuration, metrics and timeline of a run of an online algorithm.

    The newest 48 steps are measured. The first step is left out because it warms up. With
    `rollout.max_staleness` > 0, steps that do not both generate one batch and train on another are
    left out too, and so are steps with an evaluation, during which the generator continues.

    Raises:
        ConfigError: The directory has no configuration, no timeline or too few steps, or its
            algorithm is not online.
    """
    paths = RunPaths(directory)
    config = load_config(paths.config)
    if config.algorithm.trainer != "online":
        raise ConfigError(
            f"{directory}: algorithm.trainer={config.algorithm.trainer} has no pipeline of roles;"
            " aligner plan requires a run with algorithm.trainer=online"
        )
    spans = read_spans(paths)
    starts = _step_starts(spans)
    if not starts:
        raise ConfigError(
            f"{directory}: the run has no timeline, which records when each role worked; set"
            " logging.timeline=true and repeat the run"
        )

    # The oldest step of the timeline is either the run's first, or cut off at its beginning.
    timed = [
        record
        for record in read_metrics(paths.metrics)
        if "time/step" in record and record["step"] in starts and record["step"] > min(starts)
    ]
    steps = _select_steps(timed, config.rollout.max_staleness, config.run.steps)
    if not steps:
        required = 2 * config.rollout.max_staleness + 2
        raise ConfigError(
            f"{directory}: no step of the run can be measured yet; the run must complete at least"
            f" {required} steps"
        )
    return _measure(_Recording(config, steps, spans, starts))


def _step_starts(spans: Sequence[Span]) -> dict[int, int]:
    """Return when the trainer's rank 0 began each training step, in microseconds."""
    starts: dict[int, int] = {}
    for span in spans:
        is_main_thread = span.role == "trainer" and span.rank == 0 and not span.thread
        if is_main_thread and span.step is not None and span.step > 0:
            starts[span.step] = min(span.start, starts.get(span.step, span.start))
    return starts


def _select_steps(
    records: Sequence[Mapping[str, float]], max_staleness: int, last_step: int
) -> Sequence[Mapping[str, float]]:
    """Select the newest steps that are typical of the run."""
    if max_staleness == 0:
        return records[-_NEWEST_STEPS:]

    # The first steps train on nothing that was generated before them; the last ones generate less.
    typical = [
        record for record in records if max_staleness < record["step"] <= last_step - max_staleness
    ]
    without_evaluation = [record for record in typical if "time/evaluate" not in record]
    return (without_evaluation or typical)[-_NEWEST_STEPS:]


class _Recording:
    """The measured steps of a run, and the spans of its processes."""

    def __init__(
        self,
        config: Config,
        steps: Sequence[Mapping[str, float]],
        spans: Sequence[Span],
        starts: Mapping[int, int],
    ) -> None:
        """Select the spans that the measurement needs.

        Args:
            config: The run's configuration.
            steps: Metrics of the measured steps.
            spans: All spans of the timeline.
            starts: Start of each step, in microseconds since the epoch.
        """
        self.config = config
        self.spans = spans
        self.step_numbers = [int(record["step"]) for record in steps]
        self.trainer = [span for span in spans if span.role == "trainer" and span.rank == 0]
        self._steps = steps
        self._starts = starts

        # Rank 0 represents its server group, because all ranks of a group work in lockstep.
        server_spans = [span for span in spans if span.name in _SERVER_PHASES and span.rank == 0]
        # Weights that arrive during generation interrupt it: count that time as `receive` alone.
        server_spans += flatten_spans(
            span for span in spans if span.role == "generator" and span.rank == 0
        )
        evaluations = [span for span in self.trainer if span.name == "evaluate"]
        self._server_spans = [
            span
            for span in server_spans
            if not any(
                evaluation.start <= span.start < evaluation.end for evaluation in evaluations
            )
        ]

    def trainer_seconds(self, phase: str) -> list[float]:
        """Return the trainer's seconds in a phase of each step, as `metrics.jsonl` has them."""
        return [record.get(f"time/{phase}", 0.0) for record in self._steps]

    def server_spans(self, name: str) -> list[Span]:
        """Return the servers' spans of this name, evaluations left out."""
        return [span for span in self._server_spans if span.name == name]

    def server_seconds(self, name: str) -> list[float]:
        """Return the servers' seconds in spans of this name, for each step."""
        microseconds: dict[int | None, int] = defaultdict(int)
        for span in self.server_spans(name):
            microseconds[span.step] += span.end - span.start
        return [microseconds[number] * 1e-6 for number in self.step_numbers]

    def windows(self) -> list[Interval]:
        """Return the intervals of the measured steps, without evaluations and checkpoints."""
        excluded = _merge(
            (span.start, span.end)
            for span in self.trainer
            if span.name in _EXCLUDED and not span.thread
        )
        windows: list[Interval] = []
        for number in self.step_numbers:
            start = self._starts[number]
            if number + 1 in self._starts:
                end = self._starts[number + 1]
            else:
                end = max(span.end for span in self.trainer if span.step == number)
            windows += _subtract((start, end), excluded)
        return windows


def _measure(run: _Recording) -> MeasuredRun:
    """Measure all phases of the run, and the usage of its roles."""
    config = run.config
    is_colocated = config.engine.placement == "colocated"
    engine_role = "trainer" if is_colocated else "generator"
    engine_ranks = config.engine.parallel.ranks
    trainer_ranks = config.actor.parallel.ranks

    is_asynchronous = config.rollout.max_staleness > 0
    engine = _asynchronous_engine(run) if is_asynchronous else _synchronous_engine(run)
    servers = [_server_phase(run, name) for name in _SERVER_PHASES if _is_used(run, name)]

    trainer_seconds = {
        "logprobs": run.trainer_seconds("logprobs"),
        "train": run.trainer_seconds("train"),
        "publish": engine.publish,
    }
    waited = [*engine.trainer_waits, run.trainer_seconds("server_wait")]
    step_seconds = _without(
        run.trainer_seconds("step"), [run.trainer_seconds(name) for name in _EXCLUDED]
    )
    trainer_seconds["other"] = _without(step_seconds, [*trainer_seconds.values(), *waited])

    phases = [
        *(
            _phase(name, engine_role, seconds, engine_ranks)
            for name, seconds in engine.phases.items()
        ),
        *(
            _phase(name, "trainer", seconds, trainer_ranks)
            for name, seconds in trainer_seconds.items()
        ),
        *servers,
    ]
    devices = {phase.role: phase.devices for phase in phases if phase.role != HOST}
    placement = {role: devices[role] for role in DEVICE_ROLES if role in devices}
    units = _placement_units(config)
    return MeasuredRun(
        pipeline=PipelineModel(
            phases=tuple(phases),
            micro_batches=config.rollout.micro_batches,
            max_staleness=config.rollout.max_staleness,
        ),
        placement=placement,
        units={role: units[role] for role in placement},
        usage=_measure_usage(run, placement),
        step_s=sum(step_seconds) / len(step_seconds),
        measured_steps=len(step_seconds),
    )


def _placement_units(config: Config) -> dict[str, int]:
    """Return the devices of one model replica of each role."""
    models = {
        "trainer": config.actor,
        "critic": config.critic,
        "reward": config.reward,
        "teacher": config.teacher,
    }
    units = {"generator": config.engine.parallel.replica_ranks}
    for role, model in models.items():
        layout = model.parallel
        units[role] = layout.tensor * layout.pipeline * layout.context
    if config.engine.placement == "colocated":
        # The engine spans the trainer's ranks, which must hold whole replicas of both layouts.
        units["trainer"] = math.lcm(units["trainer"], units["generator"])
    return units


@dataclass(frozen=True)
class _EngineTimes:
    """Seconds of the engine's phases, and of the trainer's phases that concern the engine."""

    phases: Mapping[str, Sequence[float]]
    """The engine's `generate` and `load` for each batch, including the transport of requests."""
    publish: Sequence[float]
    """The trainer's time for the weight sync in each step, without the engine's `load`."""
    trainer_waits: Sequence[Sequence[float]]
    """Parts of the trainer's steps in which the engine works and the trainer waits."""


def _synchronous_engine(run: _Recording) -> _EngineTimes:
    """Measure an engine whose work the trainer waits for."""
    generate = run.trainer_seconds("generate")
    load = run.server_seconds("receive")
    phases = {"generate": generate}
    if any(load):
        phases["load"] = load
    publish = _without(run.trainer_seconds("reshard"), [load])
    return _EngineTimes(phases, publish, trainer_waits=[generate, load])


def _asynchronous_engine(run: _Recording) -> _EngineTimes:
    """Measure an engine that generates while the trainer trains on an earlier batch."""
    load = run.server_seconds("receive")
    generate = run.server_seconds("generate")
    if run.config.engine.in_flight == "finish":
        cycles = _generator_cycles(run)
        if cycles:
            load = [load_s for load_s, _ in cycles]
            generate = [generate_s for _, generate_s in cycles]

    # A batch is generated max_staleness steps before it is trained on: rotate the durations so that
    # each one is at the step that trains on its batch.
    offset = len(load) - run.config.rollout.max_staleness % len(load)
    phases = {
        "load": [*load[offset:], *load[:offset]],
        "generate": [*generate[offset:], *generate[:offset]],
    }
    return _EngineTimes(
        phases,
        publish=run.trainer_seconds("snapshot"),
        trainer_waits=[run.trainer_seconds("generate")],
    )


def _generator_cycles(run: _Recording) -> list[tuple[float, float]]:
    """Return, per weight version, the seconds of its transfer and of generating its batch.

    A thread of the trainer's rank 0 sends each version and then requests the batch. It sends the
    next version as soon as the batch has arrived and that version exists. If the thread had to wait
    for the version, the batch ends with the generator's last span instead.
    """
    snapshot_ends = [span.end for span in run.trainer if span.name == "snapshot"]
    generate_spans = run.server_spans("generate")
    transfers = [span for span in run.trainer if span.name == "publish" and span.thread]

    cycles = []
    for transfer, next_transfer in itertools.pairwise(transfers):
        ends = [
            span.end for span in generate_spans if transfer.end <= span.start < next_transfer.start
        ]
        if not ends or transfer.step not in run.step_numbers:
            continue
        waited_for_version = any(
            ends[-1] < snapshot_end <= next_transfer.start for snapshot_end in snapshot_ends
        )
        generated_at = ends[-1] if waited_for_version else next_transfer.start
        load_s = (transfer.end - transfer.start) * 1e-6
        generate_s = (generated_at - transfer.end) * 1e-6
        cycles.append((load_s, generate_s))
    return cycles


def _is_used(run: _Recording, name: str) -> bool:
    """Return whether a server ran this phase in a measured step."""
    return any(span.step in run.step_numbers for span in run.server_spans(name))


def _server_phase(run: _Recording, name: str) -> Phase:
    """Measure a phase that one or several replicas of a server share."""
    config = run.config
    groups = {span.role for span in run.server_spans(name) if span.step in run.step_numbers}
    role = get_role(next(iter(groups)))
    models = {"critic": config.critic, "reward": config.reward, "teacher": config.teacher}
    devices = models[role].parallel.ranks * len(groups)
    if role == "reward" and not has_reward_model(config.reward):
        role = HOST
        devices = 1

    seconds = [duration / len(groups) for duration in run.server_seconds(name)]
    if name == "critic_train":
        # The trainer also waits for the transport of the request and of the answer.
        response_seconds = _critic_response_seconds(run)
        seconds = [
            max(duration, response_seconds.get(number, 0.0))
            for duration, number in zip(seconds, run.step_numbers, strict=True)
        ]
    return _phase(name, role, seconds, devices)


def _critic_response_seconds(run: _Recording) -> dict[int, float]:
    """Return, for each step that waited for the critic's update, the seconds from its request."""
    train_spans = {span.step: span for span in run.trainer if span.name == "train"}
    seconds = {}
    for span in run.trainer:
        train = train_spans.get(span.step)
        if span.name != WAIT or span.step is None or train is None:
            continue
        is_after_training = span.start >= train.end
        if is_after_training and span.end - span.start > _ANSWERED_US:
            seconds[span.step] = (span.end - train.start) * 1e-6
    return seconds


def _phase(name: str, role: str, seconds: Iterable[float], devices: int) -> Phase:
    """Return a phase with the given durations."""
    return Phase(name, role, tuple(seconds), devices)


def _without(totals: Sequence[float], parts: Sequence[Sequence[float]]) -> list[float]:
    """Subtract parts from each total; clock differences never make a result negative."""
    return [
        max(0.0, total - sum(step_parts)) for total, *step_parts in zip(totals, *parts, strict=True)
    ]


def _measure_usage(run: _Recording, placement: Mapping[str, int]) -> tuple[RoleUsage, ...]:
    """Measure how long each role worked and waited during the measured steps."""
    windows = run.windows()
    by_role: dict[str, dict[tuple[str, int], list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in run.spans:
        if span.name not in _EXCLUDED:
            by_role[get_role(span.role)][span.role, span.rank].append(span)

    work = {
        role: _merge((span.start, span.end) for spans in ranks.values() for span in spans)
        for role, ranks in by_role.items()
        if role != "trainer"
    }
    # Threads of the trainer's processes send the requests to environments.
    work["environments"] = _merge(
        (span.start, span.end) for span in run.trainer if span.name == "environments"
    )

    usage = []
    for role in DEVICE_ROLES:
        if role not in by_role:
            continue
        ranks = list(by_role[role].values())
        if role == "trainer":
            waited_for = _mean_shares([_trainer_waits(spans, windows, work) for spans in ranks])
        else:
            busy = [_busy_share(spans, windows) for spans in ranks]
            waited_for = {REQUESTS: 1.0 - sum(busy) / len(busy)}
        usage.append(
            RoleUsage(
                role,
                devices=placement.get(role, 0),
                busy=1.0 - sum(waited_for.values()),
                waited_for=waited_for,
            )
        )
    return tuple(usage)


def _busy_share(spans: Iterable[Span], windows: Sequence[Interval]) -> float:
    """Return the share of the windows that is covered by a server rank's spans."""
    busy = _merge((span.start, span.end) for span in spans)
    return _overlap(busy, windows) / _length(windows)


def _trainer_waits(
    spans: Iterable[Span], windows: Sequence[Interval], work: Mapping[str, Sequence[Interval]]
) -> dict[str, float]:
    """Return the shares of the windows that a trainer rank waited, by the role waited for.

    A wait is attributed to the role that worked longest while it lasted.
    """
    microseconds: dict[str, int] = defaultdict(int)
    for span in spans:
        if span.name != WAIT or span.thread:
            continue
        wait = [(span.start, span.end)]
        overlaps = {role: _overlap(wait, intervals) for role, intervals in work.items()}
        role = max(overlaps, key=overlaps.__getitem__)
        if overlaps[role] == 0:
            role = _UNKNOWN
        microseconds[role] += _overlap(wait, windows)
    return {
        role: duration / _length(windows) for role, duration in microseconds.items() if duration
    }


def _mean_shares(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over ranks of shares by name, the largest first."""
    names = {name for rank_shares in shares for name in rank_shares}
    mean_shares = {
        name: sum(rank_shares.get(name, 0.0) for rank_shares in shares) / len(shares)
        for name in names
    }
    return dict(sorted(mean_shares.items(), key=lambda item: (-item[1], item[0])))


def _merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint ones in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _subtract(interval: Interval, excluded: Sequence[Interval]) -> list[Interval]:
    """Return the parts of an interval outside of the excluded ones, which are disjoint."""
    start, end = interval
    parts = []
    for excluded_start, excluded_end in excluded:
        if excluded_end <= start or excluded_start >= end:
            continue
        if excluded_start > start:
            parts.append((start, excluded_start))
        start = max(start, excluded_end)
    if start < end:
        parts.append((start, end))
    return parts


def _overlap(intervals: Iterable[Interval], other_intervals: Sequence[Interval]) -> int:
    """Return the microseconds that two lists of disjoint intervals share.

    The second list must be in order.
    """
    microseconds = 0
    for start, end in intervals:
        # Skip the intervals that end before this one starts: a timeline has thousands.
        index = bisect.bisect_right(other_intervals, start, key=itemgetter(1))
        for other_start, other_end in itertools.islice(other_intervals, index, None):
            if other_start >= end:
                break
            microseconds += min(end, other_end) - max(start, other_start)
    return microseconds


def _length(intervals: Iterable[Interval]) -> int:
    """Return the total microseconds of intervals."""
    return sum(end - start for start, end in intervals)
