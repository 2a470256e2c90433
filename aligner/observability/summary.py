"""What a run came to: how its first steps compare with its last, and where its time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from aligner.paths import RunPaths

WINDOW = 5
"""Steps that are averaged at either end."""

_COMPARED = {
    "reward/mean": "reward",
    "kl/reference": "KL to the reference",
    "response/length": "response length, tokens",
    **{f"{trainer}/loss": "loss" for trainer in ("sft", "dpo", "reward_model")},
    **{f"{trainer}/accuracy": "accuracy" for trainer in ("dpo", "reward_model")},
    "eval/loss": "held-out loss",
    "eval/accuracy": "held-out accuracy",
    "time/step": "seconds a step",
}

_BOUNDS = ("_low", "_high")
"""What the names of an interval's ends end in."""


def window_mean(metrics: Sequence[Mapping[str, float]], key: str) -> float | None:
    """Mean of a metric over the steps that measured it; None when none did."""
    values = [record[key] for record in metrics if key in record]
    return sum(values) / len(values) if values else None


def summary_table(metrics: Sequence[Mapping[str, float]]) -> Table:
    """Means over the first and the last five steps (fewer when the run is shorter)."""
    first, last = metrics[:WINDOW], metrics[-WINDOW:]
    phases = sorted({key for record in metrics for key in record if key.startswith("time/")} - {"time/step"})
    table = Table(title=f"summary of {len(metrics)} steps", title_justify="left")
    for column in ("mean of", f"first {len(first)}", f"last {len(last)}", "change"):
        table.add_column(column, justify="left" if column == "mean of" else "right")
    for key, name in {**_COMPARED, **{phase: f"  {phase.removeprefix('time/')}" for phase in phases}}.items():
        before, after = window_mean(first, key), window_mean(last, key)
        if before is not None and after is not None:
            table.add_row(name, f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}")
    return table


def evaluation_table(metrics: Sequence[Mapping[str, float]]) -> Table | None:
    """The first evaluation of responses against the last, with 95 % intervals; None without one."""
    evaluated = [record for record in metrics if "eval/score" in record]
    if not evaluated:
        return None
    first, last = evaluated[0], evaluated[-1]
    table = Table(title="evaluation", title_justify="left")
    for column in ("", f"step {int(first['step'])}", f"step {int(last['step'])}", "change"):
        table.add_column(column, justify="right" if column else "left")
    for key in (key for key in last if key.startswith("eval/") and not key.endswith(_BOUNDS)):
        change = f"{last[key] - first[key]:+.3f}" if key in first else ""
        table.add_row(key.removeprefix("eval/"), shown_metric(first, key), shown_metric(last, key), change)
    return table


def metrics_table(metrics: Mapping[str, float], title: str) -> Table:
    """One evaluation, with 95 % intervals."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("measured", justify="right")
    for key in metrics:
        if not key.endswith(_BOUNDS):
            table.add_row(key.removeprefix("eval/"), shown_metric(metrics, key))
    return table


def shown_metric(record: Mapping[str, float], key: str) -> str:
    """A metric with its interval, where it has one; nothing where it was not measured."""
    if key not in record:
        return ""
    low, high = record.get(f"{key}_low"), record.get(f"{key}_high")
    return f"{record[key]:.3f}" + ("" if low is None or high is None else f" [{low:.3f}, {high:.3f}]")


def totals(metrics: Sequence[Mapping[str, float]]) -> str:
    """The worst mismatch and the run's totals, a line each."""
    lines = []
    mismatches = {
        record["mismatch/logprob_abs"]: int(record["step"]) for record in metrics if "mismatch/logprob_abs" in record
    }
    if mismatches:
        worst = max(mismatches)
        lines.append(f"largest mismatch/logprob_abs: {worst:.2e} (step {mismatches[worst]})")
    seconds = sum(record.get("time/step", 0.0) for record in metrics)
    line = f"total: {len(metrics)} steps, {seconds:.1f} s"
    for unit in ("samples", "tokens"):
        rate = f"throughput/{unit}_per_s"
        if seconds and all(rate in record for record in metrics):
            count = sum(record[rate] * record.get("time/step", 0.0) for record in metrics)
            line += f", {count:.0f} {unit} ({count / seconds:.1f}/s)"
    return "\n".join([*lines, line])


def print_summary(metrics: Sequence[Mapping[str, float]], paths: RunPaths, console: Console) -> None:
    """Print the table, the totals and where the run's files are."""
    steps = [record for record in metrics if record["step"] > 0]  # an evaluation of the initial policy is no step
    if steps:
        console.print(summary_table(steps))
    if (evaluations := evaluation_table(metrics)) is not None:
        console.print(evaluations)
    if steps:
        console.print(totals(steps), markup=False, highlight=False, soft_wrap=True)
    files = {"metrics": paths.metrics, "samples": paths.samples, "tensorboard": paths.tensorboard, "logs": paths.logs}
    files |= {"trace": paths.trace, "checkpoints": paths.checkpoints}
    for name, path in files.items():
        if path.exists():
            console.print(f"{name}: {path}", markup=False, highlight=False, soft_wrap=True)
