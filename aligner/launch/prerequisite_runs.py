"""Running an experiment whose result another run needs, unless that is in the cache already."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

from rich.console import Console

from aligner.config.prerequisites import Prerequisite
from aligner.errors import AlignerError
from aligner.files import new_directory
from aligner.launch.failure import failure_error
from aligner.launch.interrupts import Interrupts
from aligner.launch.lock import LockedError, locked
from aligner.launch.processes import Processes
from aligner.launch.run_view import print_line
from aligner.paths import run_paths
from aligner.schema import Config

_POLL_S = 0.1


def complete(first: Prerequisite, run: Callable[[Config], None], interrupts: Interrupts, console: Console) -> None:
    """Return when the result is there: at once, when another launch has made it, or after a `run` of the experiment.

    One that was interrupted goes on from its last checkpoint. Raises the run's own error, with the experiment's name,
    Interrupted, and Stopped.
    """
    waiting = False

    def wait(error: LockedError) -> None:
        """Another launch makes the result: tell which one, once, and look whether to stop."""
        nonlocal waiting
        if not waiting:
            print_line(console, f"waiting for experiment {first.name}, which {error.holder} runs: {first.entry}")
            waiting = True
        interrupts.check_before_training()
        time.sleep(_POLL_S)

    if not first.is_complete:
        with locked(first.entry, wait):
            if not first.is_complete:
                root = run_paths(first.config).root
                print_line(console, f"first: experiment {first.name} ({first.gives}), run directory: {root}")
                try:
                    _make(first, run, interrupts)
                except AlignerError as error:
                    raise type(error)(f"experiment {first.name}, which comes first: {error}") from error
    print_line(console, f"experiment {first.name}: {first.result}")


def _make(first: Prerequisite, run: Callable[[Config], None], interrupts: Interrupts) -> None:
    """Run the experiment, and keep what it leaves as the result, which appears only when it is complete."""
    config, paths = first.config, run_paths(first.config)
    for unfinished in first.entry.glob(".result.*"):  # of a launch that was killed
        shutil.rmtree(unfinished)
    run(replace(config, run=replace(config.run, resume="auto")))
    if first.gives == "preferences":
        with new_directory(first.result) as directory:
            for file in (paths.preferences, paths.responses):
                shutil.copyfile(file, directory / file.name)
    else:
        _convert(first, interrupts)
        shutil.rmtree(paths.checkpoints)  # with optimizer states, several times the result; nothing goes on from here


def _convert(first: Prerequisite, interrupts: Interrupts) -> None:
    """Write the last checkpoint's model as a Hugging Face directory, in a process of its own: this one has no torch."""
    paths = run_paths(first.config)
    command = (sys.executable, "-m", "aligner", "convert", str(paths.root), str(first.result))
    with closing(Processes(first.config.cluster.stop_timeout_s)) as processes:
        rank = processes.spawn("convert", 0, command, {}, paths.log("convert", 0))
        while rank.poll():
            interrupts.check_before_training()
            time.sleep(_POLL_S)
    if rank.exit_code:
        raise failure_error([rank])
