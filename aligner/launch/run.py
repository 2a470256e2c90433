"""What every run begins and ends with, wherever its roles run: signals, its directory, its summary."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator

from rich.console import Console

from aligner.config.access import create_access_key
from aligner.config.compose import save_config
from aligner.config.paths import RunPaths, run_paths
from aligner.config.schema import Config
from aligner.errors import RESUMABLE, AlignerError, ConfigError
from aligner.launch.interrupts import Interrupted, Interrupts
from aligner.observability.metrics import read_metrics
from aligner.observability.summary import print_summary
from aligner.observability.trace import write_trace


def interruptible(work: Callable[[Interrupts], bool], console: Console) -> int:
    """Do the work, which says whether it came to its end; returns the exit code."""
    with Interrupts() as interrupts:
        try:
            if work(interrupts):
                return 0
        except Interrupted as stop:
            console.print(f"stopped by {stop}; every process of the run has ended", markup=False)
            return 128 + stop.number
    console.print("stopped with a checkpoint; the run goes on from there with run.resume=true", markup=False, soft_wrap=True)
    return RESUMABLE


@contextlib.contextmanager
def run_directory(config: Config, console: Console) -> Iterator[RunPaths]:
    """The run's directory, with its configuration and its key; with its trace and, where all went well, a summary at the end.

    Nothing is left of a run that is refused before its trainer starts.
    """
    paths = run_paths(config)
    paths.root.mkdir(parents=True, exist_ok=True)
    save_config(config, paths.config)
    create_access_key(config)
    try:
        yield paths
    except ConfigError:
        if not config.run.resume:  # nothing has started: leave nothing behind
            shutil.rmtree(paths.root)
        raise
    finally:
        _write_trace(paths, console)
    print_summary(read_metrics(paths.metrics), paths, console)


def _write_trace(paths: RunPaths, console: Console) -> None:
    """The run's timeline as one file, however the run has ended; it does not fail for want of it."""
    try:
        write_trace(paths)
    except (AlignerError, OSError) as error:
        console.print(f"{paths.trace} was not written: {error}", markup=False, highlight=False, soft_wrap=True)
