"""What every run begins and ends with, wherever its roles run: signals, its directory, its summary."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator

from rich.console import Console

from aligner.config.compose import save_config
from aligner.config.resume import check_directory, is_unused, settled
from aligner.errors import RESUMABLE, AlignerError, ConfigError
from aligner.launch.interrupts import Interrupted, Interrupts, Stopped
from aligner.launch.lock import LockedError, locked
from aligner.observability.console import print_summary
from aligner.observability.metrics import read_metrics
from aligner.observability.trace import write_trace
from aligner.paths import RunPaths, run_paths
from aligner.placement.addresses import create_access_key
from aligner.schema import Config


def interruptible(work: Callable[[Interrupts], bool], console: Console, goes_on: str = "with run.resume=auto") -> int:
    """Do the work, which says whether it came to its end; returns the exit code.

    `goes_on` is told of a run that was stopped before that: how it goes on.
    """
    with Interrupts() as interrupts:
        try:
            if work(interrupts):
                return 0
        except Interrupted as stop:
            console.print(f"stopped by {stop}; every process of the run has ended", markup=False)
            return 128 + stop.number
        except Stopped as stopped:
            console.print(str(stopped), markup=False, soft_wrap=True)
    console.print(f"stopped; the run goes on {goes_on}", markup=False, soft_wrap=True)
    return RESUMABLE


@contextlib.contextmanager
def run_directory(config: Config, console: Console, patience_s: float = 0.0) -> Iterator[Config]:
    """Alone with the run's directory, which is ready to start or to resume; gives the configuration, run.resume settled.

    With the run's trace and, where all went well, a summary at the end. Raises ConfigError where the directory is another
    launch's, after waiting so long for that one's end, or another run's. Nothing is left of a run that is refused before its
    trainer starts.
    """
    paths, deadline = run_paths(config), time.monotonic() + patience_s

    def wait(error: LockedError) -> None:
        if time.monotonic() >= deadline:
            raise error

    with locked(paths.root, wait):
        check_directory(config)
        is_new, config = is_unused(paths), settled(config)
        if not config.run.resumes:
            _forget_training(paths)
        try:
            save_config(config, paths.config)
            create_access_key(config)
            yield config
        except ConfigError:
            if is_new:
                shutil.rmtree(paths.root)
            raise
        finally:
            _write_trace(paths, console)
        print_summary(read_metrics(paths.metrics), paths, console)


def _forget_training(paths: RunPaths) -> None:
    """Remove what a start that did not come to its first checkpoint has left."""
    for path in paths.of_training:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _write_trace(paths: RunPaths, console: Console) -> None:
    """The run's timeline as one file, however the run has ended; it does not fail for want of it."""
    try:
        write_trace(paths)
    except (AlignerError, OSError) as error:
        console.print(f"{paths.trace} was not written: {error}", markup=False, highlight=False, soft_wrap=True)
