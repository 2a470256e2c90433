"""A run's metrics in Weights & Biases."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, cast

from aligner.files import write_file
from aligner.observability.sinks import Record
from aligner.paths import RunPaths
from aligner.schema import Config

SUPERSEDED = "superseded"
"""Where, below the run's `wandb` directory, what was recorded offline before a resume is kept: its steps are recorded anew."""


class WandbSink:
    """One run of Weights & Biases, under the same id however often the run is resumed."""

    def __init__(self, config: Config, paths: RunPaths) -> None:
        import wandb

        settings, id_file = config.logging.wandb, paths.tracker_run("wandb")
        is_resumed = id_file.exists()
        if not is_resumed:
            write_file(id_file, secrets.token_hex(8))
        paths.wandb.mkdir(exist_ok=True)
        for earlier in [*paths.wandb.glob("offline-run-*")]:
            (paths.wandb / SUPERSEDED).mkdir(exist_ok=True)
            earlier.rename(paths.wandb / SUPERSEDED / earlier.name)
        self._run: Any = wandb.init(
            dir=str(paths.root),
            id=id_file.read_text(),
            name=config.run.name,
            mode=cast(Literal["offline", "online"], settings.mode),
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            tags=settings.tags,
            config=asdict(config),
            resume="allow" if is_resumed and settings.mode == "online" else None,
            allow_val_change=True,
            reinit="create_new",  # no run of the process's: there may be others
            settings=wandb.Settings(console="off", silent=True, save_code=False, disable_git=True),
        )
        self._next = int(self._run.step)

    def write(self, step: int, record: Record) -> None:
        """Log a step, at once; one that the server has already, from before the run was resumed, stays as it is there."""
        if step >= self._next:
            self._run.log(dict(record), step=step, commit=True)
            self._next = step + 1

    def resume(self, kept: Sequence[Record]) -> None:
        """Log again what this run does not have: offline everything, for it begins anew."""
        for record in kept:
            self.write(int(record["step"]), {key: value for key, value in record.items() if key != "step"})

    def close(self, failed: bool) -> None:
        """Finish the run, and wait for wandb's own process, which is still writing then."""
        import wandb

        self._run.finish(exit_code=int(failed))
        wandb.teardown(exit_code=int(failed))
