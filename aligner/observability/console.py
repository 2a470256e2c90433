"""What a run shows on a console: its steps as they come, samples, and a summary of its first steps
and its last."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from aligner.paths import RunPaths

WINDOW = 5
"""Steps that are averaged: for the seconds a step and the time left, and at either end of a run."""

_SHOWN = {
    "reward/mean": "reward {:.3f}",
    "kl/reference": "KL {:.4f}",
    "distill/reverse_kl": "KL to teacher {:.4f} per token",
    **{f"{trainer}/loss": "loss {:.4f}" for trainer in ("sft", "dpo", "reward_model")},
    **{f"{trainer}/accuracy": "accuracy {:.3f}" for trainer in ("dpo", "reward_model")},
    "eval/loss": "held-out loss {:.4f}",
    "eval/score": "held-out score {:.3f}",
    "eval/pass@1": "pass@1 {:.3f}",
    "eval/win_rate": "win rate {:.3f}",
    "eval/judge_win_rate": "judged win rate {:.3f}",
}
_COMPARED = {
    "reward/mean": "reward",
    "kl/reference": "KL to reference",
    "distill/reverse_kl": "KL to teacher (per token)",
    "response/length": "response length (tokens)",
    **{f"{trainer}/loss": "loss" for trainer in ("sft", "dpo", "reward_model")},
    **{f"{trainer}/accuracy": "accuracy" for trainer in ("dpo", "reward_model")},
    "eval/loss": "held-out loss",
    "eval/accuracy": "held-out accuracy",
    "time/step": "step time (s)",
}
_PHASE_LABELS = {
    "logprobs": "log-probs",
    "reshard": "weight sync",
    "server_wait": "wait for servers",
}
"""Names of the trainer's phases in the summary, where they differ from the metric's name."""

GROUPED = ("score", "pass@1")
"""What is measured of groups, too, as `eval/METRIC/GROUP`."""
_BOUNDS = ("_low", "_high")  # what the names of an interval's ends end in


def print_line(console: Console, text: str) -> None:
    """Print a text as it is, without markup, colours or line breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class Pace:
    """How fast a run of so many steps goes: the mean of its newest ones."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0
        """Of the run, and of those the ones that it has done."""
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take another step's metrics."""
        self.done = int(metrics["step"])
        if "time/step" in metrics:
            self._recent.append(metrics["time/step"])

    @property
    def seconds_per_step(self) -> float | None:
        """None before a step was timed."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    @property
    def seconds_left(self) -> float | None:
        """To the run's last step."""
        pace = self.seconds_per_step
        return None if pace is None else pace * (self.steps - self.done)

    def describe(self, metrics: Mapping[str, float]) -> str:
        """What the step has learned, and pace and time left; what it did not measure is left
        out."""
        pace = (
            (self.seconds_per_step, self.seconds_left) if "time/step" in metrics else (None, None)
        )
        return "  ".join(describe_step(metrics, *pace))


def describe_step(
    metrics: Mapping[str, float], seconds_per_step: float | None, seconds_left: float | None
) -> list[str]:
    """A step's reward, KL, loss and evaluation, the pace and the time left, as far as they are
    known."""
    parts = [text.format(metrics[key]) for key, text in _SHOWN.items() if key in metrics]
    parts += [
        f"{name} {_SHOWN[key].format(value)}"
        for name, key, value in suite_metrics(metrics)
        if key in _SHOWN
    ]
    if seconds_per_step is not None:
        parts.append(f"{seconds_per_step:.2f} s/step")
    if seconds_left is not None:
        parts.append(f"ETA {timedelta(seconds=round(seconds_left))}")
    return parts


def suite_metrics(metrics: Mapping[str, float]) -> Iterator[tuple[str, str, float]]:
    """(NAME, `eval/METRIC`, value) of a step's `eval/NAME/METRIC`."""
    for key, value in metrics.items():
        kind, _, rest = key.partition("/")
        name, _, metric = rest.rpartition("/")
        if kind == "eval" and name and name not in GROUPED:
            yield name, f"eval/{metric}", value


class PlainProgress:
    """Shows how a run goes in one line a step, for logs."""

    def __init__(self, steps: int, console: Console) -> None:
        self._steps, self._console, self._pace = steps, console, Pace(steps)

    def status(self, text: str) -> None:
        """Tell what is being waited for, before the first step."""
        self.note(text)

    def note(self, text: str) -> None:
        """Tell that something out of the ordinary has happened."""
        print_line(self._console, text)

    def step(self, metrics: Mapping[str, float]) -> None:
        """Tell of a step that has been recorded."""
        self._pace.add(metrics)
        self.note(f"step {int(metrics['step'])}/{self._steps}  {self._pace.describe(metrics)}")

    def samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Show samples of one step that have been recorded; control characters are escaped."""
        table = Table(
            "prompt",
            "response",
            title=f"Samples at step {records[0]['step']}",
            title_justify="left",
        )
        table.add_column("reward", justify="right")
        for record in records:
            table.add_row(
                _printable(record["prompt"]),
                _printable(record["response"]),
                f"{record['reward']:.3f}",
            )
        self._console.print(table)

    def close(self) -> None:
        """Leave the terminal as it was."""


class LiveProgress(PlainProgress):
    """The same with a bar at the bottom of a terminal; notes and samples scroll above it."""

    def __init__(self, steps: int, console: Console) -> None:
        super().__init__(steps, console)
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}", markup=False),
        )
        # No redirection: the launcher's own prints go through the console or come after close().
        self._bar = Progress(
            *columns, console=console, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self._bar.add_task("", total=steps)
        self._bar.start()

    def status(self, text: str) -> None:
        """Show it beside the bar."""
        self._bar.update(self._task, description=text)

    def step(self, metrics: Mapping[str, float]) -> None:
        """Advance the bar."""
        self._pace.add(metrics)
        self._bar.update(
            self._task, completed=int(metrics["step"]), description=self._pace.describe(metrics)
        )

    def close(self) -> None:
        """Stop drawing."""
        self._bar.stop()


def make_progress(steps: int, console: Console) -> PlainProgress:
    """What fits the console."""
    return LiveProgress(steps, console) if console.is_terminal else PlainProgress(steps, console)


def _table(title: str, label: str, *columns: str) -> Table:
    """A table of labels, to the left, and values."""
    table = Table(label, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _printable(text: str) -> Text:
    return Text(
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    )


def window_mean(metrics: Sequence[Mapping[str, float]], key: str) -> float | None:
    """Mean of a metric over the steps that measured it; None when none did."""
    values = [record[key] for record in metrics if key in record]
    return sum(values) / len(values) if values else None


def _phase_label(metric: str) -> str:
    """Return the name of a phase in the summary."""
    phase = metric.removeprefix("time/")
    return _PHASE_LABELS.get(phase, phase.replace("_", " "))


def summary_table(metrics: Sequence[Mapping[str, float]]) -> Table:
    """Means over the first and the last five steps (fewer when the run is shorter)."""
    first, last = metrics[:WINDOW], metrics[-WINDOW:]
    phases = sorted(
        {key for record in metrics for key in record if key.startswith("time/")} - {"time/step"}
    )
    table = _table(
        f"Summary of {len(metrics)} steps",
        "mean",
        f"first {len(first)} steps",
        f"last {len(last)} steps",
        "change",
    )
    for key, name in {
        **_COMPARED,
        **{phase: f"  {_phase_label(phase)} (s)" for phase in phases},
    }.items():
        before, after = window_mean(first, key), window_mean(last, key)
        if before is not None and after is not None:
            table.add_row(name, f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}")
    return table


def evaluation_table(metrics: Sequence[Mapping[str, float]]) -> Table | None:
    """The first evaluation of responses against the last, with 95 % intervals; None without one."""
    evaluated = [
        record for record in metrics if "eval/score" in record or any(suite_metrics(record))
    ]
    if not evaluated:
        return None
    first, last = evaluated[0], evaluated[-1]
    table = _table(
        "Evaluation",
        "metric [95% interval]",
        f"step {int(first['step'])}",
        f"step {int(last['step'])}",
        "change",
    )
    for key in last:
        if key.startswith("eval/") and not key.endswith(_BOUNDS):
            change = f"{last[key] - first[key]:+.3f}" if key in first else ""
            table.add_row(key.removeprefix("eval/"), _shown(first, key), _shown(last, key), change)
    return table


def metrics_table(metrics: Mapping[str, float], title: str) -> Table:
    """One evaluation, with 95 % intervals."""
    table = _table(title, "metric [95% interval]", "value")
    for key in metrics:
        if not key.endswith(_BOUNDS):
            table.add_row(key.removeprefix("eval/"), _shown(metrics, key))
    return table


def _shown(record: Mapping[str, float], key: str) -> str:
    """A metric with its interval, where it has one; nothing where it was not measured."""
    if key not in record:
        return ""
    low, high = record.get(f"{key}_low"), record.get(f"{key}_high")
    return f"{record[key]:.3f}" + (
        "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    )


def totals(metrics: Sequence[Mapping[str, float]]) -> str:
    """The worst mismatch and the run's totals, a line each."""
    lines, worst = [], "mismatch/logprob_abs"
    if mismatches := [
        (record[worst], int(record["step"])) for record in metrics if worst in record
    ]:
        difference, step = max(mismatches)
        lines.append(
            f"largest engine-trainer log-prob difference ({worst}): {difference:.2e} at step {step}"
        )
    seconds = sum(record.get("time/step", 0.0) for record in metrics)
    line = f"total: {len(metrics)} steps, {seconds:.1f} s"
    for unit in ("samples", "tokens"):
        rate = f"throughput/{unit}_per_s"
        if seconds and all(rate in record for record in metrics):
            count = sum(record[rate] * record.get("time/step", 0.0) for record in metrics)
            line += f", {count:.0f} {unit} ({count / seconds:.1f}/s)"
    return "\n".join([*lines, line])


def print_summary(
    metrics: Sequence[Mapping[str, float]], paths: RunPaths, console: Console
) -> None:
    """Print the table, the totals and where the run's files are."""
    # an evaluation of the initial policy is no step
    steps = [record for record in metrics if record["step"] > 0]
    if steps:
        console.print(summary_table(steps))
    if (evaluations := evaluation_table(metrics)) is not None:
        console.print(evaluations)
    if steps:
        print_line(console, totals(steps))
    for name in ("metrics", "samples", "tensorboard", "logs", "trace", "checkpoints"):
        if (path := getattr(paths, name)).exists():
            print_line(console, f"{name}: {path}")
