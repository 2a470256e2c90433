"""Running an experiment whose result another run needs, unless that is in the cache already."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console

from aligner.config.prerequisites import Prerequisite
from aligner.errors import AlignerError
from aligner.launch.failure import failure_error
from aligner.launch.interrupts import Interrupts
from aligner.launch.kernel import LAUNCHER_PID
from aligner.launch.lock import LockedError, locked
from aligner.launch.processes import Processes
from aligner.paths import run_paths
from aligner.schema import Config

_POLL_S = 0.1
Tell = Callable[[str], None]


def complete(first: Prerequisite, run: Callable[[Config], bool], interrupts: Interrupts, console: Console) -> bool:
    """Return when the result is there, true: at once, when another launch has made it, or after a `run` of the experiment.

    False when the experiment was stopped as it ran. One that was interrupted goes on from its last checkpoint. Raises the
    run's own error, with the experiment's name, Interrupted, and Stopped.
    """

    def tell(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if not first.is_complete:
        with locked(first.entry, _wait(first, interrupts, tell)):
            if not first.is_complete:
                tell(f"first: experiment {first.name} ({first.gives}), run directory: {run_paths(first.config).root}")
                try:
                    if not _make(first, run, interrupts):
                        return False
                except AlignerError as error:
                    raise type(error)(f"experiment {first.name}, which comes first: {error}") from error
    tell(f"experiment {first.name}: {first.result}")
    return True


def _wait(first: Prerequisite, interrupts: Interrupts, tell: Tell) -> Callable[[LockedError], None]:
    """What is done while another launch makes the result: tell whose turn it is, once, and look whether to stop."""
    told: list[LockedError] = []

    def wait(error: LockedError) -> None:
        if not told:
            told.append(error)
            tell(f"waiting for experiment {first.name}, which {error.holder} runs: {first.entry}")
        interrupts.check_before_training()
        time.sleep(_POLL_S)

    return wait


def _make(first: Prerequisite, run: Callable[[Config], bool], interrupts: Interrupts) -> bool:
    """Run the experiment, and keep what it leaves as the result, which appears only when it is complete; false if stopped."""
    config, paths = first.config, run_paths(first.config)
    for unfinished in first.entry.glob(".result.*"):  # of a launch that was killed
        shutil.rmtree(unfinished)
    if not run(replace(config, run=replace(config.run, resume="auto"))):
        return False
    if first.gives == "preferences":
        unfinished = first.entry / ".result.unfinished"
        unfinished.mkdir()
        for file in (paths.preferences, paths.responses):
            shutil.copyfile(file, unfinished / file.name)
        unfinished.rename(first.result)
    else:
        _convert(first, interrupts)
        shutil.rmtree(paths.checkpoints)  # with optimizer states, several times the result; nothing goes on from here
    return True


def _convert(first: Prerequisite, interrupts: Interrupts) -> None:
    """Write the last checkpoint's model as a Hugging Face directory, in a process of its own: this one has no torch."""
    paths = run_paths(first.config)
    command = (sys.executable, "-m", "aligner", "convert", str(paths.root), str(first.result))
    with Processes(first.config.cluster.stop_timeout_s) as processes:
        rank = processes.spawn("convert", 0, command, {LAUNCHER_PID: str(os.getpid())}, paths.log("convert", 0))
        while rank.exit_code is None:
            interrupts.check_before_training()
            time.sleep(_POLL_S)
            processes.poll()
    if rank.exit_code:
        raise failure_error([rank])
