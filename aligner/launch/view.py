"""The launcher's view of a run: its files, followed and shown."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from aligner.observability.metrics import FileFollower
from aligner.observability.progress import make_progress
from aligner.paths import RunPaths
from aligner.schema import Config


class RunView:
    """Shows steps and samples as the trainer records them."""

    def __init__(self, config: Config, paths: RunPaths, console: Console) -> None:
        # A resumed run's earlier steps have been seen.
        self._metrics = FileFollower(paths.metrics, from_end=config.run.resumes)
        self._samples = FileFollower(paths.samples, from_end=config.run.resumes)
        self._progress = make_progress(config.run.steps, console)
        self._waiting: list[str] | None = None
        self._pending: list[dict[str, Any]] = []

    def waiting_for(self, roles: list[str]) -> None:
        """Tell which servers are not healthy yet, when that has changed."""
        if roles != self._waiting:
            self._waiting = roles
            self._progress.status(f"waiting for {', '.join(roles)}" if roles else "all servers are healthy")

    def note(self, text: str) -> None:
        """Tell what has happened, on a line that stays."""
        self._progress.note(text)

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

    def finish(self) -> None:
        """Show what is left."""
        self.update()
        self.update()

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._progress.close()
