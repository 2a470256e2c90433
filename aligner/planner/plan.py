"""What a pipeline's placement comes to, and what would make it faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aligner.planner.model import Pipeline, Placement
from aligner.planner.search import Units, best_split
from aligner.planner.simulation import Forecast, forecast

if TYPE_CHECKING:
    from aligner.planner.measured import Measured


@dataclass(frozen=True)
class Plan:
    """A placement, how it does, and what a change of one thing would do."""

    pipeline: Pipeline
    placement: Placement
    units: Units
    steps: int
    forecast: Forecast
    ideal_s: float
    """A step where no role waited for another: the work of the one that has most"""
    by_staleness: Mapping[int, Forecast]
    """With other bounds on staleness; with 0 alone where the engine is colocated"""
    one_more: Mapping[str, Forecast]
    """By role, with one more unit of it"""

    @property
    def bottleneck(self) -> str:
        """The role, or the host, that is busy for the greatest share of a step."""
        return max(self.forecast.busy_s, key=self.forecast.utilization)

    @property
    def devices(self) -> int:
        """Of all roles together."""
        return sum(self.placement.values())


def make_plan(pipeline: Pipeline, placement: Placement, units: Units, steps: int) -> Plan:
    """Predict the steady state, and its neighbors."""
    bound = pipeline.max_staleness
    bounds = sorted({0, 1, 2, bound, bound + 1}) if pipeline.generator != "trainer" else [0]
    by_staleness = {other: forecast(replace(pipeline, max_staleness=other), placement, steps) for other in bounds}
    return Plan(
        pipeline=pipeline,
        placement=placement,
        units=units,
        steps=steps,
        forecast=by_staleness[bound],
        ideal_s=max(pipeline.work(placement).values()),
        by_staleness=by_staleness,
        one_more={
            role: forecast(pipeline, {**placement, role: placement[role] + units[role]}, steps) for role in pipeline.roles
        },
    )


def fastest_placement(pipeline: Pipeline, units: Units, devices: int) -> Placement:
    """The split of at most so many devices with the fastest step. Raises ConfigError where they are too few."""

    def cost(placement: Placement) -> tuple[float, float]:
        return forecast(pipeline, placement).step_s, sum(pipeline.work(placement).values())

    return best_split(cost, {role: units[role] for role in pipeline.roles}, devices)


@dataclass(frozen=True)
class Comparison:
    """A plan, and what it is to be compared with."""

    plan: Plan
    devices: int | None = None
    """How many the plan's placement is the best split of, where it is one"""
    colocated: Plan | None = None
    """The best split of as many, synchronous with the engine on the trainer's"""
    measured: Measured | None = None
    as_measured: Forecast | None = None
    """What would have been predicted for the run that was measured"""


def compare(
    pipeline: Pipeline,
    placement: Placement,
    units: Units,
    steps: int,
    devices: int | None = None,
    measured: Measured | None = None,
) -> Comparison:
    """Predict for a placement or, given a number of devices, for its best split.

    Raises ConfigError where there are too few devices.
    """
    colocated = None
    if devices is not None:
        placement = fastest_placement(pipeline, units, devices)
        if pipeline.generator != "trainer":
            together = with_colocated_engine(pipeline)
            own = {role: units[role] for role in together.roles}
            colocated = make_plan(together, fastest_placement(together, own, devices), own, steps)
    return Comparison(
        plan=make_plan(pipeline, placement, units, steps),
        devices=devices,
        colocated=colocated,
        measured=measured,
        as_measured=None if measured is None else forecast(measured.pipeline, measured.placement, steps),
    )


def with_colocated_engine(pipeline: Pipeline) -> Pipeline:
    """The same work, synchronous, with the engine on the trainer's devices."""
    phases = (replace(phase, role="trainer") if phase.role == "generator" else phase for phase in pipeline.phases)
    return replace(pipeline, phases=tuple(phases), max_staleness=0)
