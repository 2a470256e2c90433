"""What the launcher prints of a run: its steps and samples, followed in their files, and lines of its own."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from aligner.observability.console import make_progress
from aligner.observability.metrics import FileFollower
from aligner.paths import run_paths
from aligner.schema import Config


def print_line(console: Console, text: str) -> None:
    """Print a text as it is, without markup, colours or line breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class RunView:
    """Shows steps and samples as the trainer records them."""

    def __init__(self, config: Config, console: Console) -> None:
        paths = run_paths(config)
        # A resumed run's earlier steps have been seen.
        self._metrics = FileFollower(paths.metrics, from_end=config.run.resumes)
        self._samples = FileFollower(paths.samples, from_end=config.run.resumes)
        self._progress = make_progress(config.run.steps, console)
        self.note = self._progress.note
        """Tells what has happened, on a line that stays."""
        self._waiting: list[str] | None = None
        self._pending: list[dict[str, Any]] = []

    def waiting_for(self, roles: list[str]) -> None:
        """Tell which servers are not healthy yet, when that has changed."""
        if roles != self._waiting:
            self._waiting = roles
            self._progress.status(f"waiting for {', '.join(roles)}" if roles else "all servers are healthy")

    def update(self) -> None:
        """Show what is new."""
        for record in self._metrics.new_records():
            self._progress.step(record)
        more = self._samples.new_records()
        # A step's samples come one by one: they are shown when no more have come.
        if self._pending and not more:
            self._progress.samples(self._pending)
            self._pending = []
        self._pending += more

    def close(self) -> None:
        """Show what is left, and leave the terminal as it was."""
        self.update()
        self.update()
        self._progress.close()
