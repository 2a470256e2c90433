"""A plan as tables and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from aligner.observability.console import print_line
from aligner.planner.phases import HOST, Placement
from aligner.planner.plan import Plan
from aligner.planner.simulation import Forecast

if TYPE_CHECKING:
    from aligner.planner.publish_cost import PublishCost

_BAR = 20
_NOTABLE = 0.0005  # A share of a step below which a change is not spoken of


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything that is shown, in seconds."""

    def times(forecast: Forecast) -> dict[str, float]:
        return {"step_s": forecast.step_s, "run_s": forecast.run_s}

    shown = {
        "max_staleness": plan.request.pipeline.max_staleness,
        "steps": plan.request.steps,
        "devices": dict(plan.placement),
        **times(plan.forecast),
        "ideal_s": plan.ideal_s,
        "staleness": plan.forecast.staleness,
        "busy_s": plan.forecast.busy_s,
        "utilization": {role: plan.forecast.utilization(role) for role in plan.forecast.busy_s},
        "bottleneck": plan.bottleneck,
        "one_more": {role: more.step_s for role, more in plan.one_more.items()},
        "by_max_staleness": {str(bound): times(it) for bound, it in plan.by_staleness.items()},
    }
    if plan.colocated is not None:
        shown["synchronous_colocated"] = {
            "devices": dict(plan.colocated[0]),
            **times(plan.colocated[1]),
        }
    if plan.request.measured is not None and plan.as_measured is not None:
        shown |= {
            "measured_step_s": plan.request.measured.step_s,
            "predicted_measured_step_s": plan.as_measured.step_s,
        }
    if plan.request.publish is not None:
        shown["publish"] = asdict(plan.request.publish)
    return shown


def print_plan(plan: Plan) -> None:
    """Print the tables, the bottleneck, and what the prediction rests on."""
    console = Console()
    console.print(_steps_table(plan))
    console.print(_roles_table(plan))
    for line in [
        *_conclusions(plan),
        *_about_the_publish(plan.request.publish),
        *_about_the_measured_run(plan),
    ]:
        print_line(console, line)


def _steps_table(plan: Plan) -> Table:
    measured, steps = plan.request.measured, plan.request.steps
    table = Table(title=f"{plan.devices} devices, {steps} steps", title_justify="left")
    for column in ("", "devices", "step", "run", "of ideal"):
        table.add_column(
            column, justify="right" if column in ("step", "run", "of ideal") else "left"
        )

    def add(
        what: str, placement: Placement, step_s: float, run_s: float, ideal_s: float | None = None
    ) -> None:
        share = "" if ideal_s is None else f"{step_s / ideal_s:.0%}"
        devices = ", ".join(f"{role} {count}" for role, count in placement.items())
        table.add_row(what, devices, _seconds(step_s), _duration(run_s), share)

    if measured is not None and plan.as_measured is not None:
        how = (
            f"staleness {measured.pipeline.max_staleness}"
            if "generator" in measured.placement
            else "synchronous"
        )
        add(f"measured: {how}", measured.placement, measured.step_s, measured.step_s * steps)
        add(
            "  predicted for it",
            measured.placement,
            plan.as_measured.step_s,
            plan.as_measured.run_s,
        )
    if plan.colocated is not None:
        placement, forecast = plan.colocated
        add("synchronous, engine colocated", placement, forecast.step_s, forecast.run_s)
    for bound, it in plan.by_staleness.items():
        chosen = " <" if bound == plan.request.pipeline.max_staleness else ""
        add(f"max_staleness={bound}{chosen}", plan.placement, it.step_s, it.run_s, plan.ideal_s)
    add("ideal", plan.placement, plan.ideal_s, plan.ideal_s * steps, plan.ideal_s)
    return table


def _roles_table(plan: Plan) -> Table:
    table = Table(
        title=f"max_staleness={plan.request.pipeline.max_staleness}", title_justify="left"
    )
    for column in ("role", "devices", "busy", "utilization", "one more unit", "step then"):
        table.add_column(
            column,
            justify="left" if column in ("role", "utilization", "one more unit") else "right",
        )
    for role, busy in sorted(plan.forecast.busy_s.items(), key=lambda entry: -entry[1]):
        share = plan.forecast.utilization(role)
        bar = ("█" * round(share * _BAR)).ljust(_BAR, "░")
        row = [role, str(plan.placement.get(role, "-")), _seconds(busy), f"{bar} {share:4.0%}"]
        if role in plan.one_more:
            row += [f"+{plan.request.units[role]}", _change(plan.one_more[role], plan.forecast)]
        table.add_row(*row)
    return table


def _conclusions(plan: Plan) -> list[str]:
    role, bound = plan.bottleneck, plan.request.pipeline.max_staleness
    same = ", and no faster with more devices" if role == HOST else ""
    lines = [f"bottleneck: {role}, busy for {plan.forecast.utilization(role):.0%} of a step{same}"]
    helpful = min(plan.one_more, key=lambda role: plan.one_more[role].step_s)
    more = plan.one_more[helpful]
    if _helps(more, plan.forecast):
        lines.append(
            f"buy first: {plan.request.units[helpful]} more for {helpful},"
            f" {_change(more, plan.forecast)}"
        )
    else:
        lines.append("one more unit of a single role buys nothing")
    looser = plan.by_staleness.get(bound + 1)
    if looser is not None and _helps(looser, plan.forecast):
        lines.append(
            f"max_staleness={bound} makes roles wait: {bound + 1} would take"
            f" {_change(looser, plan.forecast)}"
        )
    if plan.request.devices is not None and plan.request.devices > plan.devices:
        lines.append(
            f"{plan.request.devices - plan.devices} of {plan.request.devices} devices would not"
            " help"
        )
    return lines


def _about_the_publish(cost: PublishCost | None) -> list[str]:
    if cost is None:
        return []
    total, sent, received = (
        f"{size / 1e9:.3g} GB" for size in (cost.bytes, cost.sent, cost.received)
    )
    line = f"publish: {total} from rank to rank, at most {sent} from one and {received} to one"
    seconds = "" if cost.seconds is None else f": {_seconds(cost.seconds)}"
    return [f"{line}, in {cost.rounds} rounds with {cost.votes} votes{seconds}"]


def _about_the_measured_run(plan: Plan) -> list[str]:
    measured = plan.request.measured
    if measured is None or plan.as_measured is None:
        return []
    error = plan.as_measured.step_s / measured.step_s - 1
    lines = [
        f"the prediction for the measured run is {error:+.1%} off its mean over {measured.counted}"
        " steps"
    ]
    if "generator" in measured.placement:
        how, others = "in turn", "beside each other"
        if measured.pipeline.max_staleness:
            how, others = others, how
        lines.append(
            f"its phases are as they took {how}; where roles share cores they take another time"
            f" {others}"
        )
    if not measured.has_servers:
        lines.append(
            "no timeline: the time that the trainer waited for servers counts as its own work"
        )
    return lines


def _change(to: Forecast, now: Forecast) -> str:
    return (
        f"{_seconds(to.step_s)} ({to.step_s / now.step_s - 1:+.1%})"
        if _helps(to, now)
        else "no change"
    )


def _helps(to: Forecast, now: Forecast) -> bool:
    return to.step_s < now.step_s * (1 - _NOTABLE)


def _seconds(value: float) -> str:
    """With three digits that count."""
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def _duration(value: float) -> str:
    """Seconds, minutes or hours, whichever fits."""
    if value < 120:
        return _seconds(value)
    return f"{value / 60:.1f} min" if value < 36000 else f"{value / 3600:.1f} h"
