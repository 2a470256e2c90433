"""The pipeline, event by event: every batch's phases on the roles that run them, each as soon as
its inputs exist.

A role does its phases in one order, batch by batch, so every start is the latest of some ends,
which nothing later can change: no phase that gets shorter, and no looser bound on staleness, makes
anything later (a timed event graph: Baccelli et al. 1992, "Synchronization and Linearity", chapter
2).
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aligner.planner.phases import (
    BATCHES,
    KINDS,
    PipelineModel,
    Placement,
    fill_slots,
    generated_alone,
    part_of,
)

# batches, and two more for each that may be under way, which pass before what varies is averaged
_SETTLING = 8
_SETTLING_PERIODS = 200
"""After so many times max_staleness + 1 batches the step time is averaged, though starts do not
quite repeat yet."""
_SAME = 1e-9


@dataclass(frozen=True)
class Forecast:
    """What a pipeline comes to once it runs evenly."""

    step_s: float
    run_s: float
    """Of all steps, the first ones included, in which the roles that come later wait for those
    before them"""
    busy_s: dict[str, float]
    """By role, seconds of a step for which it is busy"""
    staleness: float
    """Mean over batches of how many updates were published between admission and training"""

    def utilization(self, role: str) -> float:
        """Share of the time for which a role is busy."""
        return self.busy_s[role] / self.step_s if self.step_s else 0.0


@dataclass
class Simulation:
    """Follows batches from the start of a run: each one's staleness, and how long each role was
    busy so far; deterministic."""

    pipeline: PipelineModel
    placement: Placement
    listener: Callable[[str, str, int, int, float, float], None] | None = None
    """Told the phase, the role, batch and part, begin and end of all that is done."""
    published: list[float] = field(default_factory=lambda: [0.0])
    """When each version of the weights was ready to be taken; the initial ones are at once."""
    staleness: list[int] = field(default_factory=list)
    busy: dict[str, float] = field(init=False)
    history: list[tuple[list[float], dict[str, float]]] = field(default_factory=list)
    """After every batch, the times that later batches depend on, but for the slots of `lengths`;
    and `busy`."""

    def __post_init__(self) -> None:
        pipeline, placement = self.pipeline, self.placement
        self._engine, self._fills = pipeline.generate.role, pipeline.fills_slots
        self._roles = {name: kind.runs[0] for name, kind in KINDS.items()}
        self._roles |= {"load": self._engine} | {
            phase.name: phase.role for phase in pipeline.phases
        }
        self._seconds: dict[str, tuple[float, ...]] = dict.fromkeys(KINDS, (0.0,))
        for phase in pipeline.phases:
            mean = phase.seconds_at(placement.get(phase.role, 1))
            self._seconds[phase.name] = tuple(mean * factor for factor in phase.varies)
        roles = sorted({phase.role for phase in pipeline.phases})
        self.busy, self._free, self._covered = (dict.fromkeys(roles, 0.0) for _ in range(3))
        if (lengths := pipeline.lengths) is not None:
            self._token_s = lengths.token_seconds(pipeline.generate.seconds)
            self._slot_count = pipeline.slots(lengths, placement)
            under_way = lengths.samples * (pipeline.max_staleness + 1)  # at most, by admission
            self._slots = [0.0] * min(self._slot_count, under_way)

    def advance(self) -> None:
        """Follow one more batch: what waits for what."""
        batch, parts = len(self.staleness), range(self.pipeline.micro_batches)
        version = max(0, batch - self.pipeline.max_staleness)  # none older may generate this batch
        samples = self._generate(batch, after=self._load(batch, after=self.published[version]))
        experience = 0.0
        for part in parts:
            for name, after in self._inputs(samples, part).items():
                experience = max(
                    experience, self._run(name, batch, part, after=after, share=len(parts))
                )
        policy = self._run("train", batch, after=experience)
        critic = self._run("critic_train", batch, after=experience)
        # A synchronous step ends with both; otherwise nobody but the critic need wait for its
        # update.
        updated = (
            policy
            if self.pipeline.max_staleness and not self.pipeline.stepwise
            else max(policy, critic)
        )
        weights = self._run("other", batch, after=updated)
        self.published.append(self._run("publish", batch, after=weights))
        clocks = [*self._free.values(), *self.published[-self.pipeline.max_staleness - 1 :]]
        self.history.append((clocks, dict(self.busy)))

    def _inputs(self, samples: Sequence[float], part: int) -> dict[str, float]:
        """By phase that reads samples, when it may begin with a part; the parts' samples are there
        at these times."""
        there = values = whole = samples[part]
        if self.pipeline.stepwise:
            whole = max(samples)
            values = max(whole, self._free["trainer"]) if self.pipeline.max_staleness else there
        return {
            "score": there,
            "values": values,
            "teacher_logprobs": there,
            "logprobs": whole,
            "reference": whole,
        }

    def _run(self, name: str, batch: int, part: int = 0, *, after: float, share: int = 1) -> float:
        """When a phase, or one of `share` equal parts of it, ends; what the pipeline does not have
        takes no time."""
        role = self._roles[name]
        if role not in self._free:
            return after
        start = max(after, self._free[role])
        self._free[role] = end = start + self._of(name, batch) / share
        self._note(name, batch, part, start, end)
        return end

    def _of(self, name: str, batch: int) -> float:
        seconds = self._seconds[name]
        return seconds[batch % len(seconds)]

    def _load(self, batch: int, after: float) -> float:
        """When a batch's samples may be admitted: weights that are published `after` some time have
        been taken."""
        # the initial weights are there
        seconds = self._of("load", batch) if batch > self.pipeline.max_staleness else 0.0
        start = max(after, self._slots[0] if self._fills else self._free[self._engine])
        if self._fills:
            # What is under way keeps its slot for so much longer.
            self._slots = [max(free, start) + seconds for free in self._slots]
        self._free[self._engine] = start + seconds
        self._note("load", batch, 0, start, start + seconds, busy=seconds)
        self.staleness.append(batch - bisect_right(self.published, start) + 1)
        return start + seconds

    def _generate(self, batch: int, after: float) -> list[float]:
        """When the last sample of each part is there. They are admitted in order, each to the slot
        that is free first."""
        lengths, parts = self.pipeline.lengths, self.pipeline.micro_batches
        if lengths is None:
            return [
                self._run("generate", batch, part, after=after, share=parts)
                for part in range(parts)
            ]
        busy: float | None = None
        if self._fills:
            drawn = [self._token_s * tokens for tokens in lengths.drawn[batch % BATCHES]]
            spans = [fill_slots(self._slots, part_of(drawn, part, parts)) for part in range(parts)]
            busy = (
                self._token_s * math.fsum(lengths.drawn[batch % BATCHES]) / self._slot_count / parts
            )
        else:
            alone = generated_alone(lengths, min(self._slot_count, lengths.samples), parts)[
                batch % BATCHES
            ]
            spans = [
                (after + self._token_s * begin, after + self._token_s * end) for begin, end in alone
            ]
            self._free[self._engine] = max(end for _, end in spans)
        for part, (begin, end) in enumerate(spans):
            self._note("generate", batch, part, begin, end, busy)
        return [end for _, end in spans]

    def _note(
        self, name: str, batch: int, part: int, start: float, end: float, busy: float | None = None
    ) -> None:
        """Count how long the role is busy beyond what its earlier starts cover, or `busy`, the mean
        of a generator's slots."""
        role = self._roles[name]
        covered = self._covered[role]
        self.busy[role] += max(0.0, end - max(start, covered)) if busy is None else busy
        self._covered[role] = max(covered, end)
        if self.listener is not None:
            self.listener(name, role, batch, part, start, end)


def forecast(pipeline: PipelineModel, placement: Placement, steps: int = 1) -> Forecast:
    """Step time and utilization in the steady state, and the time of a run of so many steps.

    Exact where all batches take equally long: they are followed until all clocks have moved alike
    over max_staleness + 1 of them, and from then on they always do. Otherwise a mean over batches.
    """
    simulation, period, window = (
        Simulation(pipeline, placement),
        pipeline.max_staleness + 1,
        pipeline.window,
    )
    if window > 1:
        for _ in range(_SETTLING + 2 * period + window):
            simulation.advance()
        period = window
    else:
        for batches in range(1, (_SETTLING_PERIODS + 1) * period + 1):
            simulation.advance()
            if batches >= 2 * period and _moved_alike(
                simulation.history[-1 - period][0], simulation.history[-1][0]
            ):
                break
    # The last `period` batches repeat from here on.
    published, last = simulation.published, len(simulation.published) - 1
    step_s = (published[-1] - published[-1 - period]) / period
    repeats = max(0, -(-(steps - last) // period))
    busy_before = simulation.history[-1 - period][1]
    return Forecast(
        step_s=step_s,
        run_s=published[steps - repeats * period] + repeats * period * step_s,
        busy_s={
            role: (seconds - busy_before[role]) / period
            for role, seconds in simulation.busy.items()
        },
        staleness=sum(simulation.staleness[-period:]) / period,
    )


def _moved_alike(before: Sequence[float], after: Sequence[float]) -> bool:
    moves = [new - old for old, new in zip(before, after, strict=True)]
    return max(moves) - min(moves) <= _SAME * max(after)
