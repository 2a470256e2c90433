"""What a waiting user sees: a live bar on a terminal, a line a step elsewhere, and tables of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

WINDOW = 5
"""Steps over which the seconds per step, and with them the time left, are averaged."""

_SHOWN = {
    "reward/mean": "reward {:.3f}",
    "kl/reference": "KL {:.4f}",
    **{f"{trainer}/loss": "loss {:.4f}" for trainer in ("sft", "dpo", "reward_model")},
    **{f"{trainer}/accuracy": "accuracy {:.3f}" for trainer in ("dpo", "reward_model")},
    "eval/loss": "held-out loss {:.4f}",
    "eval/score": "held-out score {:.3f}",
    "eval/pass@1": "pass@1 {:.3f}",
    "eval/win_rate": "win rate {:.3f}",
}


class ProgressView(Protocol):
    """Shows how a run goes."""

    def status(self, text: str) -> None:
        """What is being waited for, before the first step."""
        ...

    def note(self, text: str) -> None:
        """Something out of the ordinary has happened."""
        ...

    def step(self, metrics: Mapping[str, float]) -> None:
        """A step has been recorded."""
        ...

    def samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Samples of one step have been recorded."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class Pace:
    """How fast a run of so many steps goes: the mean of its newest ones."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done = steps, 0
        self._recent: list[float] = []

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take another step's metrics."""
        self._done = int(metrics["step"])
        if "time/step" in metrics:
            self._recent = [*self._recent, metrics["time/step"]][-WINDOW:]

    @property
    def seconds_per_step(self) -> float | None:
        """None before a step was timed."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    @property
    def seconds_left(self) -> float | None:
        """To the run's last step."""
        pace = self.seconds_per_step
        return None if pace is None else pace * (self._steps - self._done)

    def describe(self, metrics: Mapping[str, float]) -> str:
        """What the step has learned, and pace and time left; what it did not measure is left out."""
        parts = describe_learning(metrics)
        if "time/step" in metrics and self.seconds_per_step is not None and self.seconds_left is not None:
            left = timedelta(seconds=round(self.seconds_left))
            parts += [f"{self.seconds_per_step:.2f} s/step", f"ETA {left}"]
        return "  ".join(parts)


def describe_learning(metrics: Mapping[str, float]) -> list[str]:
    """A step's reward, KL, loss and evaluation, as far as they were measured."""
    return [text.format(metrics[key]) for key, text in _SHOWN.items() if key in metrics]


def _printable(text: str) -> Text:
    return Text("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text))


def samples_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Prompts, responses and rewards; control characters are shown escaped."""
    table = Table(title=f"samples of step {records[0]['step']}", title_justify="left")
    table.add_column("prompt")
    table.add_column("response")
    table.add_column("reward", justify="right")
    for record in records:
        table.add_row(_printable(record["prompt"]), _printable(record["response"]), f"{record['reward']:.3f}")
    return table


class PlainProgress:
    """One line a step, for logs."""

    def __init__(self, steps: int, console: Console) -> None:
        self._steps = steps
        self._console = console
        self._pace = Pace(steps)

    def status(self, text: str) -> None:
        """Print it."""
        self._line(text)

    note = status

    def step(self, metrics: Mapping[str, float]) -> None:
        """Print the step's line."""
        self._pace.add(metrics)
        self._line(f"step {int(metrics['step'])}/{self._steps}  {self._pace.describe(metrics)}")

    def samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Print the table."""
        self._console.print(samples_table(records))

    def close(self) -> None:
        """Nothing to undo."""

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveProgress:
    """A bar at the bottom of a terminal, samples scrolling above it."""

    def __init__(self, steps: int, console: Console) -> None:
        self._pace = Pace(steps)
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}", markup=False))
        # No redirection: the launcher's own prints go through the console or come after close().
        self._bar = Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False)
        self._task = self._bar.add_task("", total=steps)
        self._bar.start()

    def status(self, text: str) -> None:
        """Show it beside the bar."""
        self._bar.update(self._task, description=text)

    def note(self, text: str) -> None:
        """Print it above the bar."""
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, metrics: Mapping[str, float]) -> None:
        """Advance the bar."""
        self._pace.add(metrics)
        self._bar.update(self._task, completed=int(metrics["step"]), description=self._pace.describe(metrics))

    def samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Print the table above the bar."""
        self._bar.console.print(samples_table(records))

    def close(self) -> None:
        """Stop drawing."""
        self._bar.stop()


def make_progress(steps: int, console: Console) -> ProgressView:
    """The view that fits the console."""
    return LiveProgress(steps, console) if console.is_terminal else PlainProgress(steps, console)
