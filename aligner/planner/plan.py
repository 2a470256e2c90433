"""What a placement of devices comes to, and what would make it faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aligner.planner.phases import PipelineModel, Placement
from aligner.planner.search import Units, best_split
from aligner.planner.simulation import Forecast, forecast

if TYPE_CHECKING:
    from aligner.planner.measured import Measured


@dataclass(frozen=True)
class PlanRequest:
    """What is to be predicted."""

    pipeline: PipelineModel
    placement: Placement
    """Of the roles that the pipeline has, as are the units"""
    units: Units
    steps: int
    devices: int | None
    """How many to find the best split of"""
    measured: Measured | None


@dataclass(frozen=True)
class Plan:
    """A placement, how it does, what a change of one thing would do, and what it is to be compared with."""

    request: PlanRequest
    placement: Placement
    forecast: Forecast
    ideal_s: float
    """A step where no role waited for another: the work of the one that has most"""
    by_staleness: Mapping[int, Forecast]
    """With other bounds on staleness; with 0 alone where the engine is colocated"""
    one_more: Mapping[str, Forecast]
    """By role, with one more unit of it"""
    colocated: tuple[Placement, Forecast] | None
    """Of a best split: that of as many devices, synchronous with the engine on the trainer's"""
    as_measured: Forecast | None
    """What would have been predicted for the run that was measured"""

    @property
    def bottleneck(self) -> str:
        """The role, or the host, that is busy for the greatest share of a step."""
        return max(self.forecast.busy_s, key=self.forecast.utilization)

    @property
    def devices(self) -> int:
        """Of all roles together."""
        return sum(self.placement.values())


def make_plan(request: PlanRequest) -> Plan:
    """Predict the steady state for a placement or, given a number of devices, for its best split; and its neighbors.

    Raises ConfigError where there are too few devices.
    """
    pipeline, placement, steps, measured = request.pipeline, request.placement, request.steps, request.measured
    bound, is_colocated, colocated = pipeline.max_staleness, pipeline.generate.role == "trainer", None
    if request.devices is not None:
        placement = fastest_placement(pipeline, request.units, request.devices)
        if not is_colocated:
            together = _with_colocated_engine(pipeline)
            split = fastest_placement(together, request.units, request.devices)
            colocated = split, forecast(together, split, steps)
    bounds = [0] if is_colocated else sorted({0, 1, 2, bound, bound + 1})
    by_staleness = {other: forecast(replace(pipeline, max_staleness=other), placement, steps) for other in bounds}
    more = {role: {**placement, role: placement[role] + request.units[role]} for role in pipeline.roles}
    return Plan(
        request=request,
        placement=placement,
        forecast=by_staleness[bound],
        ideal_s=max(pipeline.work(placement).values()),
        by_staleness=by_staleness,
        one_more={role: forecast(pipeline, enlarged, steps) for role, enlarged in more.items()},
        colocated=colocated,
        as_measured=None if measured is None else forecast(measured.pipeline, measured.placement, steps),
    )


def fastest_placement(pipeline: PipelineModel, units: Units, devices: int) -> Placement:
    """The split of at most so many devices with the fastest step. Raises ConfigError where they are too few."""

    def cost(placement: Placement) -> tuple[float, float]:
        return forecast(pipeline, placement).step_s, sum(pipeline.work(placement).values())

    return best_split(cost, {role: units[role] for role in pipeline.roles}, devices)


def _with_colocated_engine(pipeline: PipelineModel) -> PipelineModel:
    """The same work, synchronous, with the engine on the trainer's devices."""
    phases = (replace(phase, role="trainer") if phase.role == "generator" else phase for phase in pipeline.phases)
    return replace(pipeline, phases=tuple(phases), max_staleness=0)
