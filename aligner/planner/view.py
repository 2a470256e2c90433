"""How a plan is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from aligner.planner.model import HOST, Placement
from aligner.planner.plan import Comparison, Plan
from aligner.planner.simulation import Forecast

if TYPE_CHECKING:
    from aligner.planner.measured import Measured

_BAR = 20
_NOTABLE = 0.0005
"""A share of a step below which a change is not spoken of"""


def as_json(compared: Comparison) -> dict[str, Any]:
    """Everything that is shown, in seconds."""
    plan, measured, as_measured = compared.plan, compared.measured, compared.as_measured
    return {
        "max_staleness": plan.pipeline.max_staleness,
        "steps": plan.steps,
        **_figures(plan),
        "ideal_s": plan.ideal_s,
        "staleness": plan.forecast.staleness,
        "busy_s": plan.forecast.busy_s,
        "utilization": {role: plan.forecast.utilization(role) for role in plan.forecast.busy_s},
        "bottleneck": plan.bottleneck,
        "one_more": {role: more.step_s for role, more in plan.one_more.items()},
        "by_max_staleness": {str(bound): {"step_s": it.step_s, "run_s": it.run_s} for bound, it in plan.by_staleness.items()},
        **({} if compared.colocated is None else {"synchronous_colocated": _figures(compared.colocated)}),
        **({} if measured is None or as_measured is None else _as_measured(measured, as_measured)),
    }


def _figures(plan: Plan) -> dict[str, Any]:
    return {"devices": dict(plan.placement), "step_s": plan.forecast.step_s, "run_s": plan.forecast.run_s}


def _as_measured(measured: Measured, predicted: Forecast) -> dict[str, float]:
    return {"measured_step_s": measured.step_s, "predicted_measured_step_s": predicted.step_s}


def print_comparison(compared: Comparison, console: Console | None = None) -> None:
    """Print the tables, the bottleneck, and what the prediction rests on."""
    console = console or Console()
    console.print(_steps_table(compared))
    console.print(_roles_table(compared.plan))
    for line in _conclusions(compared):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _steps_table(compared: Comparison) -> Table:
    plan, colocated, measured = compared.plan, compared.colocated, compared.measured
    table = Table(title=f"{plan.devices} devices, {plan.steps} steps", title_justify="left")
    for column in ("", "devices", "step", "run", "of ideal"):
        table.add_column(column, justify="right" if column in ("step", "run", "of ideal") else "left")

    def add(what: str, placement: Placement, step_s: float, run_s: float, ideal_s: float | None = None) -> None:
        share = "" if ideal_s is None else f"{step_s / ideal_s:.0%}"
        table.add_row(what, describe(placement), seconds(step_s), duration(run_s), share)

    if measured is not None and compared.as_measured is not None:
        how = f"staleness {measured.pipeline.max_staleness}" if "generator" in measured.placement else "synchronous"
        add(f"measured: {how}", measured.placement, measured.step_s, measured.step_s * plan.steps)
        add("  predicted for it", measured.placement, compared.as_measured.step_s, compared.as_measured.run_s)
    if colocated is not None:
        add("synchronous, engine colocated", colocated.placement, colocated.forecast.step_s, colocated.forecast.run_s)
    for bound, it in plan.by_staleness.items():
        chosen = " <" if bound == plan.pipeline.max_staleness else ""
        add(f"max_staleness={bound}{chosen}", plan.placement, it.step_s, it.run_s, plan.ideal_s)
    add("ideal", plan.placement, plan.ideal_s, plan.ideal_s * plan.steps, plan.ideal_s)
    return table


def _roles_table(plan: Plan) -> Table:
    table = Table(title=f"max_staleness={plan.pipeline.max_staleness}", title_justify="left")
    for column in ("role", "devices", "busy", "utilization", "one more unit", "step then"):
        table.add_column(column, justify="left" if column in ("role", "utilization", "one more unit") else "right")
    for role, busy in sorted(plan.forecast.busy_s.items(), key=lambda entry: -entry[1]):
        share = plan.forecast.utilization(role)
        row = [role, str(plan.placement.get(role, "-")), seconds(busy), f"{bar(share)} {share:4.0%}"]
        if role in plan.one_more:
            row += [f"+{plan.units[role]}", _change(plan.one_more[role], plan.forecast)]
        table.add_row(*row)
    return table


def _conclusions(compared: Comparison) -> list[str]:
    plan, measured = compared.plan, compared.measured
    role = plan.bottleneck
    same = ", and no faster with more devices" if role == HOST else ""
    lines = [f"bottleneck: {role}, busy for {plan.forecast.utilization(role):.0%} of a step{same}"]
    helpful = min(plan.one_more, key=lambda role: plan.one_more[role].step_s)
    if _helps(plan.one_more[helpful], plan.forecast):
        lines.append(f"buy first: {plan.units[helpful]} more for {helpful}, {_change(plan.one_more[helpful], plan.forecast)}")
    else:
        lines.append("one more unit of a single role buys nothing")
    looser = plan.by_staleness.get(plan.pipeline.max_staleness + 1)
    if looser is not None and _helps(looser, plan.forecast):
        lines.append(
            f"max_staleness={plan.pipeline.max_staleness} makes roles wait: {plan.pipeline.max_staleness + 1} would take"
            f" {_change(looser, plan.forecast)}"
        )
    if compared.devices is not None and compared.devices > plan.devices:
        lines.append(f"{compared.devices - plan.devices} of {compared.devices} devices would not help")
    if measured is not None and compared.as_measured is not None:
        error = compared.as_measured.step_s / measured.step_s - 1
        lines.append(f"the prediction for the measured run is {error:+.1%} off its mean over {measured.counted} steps")
        if "generator" in measured.placement:
            how, others = (
                ("beside each other", "in turn") if measured.pipeline.max_staleness else ("in turn", "beside each other")
            )
            lines.append(f"its phases are as they took {how}; where roles share cores they take another time {others}")
        if not measured.has_servers:
            lines.append("no timeline: the time that the trainer waited for servers counts as its own work")
    return lines


def _change(to: Forecast, now: Forecast) -> str:
    return f"{seconds(to.step_s)} ({to.step_s / now.step_s - 1:+.1%})" if _helps(to, now) else "no change"


def _helps(to: Forecast, now: Forecast) -> bool:
    return to.step_s < now.step_s * (1 - _NOTABLE)


def bar(share: float) -> str:
    """A share of 1 as a bar."""
    filled = round(share * _BAR)
    return "█" * filled + "░" * (_BAR - filled)


def describe(placement: Placement) -> str:
    """Devices by role on one line."""
    return ", ".join(f"{role} {devices}" for role, devices in placement.items())


def seconds(value: float) -> str:
    """Seconds with three digits that count."""
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def duration(value: float) -> str:
    """Seconds, minutes or hours, whichever fits."""
    if value < 120:
        return seconds(value)
    return f"{value / 60:.1f} min" if value < 36000 else f"{value / 3600:.1f} h"
