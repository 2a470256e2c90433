"""`aligner launch --multirun`: the runs of a sweep, one after the other.

Each run is an `aligner launch` process with its own run directory in the directory of the sweep.
`sweep.json` in this directory lists the runs, so that the sweep can be resumed.
"""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich import box
from rich.table import Table
from rich.text import Text

from aligner.config.compose import mask_override
from aligner.config.sweeps import SweepPoint
from aligner.errors import (
    FINISHED,
    RESUMABLE,
    STOP_SIGNAL,
    AlignerError,
    ConfigError,
    Interrupted,
    Stopped,
)
from aligner.file_limits import parse_json
from aligner.files import write_file
from aligner.launcher.status import RunStatus, read_status
from aligner.observability.console import RunConsole, describe_step, print_line, print_table
from aligner.paths import PRIVATE_MODE, RunPaths

SWEEP_FILE = "sweep.json"
"""Name of the file that lists the runs of a sweep."""


@dataclass
class SweepRun:
    """A run of a sweep."""

    point: SweepPoint
    """Overrides of the run."""
    directory: Path
    """Run directory."""
    exit_code: int | None = None
    """Exit code of the launch; None if the run was not launched."""

    def read_status(self) -> RunStatus | None:
        """Return the status of the run; None if it has no run directory."""
        try:
            return read_status(self.directory)
        except AlignerError:
            return None

    @property
    def state(self) -> str:
        """State of the run, as in `aligner status`, or `not started`."""
        status = self.read_status()
        if status is not None:
            return status.state
        return "not started" if self.exit_code is None else "failed"


@dataclass(frozen=True)
class Sweep:
    """A sweep: its command and directory."""

    options: tuple[str, ...]
    """Options of the command line that apply to all runs, such as `--config-dir DIR`."""
    overrides: tuple[str, ...]
    """Overrides of the command line, as the user wrote them."""
    name: str
    """Name of the sweep, with which the names of the runs begin."""
    directory: Path
    """Directory of the sweep."""
    is_resumed: bool
    """Whether an earlier launch started the sweep."""

    @property
    def resume_command(self) -> str:
        """Command that resumes the sweep."""
        overrides = [
            mask_override(text)
            for text in self.overrides
            if text.partition("=")[0] not in ("run.dir", "run.resume")
        ]
        words = ("aligner", "launch", "--multirun", *self.options, *overrides)
        return shlex.join((*words, f"run.dir={self.directory}", "run.resume=auto"))


class _Signals:
    """Context manager that passes signals on to the process of the current run.

    The process has its own session, so that Ctrl-C reaches it only through this object.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        """Signals in the order of their arrival."""
        self._forwarded = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "_Signals":
        numbers = [signal.SIGINT, signal.SIGTERM, STOP_SIGNAL]
        # nohup sets SIGHUP to be ignored.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._record) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        self._forward()

    def _forward(self) -> None:
        """Send the signals to the process that have not been sent yet, if there is a process."""
        while self._process is not None and self._forwarded < len(self.received):
            self._forwarded += 1
            self._process.send_signal(self.received[self._forwarded - 1])

    def run(self, command: Sequence[str]) -> int:
        """Run a command, and return its exit code."""
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._forward()  # signals that arrived during the start of the process
        code = self._process.wait()
        self._process = None
        return code


def launch_sweep(
    sweep: Sweep, points: Sequence[SweepPoint], console: RunConsole | None = None
) -> None:
    """Launch the runs of a sweep one after the other, and print a table of the results.

    A failed run does not end the sweep. Runs that an earlier launch has finished are skipped. With
    `cluster=slurm`, each launch submits a job and returns at once.

    Args:
        sweep: The sweep.
        points: Overrides of the runs.
        console: Console for the output; default is a console of the mode `normal`.

    Raises:
        ConfigError: The directory contains another run or sweep. Nothing was started.
        AlignerError: Some runs failed.
        Stopped: A signal requested the end of the sweep, and the current run has ended as after the
            same signal to `aligner launch`.
        Interrupted: A signal requested the immediate end of the sweep.
    """
    runs = _prepare_directory(sweep, points)
    console = console or RunConsole()
    if console.mode == "json":
        console.print_event("sweep_start", directory=str(sweep.directory), runs=len(runs))
    else:
        print_line(console, f"sweep directory: {sweep.directory} ({len(runs)} runs)")

    with _Signals() as signals:
        for number, run in enumerate(runs, start=1):
            if signals.received:
                break
            title = f"run {number}/{len(runs)}: {run.point.description}".rstrip(": ")
            if sweep.is_resumed and run.state == "finished":
                print_line(console, f"{title}: finished already")
                continue
            if console.mode == "json":
                console.print_event("sweep_run", number=number, overrides=list(run.point.swept))
            else:
                print_line(console, title)
                # The process writes to the same file.
                sys.stdout.flush()
            run.exit_code = signals.run(_build_command(sweep, run, console.mode))

        with console.showing_result():
            _print_result(sweep, runs, console)
            failed = [
                number for number, run in enumerate(runs, start=1) if run.exit_code not in (None, 0)
            ]
            if signals.received or failed:
                print_line(console, f"resume the sweep with: {sweep.resume_command}")
    if signals.received:
        _raise_stopped(runs, signals.received[-1])
    if failed:
        raise AlignerError(
            f"sweep: {len(failed)} of {len(runs)} runs failed: {', '.join(map(str, failed))}"
        )


def _prepare_directory(sweep: Sweep, points: Sequence[SweepPoint]) -> list[SweepRun]:
    """Create the directory of a sweep with `sweep.json`, or check that it contains this sweep.

    Raises:
        ConfigError: The directory contains a run or another sweep, or cannot be created.
    """
    directory = sweep.directory
    file = directory / SWEEP_FILE
    if RunPaths(directory).config.exists():
        raise ConfigError(
            f"run.dir={directory}: contains a run; with --multirun, run.dir is the directory of the"
            " sweep; choose another directory"
        )
    masked_points = [[mask_override(text) for text in point.overrides] for point in points]
    if not file.is_file():
        runs = [SweepRun(point, directory / str(number)) for number, point in enumerate(points, 1)]
        entries = [
            {"overrides": overrides, "directory": run.directory.name}
            for overrides, run in zip(masked_points, runs, strict=True)
        ]
        try:
            directory.mkdir(PRIVATE_MODE, parents=True, exist_ok=True)
            write_file(file, json.dumps({"runs": entries}, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ConfigError(f"run.dir={directory}: cannot be created: {error}") from error
        return runs

    if not sweep.is_resumed:
        raise ConfigError(
            f"run.dir={directory}: contains a sweep already; resume the sweep with run.resume=auto,"
            " or choose another run.dir or run.name"
        )
    stored = {
        tuple(entry["overrides"]): str(entry["directory"])
        for entry in parse_json(file.read_text(encoding="utf-8"))["runs"]
    }
    if stored.keys() != {tuple(overrides) for overrides in masked_points}:
        raise ConfigError(
            f"run.dir={directory}: contains a sweep with other overrides ({file}); repeat its"
            " overrides to resume it, or choose another run.dir or run.name"
        )
    return [
        SweepRun(point, directory / stored[tuple(overrides)])
        for point, overrides in zip(points, masked_points, strict=True)
    ]


def _build_command(sweep: Sweep, run: SweepRun, mode: str) -> list[str]:
    """Return the command that launches a run of the sweep."""
    mode_option = () if mode == "normal" else (f"--{mode}",)
    return [
        *(sys.executable, "-m", "aligner", "launch"),
        *mode_option,
        *sweep.options,
        *run.point.overrides,
        f"run.dir={run.directory}",
        f"run.name={sweep.name}-{run.directory.name}",
        f"run.resume={'auto' if sweep.is_resumed else 'false'}",
    ]


def _print_result(sweep: Sweep, runs: Sequence[SweepRun], console: RunConsole) -> None:
    """Print the state and the last metrics of each run, as a table or as an event of `json`."""
    statuses = [run.read_status() for run in runs]
    if console.mode == "json":
        results = [
            {
                "overrides": list(run.point.swept),
                "directory": str(run.directory),
                "state": run.state,
                "exit_code": run.exit_code,
                "step": 0 if status is None else status.step,
                "metrics": {} if status is None else status.metrics,
            }
            for run, status in zip(runs, statuses, strict=True)
        ]
        console.print_event("sweep", directory=str(sweep.directory), runs=results)
        return

    table = Table(box=box.SIMPLE)
    for column in ("run", "overrides", "state", "step", "result"):
        is_wide = column == "overrides"
        table.add_column(column, overflow="fold", no_wrap=not is_wide)
    for run, status in zip(runs, statuses, strict=True):
        texts = [] if status is None else describe_step(status.metrics, None, None)
        table.add_row(
            run.directory.name,
            Text("\n".join(run.point.swept)),
            run.state,
            "" if status is None else f"{status.step}/{status.steps}",
            # The first text is the reward of an online run, or the loss of an offline run.
            "".join(texts[:1]),
        )
    print_table(console, table)
    print_line(console, f"run directories: {sweep.directory}/RUN")


def _raise_stopped(runs: Sequence[SweepRun], number: int) -> NoReturn:
    """Raise the error of a sweep that a signal has ended.

    Args:
        runs: The runs of the sweep.
        number: The last signal.
    """
    codes = [run.exit_code for run in runs if run.exit_code is not None]
    if codes and codes[-1] not in (FINISHED, RESUMABLE):
        raise Interrupted(number)
    raise Stopped("sweep stopped on request")
