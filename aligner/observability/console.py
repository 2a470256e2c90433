"""Output of a run on a console: its steps while it runs, samples, and a summary that compares the
first steps with the last steps."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column, Table
from rich.text import Text

from aligner.masking import mask_secrets
from aligner.paths import RunPaths
from aligner.terminal import MAX_FIELD_LENGTH, escape_controls, format_json, wrap_text

# Columns of a terminal on which every table fits.
_UNLIMITED_WIDTH = 10_000
WINDOW_STEPS = 5
"""Number of steps over which the pace is averaged, and over which the summary averages metrics at
the beginning and at the end of a run."""

# Metrics in the line of a step, with their format strings.
_STEP_LINE_FORMATS = {
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
# Metrics in the summary, with their labels.
_SUMMARY_LABELS = {
    "reward/mean": "reward",
    "kl/reference": "KL to reference",
    "distill/reverse_kl": "teacher KL per token",
    "response/length": "response tokens",
    **{f"{trainer}/loss": "loss" for trainer in ("sft", "dpo", "reward_model")},
    **{f"{trainer}/accuracy": "accuracy" for trainer in ("dpo", "reward_model")},
    "eval/loss": "held-out loss",
    "eval/accuracy": "held-out accuracy",
    "time/step": "step time (s)",
}
# Names of the trainer's phases in the summary, where they differ from the metric's name.
_PHASE_LABELS = {
    "logprobs": "log-probs",
    "reshard": "weight sync",
    "server_wait": "wait for servers",
}

GROUPED_METRICS = ("score", "pass@1")
"""Evaluation metrics that are also measured for groups of prompts, as `eval/METRIC/GROUP`."""
# Suffixes of the metrics that are the bounds of a confidence interval.
_BOUND_SUFFIXES = ("_low", "_high")


OutputMode = Literal["normal", "quiet", "verbose", "json"]
"""Output of `aligner launch`.

With `quiet`, only errors and the final result are printed. `verbose` adds the durations of the
phases of each step and the lines of the logs. With `json`, standard output contains one JSON object
per line, and the texts are printed on standard error.
"""


class RunConsole(Console):
    """Console of a launch, which knows the output mode."""

    def __init__(self, mode: OutputMode = "normal", **settings: Any) -> None:
        """Create the console.

        Args:
            mode: Output of the launch.
            settings: Further arguments of rich's `Console`.
        """
        super().__init__(quiet=mode == "quiet", stderr=mode == "json", **settings)
        self.mode = mode
        """Output of the launch."""

    @contextmanager
    def showing_result(self) -> Iterator[None]:
        """Print the final result of a run in the block, also with `quiet`."""
        is_quiet = self.quiet
        self.quiet = False
        try:
            yield
        finally:
            self.quiet = is_quiet

    def print_event(self, event: str, **fields: Any) -> None:
        """With `json`, print an event without secrets on standard output, as one JSON object."""
        if self.mode == "json":
            masked = {
                name: mask_secrets(value) if isinstance(value, str) else value
                for name, value in fields.items()
            }
            print(format_json({"event": event, **masked}), flush=True)


def print_line(console: Console, text: str) -> None:
    """Print a text without secrets, markup, colors and control characters; a terminal's lines are
    wrapped at spaces."""
    text = escape_controls(mask_secrets(text))
    if console.file.isatty():
        text = wrap_text(text, console.width)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """Print a table; on a terminal that is too narrow for it, print a block of lines per row.

    A block consists of the row's first cell and, indented, its other cells with their headers.
    Control characters are escaped, and markup has no effect.
    """
    if table.title is not None:
        table.title = _to_plain_text(table.title)
    for column in table.columns:
        column.header = _to_plain_text(column.header)
        column._cells = [_to_plain_text(cell) for cell in column._cells]
    full_width = console.options.update(max_width=_UNLIMITED_WIDTH)
    is_narrow = console.measure(table, options=full_width).maximum > console.width
    if not (is_narrow and console.file.isatty()):
        console.print(table)
        return

    if table.title is not None:
        print_line(console, str(table.title))
    names, *columns = [[str(cell) for cell in column.cells] for column in table.columns]
    headers = [str(column.header) for column in table.columns[1:]]
    for row, name in enumerate(names):
        fields = [
            f"{header} {column[row]}".strip()
            for header, column in zip(headers, columns, strict=True)
            if column[row]
        ]
        # Numbers and names share lines; longer texts have lines of their own.
        if all(len(field) <= MAX_FIELD_LENGTH and "\n" not in field for field in fields):
            fields = ["  ".join(fields)]
        print_line(console, "\n".join([*([name] if name else []), *(f"  {f}" for f in fields)]))


def _to_plain_text(cell: RenderableType) -> Text:
    """Return a cell of a table as text without control characters and markup."""
    return Text(escape_controls(str(cell)))


class Pace:
    """Speed of a run: the mean duration of its newest steps, and the remaining time."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        """Number of steps of the run."""
        self.done = 0
        """Number of completed steps."""
        self._recent: deque[float] = deque(maxlen=WINDOW_STEPS)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of the next step."""
        self.done = int(metrics["step"])
        if "time/step" in metrics:
            self._recent.append(metrics["time/step"])

    @property
    def seconds_per_step(self) -> float | None:
        """Mean duration of the newest steps in seconds; None before the first timed step."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the end of the run's last step; None before the first timed
        step."""
        pace = self.seconds_per_step
        return None if pace is None else pace * (self.steps - self.done)

    def describe(self, metrics: Mapping[str, float]) -> str:
        """Return a line about a step: its main metrics, the pace and the remaining time.

        Metrics that the step did not measure are omitted.
        """
        pace = (
            (self.seconds_per_step, self.seconds_left) if "time/step" in metrics else (None, None)
        )
        return "  ".join(describe_step(metrics, *pace))


def describe_step(
    metrics: Mapping[str, float], seconds_per_step: float | None, seconds_left: float | None
) -> list[str]:
    """Return texts about a step: its reward, KL, loss and evaluation, the pace and the remaining
    time. Unknown values are omitted."""
    parts = [
        template.format(metrics[key])
        for key, template in _STEP_LINE_FORMATS.items()
        if key in metrics
    ]
    parts += [
        f"{name} {_STEP_LINE_FORMATS[key].format(value)}"
        for name, key, value in iterate_suite_metrics(metrics)
        if key in _STEP_LINE_FORMATS
    ]
    if seconds_per_step is not None:
        parts.append(f"{seconds_per_step:.2f} s/step")
    if seconds_left is not None:
        parts.append(f"ETA {timedelta(seconds=round(seconds_left))}")
    return parts


def iterate_suite_metrics(metrics: Mapping[str, float]) -> Iterator[tuple[str, str, float]]:
    """Yield (NAME, `eval/METRIC`, value) for each metric `eval/NAME/METRIC` of an evaluation
    suite."""
    for key, value in metrics.items():
        kind, _, rest = key.partition("/")
        name, _, metric = rest.rpartition("/")
        if kind == "eval" and name and name not in GROUPED_METRICS:
            yield name, f"eval/{metric}", value


class PlainProgress:
    """Progress of a run as one line per step, for logs."""

    def __init__(self, steps: int, console: RunConsole) -> None:
        """Create the output of a run.

        Args:
            steps: Number of steps of the run.
            console: Console for the output; with `verbose`, the durations of the phases of each
                step are shown.
        """
        self._steps = steps
        self._console = console
        self._pace = Pace(steps)

    def show_status(self, text: str) -> None:
        """Show the status of a run that has not completed its first step."""
        self.show_note(text)

    def show_note(self, text: str) -> None:
        """Show a message about an unusual event."""
        print_line(self._console, text)

    def show_error(self, text: str) -> None:
        """Show an exception of the user's code, which need not end the run."""
        self.show_note(text)

    def show_step(self, metrics: Mapping[str, float], problem: str | None = None) -> None:
        """Show a recorded step on one line.

        Args:
            metrics: Metrics of the step.
            problem: A problem of the step to show at the end of the line; None for no problem.
        """
        self._pace.add(metrics)
        parts = [f"step {int(metrics['step'])}/{self._steps}", self._pace.describe(metrics)]
        if problem is not None:
            parts.append(problem)
        self.show_note("  ".join(parts))
        phases = [
            f"{_phase_label(key)} {value:.2f} s"
            for key, value in metrics.items()
            if key.startswith("time/") and key != "time/step"
        ]
        if self._console.mode == "verbose" and phases:
            self.show_note(f"  phases: {'  '.join(phases)}")

    def show_samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Show recorded samples of one step, with escaped control characters."""
        table = Table(
            "prompt",
            "response",
            title=f"Samples at step {records[0]['step']}",
            title_justify="left",
        )
        table.add_column("reward", justify="right")
        for record in records:
            table.add_row(
                _escape_control_characters(record["prompt"]),
                _escape_control_characters(record["response"]),
                f"{record['reward']:.3f}",
            )
        print_table(self._console, table)

    def close(self) -> None:
        """Restore the state of the terminal."""


class _StatusColumn(ProgressColumn):
    """Column with the status of a run, which ends with "…" where the terminal is too narrow."""

    def render(self, task: Task) -> Text:
        """Return the status."""
        return Text(escape_controls(task.description), no_wrap=True, overflow="ellipsis")


class LiveProgress(PlainProgress):
    """Progress of a run as a bar at the bottom of a terminal; steps, notes and samples scroll above
    it."""

    def __init__(self, steps: int, console: RunConsole) -> None:
        """Draw the bar. See `PlainProgress` for the arguments."""
        super().__init__(steps, console)
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            # The columns fit into a terminal of 60 columns.
            BarColumn(bar_width=12, table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            _StatusColumn(table_column=Column(no_wrap=False)),
        )
        # Do not redirect the streams: the launcher prints through the console, or after `close`.
        self._bar = Progress(
            *columns, console=console, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self._bar.add_task("", total=steps)
        self._bar.start()

    def show_status(self, text: str) -> None:
        """Show the status text beside the progress bar."""
        self._bar.update(self._task, description=text)

    def show_step(self, metrics: Mapping[str, float], problem: str | None = None) -> None:
        """Print a recorded step above the bar, and advance the bar."""
        super().show_step(metrics, problem)
        left = self._pace.seconds_left
        description = "" if left is None else f"ETA {timedelta(seconds=round(left))}"
        self._bar.update(self._task, completed=int(metrics["step"]), description=description)

    def close(self) -> None:
        """Stop drawing the bar."""
        self._bar.stop()


class QuietProgress(PlainProgress):
    """Progress of `quiet`: only exceptions of the user's code, on standard error."""

    def show_error(self, text: str) -> None:
        """Print an exception of the user's code."""
        print_line(Console(stderr=True), text)


class JsonProgress(PlainProgress):
    """Progress of `json`: one event on standard output for each step, note and group of samples."""

    def __init__(self, steps: int, console: RunConsole, directory: str) -> None:
        """Create the output.

        Args:
            steps: Number of steps of the run.
            console: Console that prints the events.
            directory: Run directory, which is part of each event of a step.
        """
        super().__init__(steps, console)
        self._directory = directory

    def show_note(self, text: str) -> None:
        """Print a note."""
        self._console.print_event("note", message=text)

    def show_error(self, text: str) -> None:
        """Print an exception of the user's code."""
        self._console.print_event("error", message=text)

    def show_step(self, metrics: Mapping[str, float], problem: str | None = None) -> None:
        """Print a step with all of its metrics. See `PlainProgress.show_step`."""
        self._pace.add(metrics)
        self._console.print_event(
            "step",
            directory=self._directory,
            step=int(metrics["step"]),
            steps=self._steps,
            seconds_left=self._pace.seconds_left,
            problem=problem,
            metrics=metrics,
        )

    def show_samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Print recorded samples of one step."""
        self._console.print_event("samples", step=records[0]["step"], samples=records)


def make_progress(steps: int, console: RunConsole, directory: str = "") -> PlainProgress:
    """Return the progress of the console's output mode.

    `normal` and `verbose` have a bar if the console is a terminal, otherwise plain lines.
    FORCE_COLOR makes `console.is_terminal` true for pipes and notebooks too, where a bar cannot
    overwrite itself, so the file decides. The bar cannot overwrite itself with TERM=dumb either.

    Args:
        steps: Number of steps of the run.
        console: Console for the output.
        directory: Run directory, for `json`.
    """
    if console.mode == "json":
        return JsonProgress(steps, console, directory)
    if console.mode == "quiet":
        return QuietProgress(steps, console)
    has_bar = console.is_terminal and console.file.isatty() and not console.is_dumb_terminal
    return (LiveProgress if has_bar else PlainProgress)(steps, console)


def _create_table(title: str, label: str, *columns: str) -> Table:
    """Return an empty table with a left-aligned label column and right-aligned value columns."""
    table = Table(label, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _escape_control_characters(text: str) -> Text:
    return Text(
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    )


def window_mean(metrics: Sequence[Mapping[str, float]], key: str) -> float | None:
    """Return the mean of a metric over the steps that measured it; None if no step measured it."""
    values = [record[key] for record in metrics if key in record]
    return sum(values) / len(values) if values else None


def _phase_label(metric: str) -> str:
    """Return the name of a phase in the summary."""
    phase = metric.removeprefix("time/")
    return _PHASE_LABELS.get(phase, phase.replace("_", " "))


def build_summary_table(metrics: Sequence[Mapping[str, float]]) -> Table:
    """Return a table of means over the first and the last five steps (fewer if the run is
    shorter)."""
    first = metrics[:WINDOW_STEPS]
    last = metrics[-WINDOW_STEPS:]
    phases = sorted(
        {key for record in metrics for key in record if key.startswith("time/")} - {"time/step"}
    )
    table = _create_table(
        f"Summary of {len(metrics)} steps",
        "mean of steps",
        f"first {len(first)}",
        f"last {len(last)}",
        "change",
    )
    for key, name in {
        **_SUMMARY_LABELS,
        **{phase: f"  {_phase_label(phase)} (s)" for phase in phases},
    }.items():
        first_mean = window_mean(first, key)
        last_mean = window_mean(last, key)
        if first_mean is not None and last_mean is not None:
            table.add_row(
                name, f"{first_mean:.4f}", f"{last_mean:.4f}", f"{last_mean - first_mean:+.4f}"
            )
    return table


def build_evaluation_table(metrics: Sequence[Mapping[str, float]]) -> Table | None:
    """Return a table that compares the first with the last evaluation of responses, with 95%
    intervals; None if there is no evaluation."""
    evaluated = [
        record for record in metrics if "eval/score" in record or any(iterate_suite_metrics(record))
    ]
    if not evaluated:
        return None
    first = evaluated[0]
    last = evaluated[-1]
    table = _create_table(
        "Evaluation",
        "metric [95% interval]",
        f"step {int(first['step'])}",
        f"step {int(last['step'])}",
        "change",
    )
    for key in last:
        if key.startswith("eval/") and not key.endswith(_BOUND_SUFFIXES):
            change = f"{last[key] - first[key]:+.3f}" if key in first else ""
            table.add_row(
                key.removeprefix("eval/"),
                _format_with_interval(first, key),
                _format_with_interval(last, key),
                change,
            )
    return table


def build_metrics_table(metrics: Mapping[str, float], title: str) -> Table:
    """Return a table of one evaluation, with 95% intervals."""
    table = _create_table(title, "metric [95% interval]", "value")
    for key in metrics:
        if not key.endswith(_BOUND_SUFFIXES):
            table.add_row(key.removeprefix("eval/"), _format_with_interval(metrics, key))
    return table


def _format_with_interval(record: Mapping[str, float], key: str) -> str:
    """Return a metric with its interval if it has one; an empty string if it was not measured."""
    if key not in record:
        return ""
    low = record.get(f"{key}_low")
    high = record.get(f"{key}_high")
    return f"{record[key]:.3f}" + (
        "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    )


def format_totals(metrics: Sequence[Mapping[str, float]]) -> str:
    """Return the largest log-prob mismatch and the totals of a run, one line each."""
    lines = []
    mismatch_key = "mismatch/logprob_abs"
    if mismatches := [
        (record[mismatch_key], int(record["step"])) for record in metrics if mismatch_key in record
    ]:
        difference, step = max(mismatches)
        lines.append(
            f"largest engine-trainer log-prob difference ({mismatch_key}): {difference:.2e} at"
            f" step {step}"
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
    """Print the summary tables, the totals and the locations of the run's files."""
    # The evaluation of the initial policy has a record, but is not a step.
    steps = [record for record in metrics if record["step"] > 0]
    if steps:
        print_table(console, build_summary_table(steps))
    if (evaluations := build_evaluation_table(metrics)) is not None:
        print_table(console, evaluations)
    if steps:
        print_line(console, format_totals(steps))
    for name in ("metrics", "samples", "tensorboard", "logs", "trace", "checkpoints"):
        if (path := getattr(paths, name)).exists():
            print_line(console, f"{name}: {path}")
