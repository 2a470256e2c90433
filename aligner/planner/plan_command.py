"""`aligner plan`: print the limiting role of a measured run, and predictions for other splits."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from aligner.observability.console import print_line, print_table
from aligner.planner.measured_run import MeasuredRun, RoleUsage, read_measured_run
from aligner.planner.pipeline_model import (
    Placement,
    Prediction,
    StepPredictor,
    candidate_splits,
)

# Maximum number of predicted splits that are printed.
_MAX_SPLITS = 5
# Minimum relative gain of a split that counts as faster.
_MIN_GAIN = 0.0005

_ASYNCHRONOUS_ERROR = (
    "for rollout.max_staleness=1, at most 10% if every role has its own core, and up to 19% too"
    " fast on shared cores"
)


def print_plan(parsed: argparse.Namespace) -> None:
    """Read a run, predict the step times of other splits, and print both.

    Raises:
        ConfigError: The run cannot be measured.
    """
    directory = parsed.run_directory
    plan = _build_plan(directory, read_measured_run(directory))
    if parsed.json:
        print(json.dumps(_to_json(plan)))
    else:
        _print_tables(plan)


@dataclass(frozen=True)
class _Plan:
    """Everything that the command prints."""

    directory: Path
    run: MeasuredRun
    splits: tuple[Prediction, ...]
    """Splits that are faster than the measured one, the fastest first."""
    asynchronous: Prediction | None
    """Prediction for `rollout.max_staleness=1`; None if the run is asynchronous or colocated."""
    model_error: float
    """Relative error of the simulated step time of the measured run."""


def _build_plan(directory: Path, run: MeasuredRun) -> _Plan:
    predictor = StepPredictor(run.pipeline, run.placement, run.step_s)
    candidates = candidate_splits(run.placement, run.units, run.limiting_role)
    predictions = [predictor.predict_split(candidate) for candidate in candidates]
    faster = [prediction for prediction in predictions if prediction.change < -_MIN_GAIN]

    # Of two equally fast splits, the one with fewer devices comes first.
    faster.sort(
        key=lambda prediction: (round(prediction.change, 4), sum(prediction.placement.values()))
    )

    is_predictable = run.pipeline.max_staleness == 0 and not run.pipeline.is_colocated
    return _Plan(
        directory=directory,
        run=run,
        splits=tuple(faster[:_MAX_SPLITS]),
        asynchronous=predictor.predict_asynchronous() if is_predictable else None,
        model_error=predictor.model_error,
    )


def _to_json(plan: _Plan) -> dict[str, Any]:
    """Return the printed values by name; times are in seconds, and shares are fractions of 1."""
    run = plan.run
    entries: dict[str, Any] = {
        "measured_steps": run.measured_steps,
        "step_s": run.step_s,
        "max_staleness": run.pipeline.max_staleness,
        "is_colocated": run.pipeline.is_colocated,
        "roles": {
            usage.role: {
                "devices": usage.devices,
                "busy": usage.busy,
                "waited": usage.waited,
                "waited_for": dict(usage.waited_for),
            }
            for usage in run.usage
        },
        "phases_s": {phase.name: phase.mean_seconds for phase in run.pipeline.phases},
        "limiting_role": run.limiting_role,
        "splits": [
            {
                "devices": dict(split.placement),
                "predicted_step_s": split.step_s,
                "change": split.change,
            }
            for split in plan.splits
        ],
        "model_error": plan.model_error,
    }
    if plan.asynchronous is not None:
        entries["max_staleness_1"] = {
            "predicted_step_s": plan.asynchronous.step_s,
            "change": plan.asynchronous.change,
        }
    return entries


def _print_tables(plan: _Plan) -> None:
    run = plan.run
    console = Console()
    print_line(
        console,
        f"measured over {run.measured_steps} steps of {plan.directory}"
        f" (rollout.max_staleness={run.pipeline.max_staleness}): {_format_seconds(run.step_s)} per"
        " step",
    )
    print_table(console, _usage_table(run))
    share = run.phase_shares[run.limiting_role]
    print_line(
        console, f"limiting role: {run.limiting_role} (its phases take {share:.0%} of a step)"
    )

    if plan.splits:
        print_table(console, _splits_table(plan.splits))
    else:
        print_line(
            console,
            "no split that moves the devices of one or two replicas is predicted to be faster",
        )
    for line in _notes(plan):
        print_line(console, line)


def _usage_table(run: MeasuredRun) -> Table:
    table = Table()
    table.add_column("role")
    for heading in ("devices", "busy", "waited"):
        table.add_column(heading, justify="right")
    table.add_column("waited for")
    for usage in run.usage:
        table.add_row(
            usage.role,
            str(usage.devices) if usage.devices else "CPU only",
            f"{usage.busy:.0%}",
            f"{usage.waited:.0%}",
            _format_waits(usage),
        )
    return table


def _format_waits(usage: RoleUsage) -> str:
    shares = {name: share for name, share in usage.waited_for.items() if share >= 0.005}
    if len(shares) == 1:
        return next(iter(shares))
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items())


def _splits_table(splits: tuple[Prediction, ...]) -> Table:
    table = Table(title="predicted step times of other splits", title_justify="left")
    table.add_column("split")
    for heading in ("devices", "step", "change"):
        table.add_column(heading, justify="right")
    for split in splits:
        table.add_row(
            _format_split(split.placement),
            str(sum(split.placement.values())),
            _format_seconds(split.step_s),
            f"{split.change:+.0%}",
        )
    return table


def _format_split(placement: Placement) -> str:
    return ", ".join(f"{role} {devices}" for role, devices in placement.items())


def _notes(plan: _Plan) -> Iterator[str]:
    """Yield the other predictions and the assumptions of all predictions."""
    if plan.asynchronous is not None:
        yield (
            "predicted step time for rollout.max_staleness=1 with the same devices:"
            f" {_format_seconds(plan.asynchronous.step_s)} ({plan.asynchronous.change:+.0%})"
        )
    if plan.run.pipeline.is_colocated:
        yield (
            "colocated engine: generation counts as the trainer's work. Only splits between the"
            " trainer and the servers are predicted. To get predictions for"
            " engine.placement=server and rollout.max_staleness=1, measure a run with"
            " engine.placement=server"
        )
    # Adding zero turns a rounded -0.0 into 0.0.
    own_error = round(plan.model_error, 3) + 0.0
    errors = [f"{own_error:+.1%} for this run's own step"]
    if plan.asynchronous is not None:
        errors.append(_ASYNCHRONOUS_ERROR)
    errors.append("for other splits, not measured")
    yield (
        "assumption: a phase's time is inversely proportional to its role's devices. Known error: "
        + "; ".join(errors)
    )


def _format_seconds(value: float) -> str:
    """Format seconds with three significant digits."""
    return f"{value:#.3g} s" if value < 99.95 else f"{value:.0f} s"
