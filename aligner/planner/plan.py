"""The best split of devices between roles, what a placement of them comes to, and what would make
it faster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aligner.errors import ConfigError
from aligner.planner.phases import PipelineModel, Placement
from aligner.planner.simulation import Forecast, forecast

if TYPE_CHECKING:
    from aligner.planner.measured import Measured
    from aligner.planner.publish_cost import PublishCost

Units = Mapping[str, int]
"""Devices by role that come together only, such as its tensor- and pipeline-parallel ranks."""
Cost = Callable[[Placement], tuple[float, float]]
"""What is to be least: the step's seconds and, among placements that are equal in it, the roles'
summed work."""
_Counts = tuple[int, ...]
"""Units of every role but the one that takes the rest"""
_AS_FAST = 1 + 1e-9
_GRID = 12  # places along each role's share at which a search that cannot try all splits begins
_STARTS = 2


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
    publish: PublishCost | None = None
    """Of a configuration, which does not depend on the placement"""


@dataclass(frozen=True)
class Plan:
    """A placement, how it does, what a change of one thing would do, and what it is to be compared
    with."""

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
    """Predict the steady state for a placement or the best split of devices. Raises ConfigError
    where there are too few."""
    pipeline, placement, steps, measured = (
        request.pipeline,
        request.placement,
        request.steps,
        request.measured,
    )
    bound, is_colocated, colocated = (
        pipeline.max_staleness,
        pipeline.generate.role == "trainer",
        None,
    )
    if request.devices is not None:
        placement = fastest_placement(pipeline, request.units, request.devices)
        if not is_colocated:
            moved = (
                replace(phase, role="trainer") if phase.role == "generator" else phase
                for phase in pipeline.phases
            )
            together = replace(pipeline, phases=tuple(moved), max_staleness=0)
            split = fastest_placement(together, request.units, request.devices)
            colocated = split, forecast(together, split, steps)
    bounds = [0] if is_colocated else sorted({0, 1, 2, bound, bound + 1})
    by_staleness = {
        other: forecast(replace(pipeline, max_staleness=other), placement, steps)
        for other in bounds
    }
    more = {
        role: {**placement, role: placement[role] + request.units[role]} for role in pipeline.roles
    }
    return Plan(
        request=request,
        placement=placement,
        forecast=by_staleness[bound],
        ideal_s=max(pipeline.work(placement).values()),
        by_staleness=by_staleness,
        one_more={role: forecast(pipeline, enlarged, steps) for role, enlarged in more.items()},
        colocated=colocated,
        as_measured=(
            None if measured is None else forecast(measured.pipeline, measured.placement, steps)
        ),
    )


def fastest_placement(pipeline: PipelineModel, units: Units, devices: int) -> Placement:
    """The split of at most so many devices at which a step is fastest, of the fewest with which it
    is as fast.

    Raises ConfigError where not every role gets a unit.
    """

    def cost(placement: Placement) -> tuple[float, float]:
        return forecast(pipeline, placement).step_s, sum(pipeline.work(placement).values())

    units = {role: units[role] for role in pipeline.roles}
    best = _without_spare(cost, fastest_split(cost, units, devices), units)
    if devices - sum(best.values()) <= max(units.values()):
        return best
    # There are plenty: what is enough together need not be what is enough for one role after the
    # other.
    few, enough, limit = sum(units.values()) - 1, sum(best.values()), cost(best)[0] * _AS_FAST
    while enough - few > 1:
        middle = (few + enough) // 2
        split = fastest_split(cost, units, middle, near=best)
        if cost(split)[0] <= limit:
            best, enough = split, middle
        else:
            few = middle
    return _without_spare(cost, best, units)


def fastest_split(
    cost: Cost, units: Units, devices: int, *, near: Placement | None = None, exhaustive: int = 500
) -> dict[str, int]:
    """The split of at most so many devices at which a step is fastest. Raises ConfigError where not
    every role gets a unit.

    All splits are tried where there are at most `exhaustive`. Otherwise a coarse grid is, or a good
    placement's proportions, and finer and finer ones around the best: but for whole devices a
    step's time is convex, so the result is hardly slower.
    """
    check_devices(units, devices)
    # What the others leave goes to the role with the smallest unit, which wastes least of it.
    *free, rest = sorted(units, key=lambda role: -units[role])
    known: dict[_Counts, tuple[float, float]] = {}

    def split(counts: _Counts) -> dict[str, int]:
        placement = {role: count * units[role] for role, count in zip(free, counts, strict=True)}
        placement[rest] = (devices - sum(placement.values())) // units[rest] * units[rest]
        return {role: placement[role] for role in units}

    def cost_of(counts: _Counts) -> tuple[float, float]:
        if counts not in known:
            placement = split(counts)
            known[counts] = cost(placement) if min(placement.values()) > 0 else (math.inf, 0.0)
        return known[counts]

    largest = [(devices - sum(units.values())) // units[role] + 1 for role in free]
    stride = [-(-most // _GRID) if math.prod(largest) > exhaustive else 1 for most in largest]
    if near is None or max(stride, default=1) == 1:
        grid = itertools.product(
            *(range(1, most + 1, by) for most, by in zip(largest, stride, strict=True))
        )
        best = sorted(grid, key=cost_of)[:_STARTS]
    else:
        scaled = proportional_split(near, units, devices)
        best = [tuple(scaled[role] // units[role] for role in free)]
    while max(stride, default=1) > 1:
        stride = [-(-by // 2) for by in stride]
        reach = 1 if max(stride) > 1 else 2
        best = [_descend(cost_of, start, stride, reach) for start in best]
    return split(min(best, key=cost_of))


def check_devices(units: Units, devices: int) -> None:
    """Raise ConfigError unless every role gets a unit."""
    if devices < sum(units.values()):
        needed = " + ".join(f"{role} {size}" for role, size in units.items())
        raise ConfigError(
            f"--devices {devices}: too few, at least {sum(units.values())} are needed ({needed})"
        )


def proportional_split(placement: Placement, units: Units, devices: int) -> dict[str, int]:
    """At most so many devices in the proportions of a placement, whole units and one for every role
    (largest remainders)."""
    check_devices(units, devices)
    share = {
        role: devices * placement[role] / sum(placement.values()) / size
        for role, size in units.items()
    }
    counts = {role: max(1, int(share[role])) for role in units}
    while (over := sum(counts[role] * units[role] for role in units) - devices) > 0:
        role = max(
            (role for role in units if counts[role] > 1),
            key=lambda role: counts[role] - share[role],
        )
        counts[role] -= 1
    while fitting := [role for role in units if units[role] <= -over]:
        role = max(fitting, key=lambda role: share[role] - counts[role])
        counts[role] += 1
        over += units[role]
    return {role: counts[role] * units[role] for role in units}


def _descend(
    cost_of: Callable[[_Counts], tuple[float, float]],
    start: _Counts,
    stride: Sequence[int],
    reach: int,
) -> _Counts:
    """From split to neighboring split while that is better."""
    while True:
        places = [
            range(count - reach * by, count + reach * by + 1, by)
            for count, by in zip(start, stride, strict=True)
        ]
        best = min(itertools.product(*places), key=cost_of)
        if cost_of(best) >= cost_of(start):
            return start
        start = best


def _without_spare(cost: Cost, placement: dict[str, int], units: Units) -> dict[str, int]:
    """Each role with the fewest devices with which the step is as fast."""
    fastest = cost(placement)[0]
    for role, size in units.items():
        few, enough = 0, placement[role] // size
        while enough - few > 1:
            middle = (few + enough) // 2
            if cost({**placement, role: middle * size})[0] <= fastest * _AS_FAST:
                enough = middle
            else:
                few = middle
        placement = {**placement, role: enough * size}
    return placement
