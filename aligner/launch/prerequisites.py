"""Running an experiment whose result another run needs, unless that is in the cache already."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from rich.console import Console

from aligner.config.paths import can_resume, run_paths
from aligner.config.prerequisites import Prerequisite
from aligner.config.schema import Config
from aligner.errors import AlignerError
from aligner.launch.failure import failure_error
from aligner.launch.interrupts import Interrupts
from aligner.launch.kernel import LAUNCHER_PID
from aligner.launch.processes import Processes

_POLL_S = 0.1
Tell = Callable[[str], None]


def complete(first: Prerequisite, run: Callable[[Config], bool], interrupts: Interrupts, console: Console) -> bool:
    """Return when the result is there, true: at once, when another launch has made it, or after a `run` of the experiment.

    False when the run was told to stop. One that was interrupted goes on from its last checkpoint. Raises the run's own
    error, with the experiment's name, and Interrupted.
    """

    def tell(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if not first.is_complete:
        with _locked(first, interrupts, tell):
            if not first.is_complete:
                tell(f"first: experiment {first.name} ({first.gives}), run directory: {run_paths(first.config).root}")
                try:
                    if not _make(first, run, interrupts):
                        return False
                except AlignerError as error:
                    raise type(error)(f"experiment {first.name}, which comes first: {error}") from error
    tell(f"experiment {first.name}: {first.result}")
    return True


@contextlib.contextmanager
def _locked(first: Prerequisite, interrupts: Interrupts, tell: Tell) -> Iterator[None]:
    """Alone with the experiment's place in the cache; the kernel gives the lock back however the process ends."""
    first.entry.mkdir(parents=True, exist_ok=True)
    told = False
    with (first.entry / "lock").open("a+") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    lock.seek(0)
                    tell(f"waiting for experiment {first.name}, which process {lock.read()} runs: {first.entry}")
                    told = True
            interrupts.check()
            time.sleep(_POLL_S)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _make(first: Prerequisite, run: Callable[[Config], bool], interrupts: Interrupts) -> bool:
    """Run the experiment, and keep what it leaves as the result, which appears only when it is complete; false if stopped."""
    config, paths = first.config, run_paths(first.config)
    for unfinished in first.entry.glob(".result.*"):  # of a launch that was killed
        shutil.rmtree(unfinished)
    if can_resume(config):
        config = replace(config, run=replace(config.run, resume=True))
    elif paths.root.exists():
        shutil.rmtree(paths.root)
    if not run(config):
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
            interrupts.check()
            time.sleep(_POLL_S)
            processes.poll()
    if rank.exit_code:
        raise failure_error([rank])
