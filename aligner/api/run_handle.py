"""`aligner.launch`, `aligner.load_run` and `Run`: runs as Python objects.

`launch` runs the command `aligner launch` in a child process, so a run has the same processes as a
run that was started on the command line. `LiveOutput` and `NotebookOutput` show the output of that
command.
"""

import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from aligner.api.arguments import ChildCommand, Records, launch_arguments, write_records
from aligner.config.compose import load_config
from aligner.config.conf_files import find_config_sources, list_group_options
from aligner.errors import STOP_SIGNAL, AlignerError, ConfigError, build_exit_error
from aligner.launcher.job_systems import get_job_system
from aligner.launcher.run_directory import read_state
from aligner.launcher.status import ENDED_STATES, RunStatus, describe_status, read_status
from aligner.observability.console import WINDOW_STEPS, Pace
from aligner.observability.metrics import read_metrics, read_records
from aligner.observability.sample_files import read_samples, sample_steps
from aligner.paths import RunPaths
from aligner.schema import Config
from aligner.terminal import print_text

if TYPE_CHECKING:
    import pandas as pd

# Seconds between two updates of a notebook's output.
_REFRESH_S = 0.5
# Number of output lines that a notebook shows while the command runs, and after its end.
_ACTIVE_LINES = 16
_FINAL_LINES = 48
_WIDTH = 100


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


class LiveOutput:
    """Show the output of a command, in a script or a terminal. The caller triggers each update."""

    def __init__(self, command: ChildCommand) -> None:
        """Create the display without output.

        Args:
            command: The running command.
        """
        self._command = command
        self._shown_characters = 0

    def begin(self, directory: Path) -> None:
        """Do nothing with the run directory: only a notebook shows a progress bar of the run."""

    def update(self) -> None:
        """Print the output since the last update."""
        printed = self._command.printed
        print(printed[self._shown_characters :], end="", flush=True)
        self._shown_characters = len(printed)

    def close(self) -> None:
        """Print the remaining output after the command has ended."""
        self.update()


class NotebookOutput(LiveOutput):
    """Show the output of a command below the cell that started it.

    A thread updates the output, so that it also changes while other cells run.
    """

    def __init__(self, command: ChildCommand) -> None:
        """Create the display below the current cell, and start the thread.

        Args:
            command: The running command.
        """
        super().__init__(command)
        from IPython.display import display

        self._paths: RunPaths | None = None
        self._shown_bundle: dict[str, str] = {}
        self._display: Any = display({"text/plain": ""}, raw=True, display_id=True)
        self._thread = threading.Thread(target=self._follow, name="aligner output", daemon=True)
        self._thread.start()

    def begin(self, directory: Path) -> None:
        """Show a progress bar of the run in this directory from now on."""
        self._paths = RunPaths(directory)

    def update(self) -> None:
        """Do nothing: the thread updates the display."""

    def close(self) -> None:
        """Wait until the thread has shown the complete output."""
        self._thread.join()

    def _follow(self) -> None:
        """Update the display every `_REFRESH_S` seconds until the command has ended."""
        has_ended = threading.Event()
        while not has_ended.wait(_REFRESH_S):
            if self._command.exit_code is not None:
                has_ended.set()
            bundle = render_notebook_output(
                self._command.printed,
                self._paths,
                _FINAL_LINES if has_ended.is_set() else _ACTIVE_LINES,
            )
            if bundle != self._shown_bundle:
                self._display.update(bundle, raw=True)
                self._shown_bundle = bundle


def render_notebook_output(printed: str, paths: RunPaths | None, lines: int) -> dict[str, str]:
    """Return the output of a command as HTML and as plain text, below a progress bar of the run.

    Args:
        printed: The output of the command.
        paths: Paths of the run directory; None if it is not known yet. The bar appears with the
            first step.
        lines: Maximum number of output lines.

    Returns:
        A MIME bundle with the keys `text/html` and `text/plain`.
    """
    parts: list[Any] = []
    if paths is not None and (metrics := read_metrics(paths.metrics)):
        pace = Pace(load_config(paths.config).run.steps)
        for record in metrics[-WINDOW_STEPS:]:
            pace.add(record)
        parts.append(Text(f"step {pace.done}/{pace.steps}  {pace.describe(metrics[-1])}"))
        bar = Table.grid()  # a table ends with a line break
        bar.add_row(ProgressBar(total=pace.steps, completed=pace.done, width=60))
        parts.append(bar)
    # The quoted log of a failed rank may contain escape codes.
    parts.append(Text.from_ansi("\n".join(printed.splitlines()[-lines:])))
    console = Console(file=io.StringIO(), record=True, width=_WIDTH, force_jupyter=False)
    for part in parts:
        console.print(part)
    html = console.export_html(
        inline_styles=True, clear=False, code_format="<pre style='line-height:1.2'>{code}</pre>"
    )
    return {"text/html": html, "text/plain": console.export_text()}


def create_output(command: ChildCommand) -> LiveOutput:
    """Return the output for this kind of process: a notebook or a script."""
    return NotebookOutput(command) if is_notebook() else LiveOutput(command)


_POLL_S = 0.1
# Seconds between two checks of a run that another process launched.
_STATUS_INTERVAL_S = 2.0
# Text that `aligner launch` prints before the run directory.
_DIRECTORY_PREFIX = "run directory: "


def launch(
    model: str | os.PathLike[str] | None = None,
    algorithm: str | None = None,
    reward: "str | Callable[..., Any] | None" = None,
    data: "str | os.PathLike[str] | Records | pd.DataFrame | None" = None,
    *,
    overrides: Sequence[str] = (),
    config_dir: str | os.PathLike[str] | None = None,
    **keys: Any,
) -> "Run":
    """Start a run, like the command `aligner launch`, and return as soon as it is accepted.

    The processes of the run continue if this process ends. aligner chooses values for the keys that
    are not set.

    Args:
        model: A Hugging Face directory, a name in the Hugging Face cache, or a file of
            `conf/model/`. A `Path` always means a directory.
        algorithm: A file of `conf/algorithm/`, for example `grpo`.
        reward: A built-in reward, `module:function`, a file of `conf/reward/`, or a function in a
            module that other processes can import.
        data: A path, a file of `conf/data/`, or records. Records are written to `data.jsonl` in the
            run directory.
        overrides: Overrides as on the command line, for example `["run.steps=40"]`.
        config_dir: Directory with your own configuration groups (`--config-dir`).
        keys: Sections (`run={"steps": 40}`), options of groups (`experiment="tiny_ppo"`), or keys
            (`**{"run.steps": 40}`).

    Returns:
        A handle to the run. Call its `wait` method to wait for the end of the run.

    Raises:
        ConfigError: The configuration is invalid. No process was started, and no file is left
            behind.
        AlignerError: The launcher failed before it accepted the run.

    Example:
        ::

            run = aligner.launch(
                model="tiny_arithmetic",
                algorithm="grpo",
                reward="digit_fraction",
                data="sums.jsonl",
                run={"steps": 10},
            )
            run.wait()
    """
    directory = None if config_dir is None else Path(config_dir)
    options = list_group_options(find_config_sources(directory))
    arguments = launch_arguments(model, algorithm, reward, data, keys, options)
    texts = (*arguments.overrides, *overrides)
    records_file = None
    if arguments.records is not None:
        records_file, data_overrides = write_records(arguments.records, texts, directory)
        texts += data_overrides
    config_flags = () if directory is None else ("--config-dir", str(directory))
    command = ChildCommand(["launch", *config_flags, *texts], arguments.python_path)
    output = create_output(command)
    try:
        return _wait_until_accepted(command, output)
    except ConfigError:
        if (
            records_file is not None
            and records_file.exists()
            and not RunPaths(records_file.parent).config.exists()
        ):
            records_file.unlink()
            with contextlib.suppress(OSError):  # the directory contains other files
                records_file.parent.rmdir()
        raise


def _wait_until_accepted(command: ChildCommand, output: LiveOutput) -> "Run":
    """Return the run as soon as the launcher has finished its checks, or has queued the run.

    Args:
        command: The command `aligner launch`.
        output: Object that shows the output of the command.

    Raises:
        AlignerError: The launcher has ended with an error; the exception has the type of that
            error.
    """
    while True:
        # Read the exit code before the output: the output is complete only after the command has
        # ended.
        code = command.exit_code
        printed = command.printed
        output.update()
        after_prefix = (
            printed.partition(f"\n{_DIRECTORY_PREFIX}")[2]
            or printed.partition(_DIRECTORY_PREFIX)[2]
        )
        # The launcher prints the run directory, checks the configuration, and prints the next line
        # only if the configuration is valid.
        root, _, later_output = after_prefix.partition("\n")
        if later_output and code is None:
            run = Run(Path(root), command, output)
            output.begin(run.directory)
            return run
        if code is not None:
            output.close()
            command.raise_error()
            return Run(Path(root))  # the job is queued, or the run has already ended
        time.sleep(_POLL_S)


def load_run(directory: str | os.PathLike[str]) -> "Run":
    """Return a handle to the run in a directory, independent of how the run was started.

    Args:
        directory: The run directory.

    Raises:
        ConfigError: The directory is not a run directory.

    Example:
        ::

            run = aligner.load_run("runs/tiny_ppo")
            print(run.state)
    """
    run = Run(Path(directory).absolute())
    read_status(run.directory)
    return run


class Run:
    """Handle to a run: read the state and the results, wait for the end, or stop the run.

    `aligner.launch` and `aligner.load_run` return it. All methods may be called while the run is
    active.

    Example:
        ::

            run = aligner.load_run("runs/tiny_ppo")
            run.metrics()["reward/mean"].plot()
            run.samples(steps=[10])
    """

    def __init__(
        self, directory: Path, command: ChildCommand | None = None, output: LiveOutput | None = None
    ) -> None:
        """Create a handle. Use `aligner.launch` or `aligner.load_run` instead of this constructor.

        Args:
            directory: The run directory.
            command: The launcher, if this process started it.
            output: Object that shows the output of `command`.
        """
        self.directory = directory
        """The run directory. Its README.md describes the files."""
        self._paths = RunPaths(directory)
        self._command = command
        self._output = output

    def __repr__(self) -> str:
        has_files = self._paths.config.is_file()
        return (
            f"<Run {self.directory}:"
            f" {describe_status(self.status()) if has_files else 'no files yet'}>"
        )

    @property
    def _is_launched_here(self) -> bool:
        """Whether the launcher is a child of this process and is still running."""
        return self._command is not None and self._command.exit_code is None

    @property
    def config(self) -> Config:
        """The configuration of the run, with all values that aligner chose.

        Raises:
            ConfigError: The configuration has not been written yet.
        """
        return load_config(self._paths.config)

    @property
    def state(self) -> str:
        """State of the run: `queued`, `starting`, `running`, `finished`, `failed` or `stopped`."""
        # Check the process before the files: a launcher writes its last status before it ends.
        is_launcher_running = self._is_launched_here
        # The launcher has not prepared the directory yet, or has rejected the configuration.
        if self._command is not None and not self._paths.config.is_file():
            return "starting" if is_launcher_running else "failed"
        return self.status().state

    def status(self) -> RunStatus:
        """Return the same information as the command `aligner status`.

        The result contains the step, metrics, pace, remaining time, roles, and the reason for the
        end of the run.

        Raises:
            ConfigError: The run directory does not exist yet.
        """
        return read_status(self.directory)

    def metrics(self) -> "pd.DataFrame":
        """Return the metrics as a data frame with one row per step and one column per metric.

        The index is the step. `docs/metrics.md` describes the metrics.

        Raises:
            ConfigError: pandas is not installed (extra `notebook`).

        Example:
            ::

                run.metrics()["reward/mean"].plot()
        """
        frame = _import_pandas("run.metrics()").DataFrame(read_metrics(self._paths.metrics))
        return frame.astype({"step": int}).set_index("step") if len(frame) else frame

    def samples(
        self,
        *,
        steps: Collection[int] | None = None,
        tokens: bool = False,
        columns: Sequence[str] | None = None,
    ) -> "pd.DataFrame":
        """Return the samples as a data frame with one row per sample.

        `docs/observing.md` describes the columns. If the run writes no sample files, the rows are
        those of `samples.jsonl`.

        Args:
            steps: Steps to read; None for all recorded steps.
            tokens: Whether to add columns with the values of each response token, as lists.
            columns: Columns to read; None for all.

        Raises:
            ConfigError: pandas is not installed (extra `notebook`).
            KeyError: A column does not exist.

        Example:
            ::

                run.samples(steps=[10], columns=["prompt", "response", "score"])
        """
        pandas = _import_pandas("run.samples()")
        if tokens or sample_steps(self.directory):
            table = read_samples(self.directory, tokens=tokens, steps=steps, columns=columns)
            return table.to_pandas(maps_as_pydicts="strict")
        records = read_records(self._paths.samples)
        return pandas.DataFrame(
            [record for record in records if steps is None or record["step"] in steps],
            columns=columns,
        )

    def export(self, output: str | os.PathLike[str]) -> Path:
        """Write the policy of the last checkpoint as a Hugging Face directory.

        The method does the same as the command `aligner convert`.

        Args:
            output: Directory to create.

        Returns:
            The created directory.

        Raises:
            ConfigError: The run has no checkpoint, or `output` exists.

        Example:
            ::

                run.export("policy_hf")
        """
        ChildCommand(["convert", str(self.directory), os.fspath(output)]).finish()
        return Path(output)

    def wait(self, timeout_s: float | None = None) -> "Run":
        """Wait until the run ends, and show the output of the run while waiting.

        An interrupt (Ctrl-C) ends the call but not the run.

        Args:
            timeout_s: Maximum time to wait, in seconds; None for no limit.

        Returns:
            This run.

        Raises:
            ConfigError: The configuration, the data or the model is invalid.
            AlignerError: A role failed.
            Stopped: The run stopped before its last step and can be resumed from a checkpoint.
            Interrupted: A signal ended the run.
            TimeoutError: The run is still active after `timeout_s` seconds.

        Example:
            ::

                run = aligner.launch(experiment="tiny_ppo").wait()
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            if self._command is not None and self._output is not None:
                while self._is_launched_here:
                    self._output.update()
                    self._check_deadline(deadline)
                    time.sleep(_POLL_S)
                self._output.close()
                state = read_state(self._paths.status)
                self._command.raise_error(None if state is None else state.end_reason)
                if self.state in ENDED_STATES:
                    return self
            self._poll_status(deadline)  # another process or Slurm launches the run
        except KeyboardInterrupt:
            print(
                "the run continues in the background; run.stop() stops it, and"
                f" aligner.load_run({str(self.directory)!r}) returns a handle to it"
            )
            raise
        return self

    def _poll_status(self, deadline: float | None) -> None:
        """Print the status of a run that this process did not start, until the run ends.

        Args:
            deadline: Time from `time.monotonic()` at which to raise TimeoutError; None for no
                limit.

        Raises:
            AlignerError: The run failed or was stopped; the exception has the type of the run's
                error.
        """
        printed_line = ""
        while (status := self.status()).state not in ENDED_STATES:
            if (line := describe_status(status).partition("  last step")[0]) != printed_line:
                print_text(line)
                printed_line = line
            self._check_deadline(deadline)
            time.sleep(_STATUS_INTERVAL_S)
        if status.state != "finished":
            message = status.note or f"{status.name}: {status.state}"
            if status.exit_code is None:
                raise AlignerError(message)
            if status.exit_code:
                raise build_exit_error(status.exit_code, message)

    def _check_deadline(self, deadline: float | None) -> None:
        """Raise TimeoutError if the deadline has passed."""
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(
                f"{self.directory}: timed out waiting for the end of the run; the run continues"
            )

    def stop(self, *, now: bool = False) -> None:
        """Stop the run, and wait until it has ended.

        Nothing happens if the run has already ended.

        Args:
            now: Whether to stop immediately, without saving a checkpoint.

        Raises:
            AlignerError: The launcher of the run is not on this machine.

        Example:
            ::

                run.stop()  # resume later with run={"dir": run.directory, "resume": "auto"}
        """
        number = signal.SIGTERM if now else STOP_SIGNAL
        if self._command is not None and self._is_launched_here:
            os.kill(self._command.pid, number)
        elif self.state not in ENDED_STATES:
            state = read_state(self._paths.status)
            if state is None or state.job is not None or state.host != os.uname().nodename:
                job = "JOB" if state is None or state.job is None else state.job
                hint = ""
                if self.config.cluster.kind != "local":
                    system = get_job_system(self.config)
                    hint = f", or stop its {system.job_noun} with: {system.get_stop_command(job)}"
                raise AlignerError(
                    f"{self.directory}: the run is not on this machine; stop it there{hint}"
                )
            os.kill(state.pid, number)
        while self._is_launched_here or self.state not in ENDED_STATES:
            time.sleep(_POLL_S)


def _import_pandas(feature: str) -> Any:
    """Import and return pandas, which `feature` requires. Raise ConfigError without pandas."""
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(
            f"{feature} requires pandas; install the notebook extra: pip install"
            " 'aligner[notebook]'"
        ) from error
    return pandas
