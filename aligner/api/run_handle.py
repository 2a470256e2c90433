"""`aligner.launch` and `aligner.load_run`: a run as an object, whose processes are those of
`aligner launch`."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aligner.api.arguments import Records, launch_arguments, place_records
from aligner.api.child_command import ChildCommand
from aligner.api.live_output import LiveOutput, live_output
from aligner.config.compose import load_config
from aligner.config.conf_files import group_directories, group_options
from aligner.errors import AlignerError, ConfigError
from aligner.exit_codes import STOP_SIGNAL, error_of
from aligner.launcher.launcher_state import read_state
from aligner.launcher.status import OVER, RunStatus, describe_status, read_status
from aligner.observability.metrics import read_metrics, read_records
from aligner.observability.sample_files import read_samples, sample_steps
from aligner.paths import RunPaths
from aligner.schema import Config

if TYPE_CHECKING:
    import pandas as pd

_POLL_S = 0.1
_WATCH_S = 2.0
_ANNOUNCED = "run directory: "
"""What `aligner launch` prints before the run's directory."""


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
    """Start a run as `aligner launch` does, and return once it is accepted; its processes go on
    where this one ends.

    `model` is a directory, a name of the Hugging Face cache's, or one of `conf/model/`. `reward` is
    a built-in scorer's name, `module:function`, one of `conf/reward/`, or a function of a module
    that other processes can import. `data` is a path, one of `conf/data/`, or records, which are
    written to the run's directory. Other keys are sections (`run={"steps": 40}`), options of groups
    (`experiment="tiny_ppo"`), or a dotted key's (`**{"run.steps": 40}`); `overrides` are texts of
    the command line. `config_dir` holds groups of your own.

    Raises ConfigError, with nothing left behind, for what `aligner launch` refuses.
    """
    directory = None if config_dir is None else Path(config_dir)
    options = group_options(group_directories(directory))
    asked = launch_arguments(model, algorithm, reward, data, keys, options)
    texts, file = (*asked.overrides, *overrides), None
    if asked.records is not None:
        file, more = place_records(asked.records, texts, directory)
        texts += more
    groups = () if directory is None else ("--config-dir", str(directory))
    command = ChildCommand(["launch", *groups, *texts], asked.python_path)
    output = live_output(command)
    try:
        return _accepted(command, output)
    except ConfigError:
        if file is not None and file.exists() and not RunPaths(file.parent).config.exists():
            file.unlink()
            with contextlib.suppress(OSError):  # something else is there
                file.parent.rmdir()
        raise


def _accepted(command: ChildCommand, output: LiveOutput) -> "Run":
    """The run, once its launcher goes on behind its checks, or has queued it. Raises what the
    launcher ends with."""
    while True:
        code, printed = command.exit_code, command.printed
        output.update()
        announced = printed.partition(f"\n{_ANNOUNCED}")[2] or printed.partition(_ANNOUNCED)[2]
        root, _, goes_on = announced.partition("\n")
        if goes_on and code is None:
            run = Run(Path(root), command, output)
            output.begin(run.directory)
            return run
        if code is not None:
            output.close()
            command.raise_error()
            return Run(Path(root))  # queued, or over already
        time.sleep(_POLL_S)


def load_run(directory: str | os.PathLike[str]) -> "Run":
    """A run by its directory, however it was started. Raises ConfigError where there is none."""
    run = Run(Path(directory).absolute())
    read_status(run.directory)
    return run


class Run:
    """A run of `aligner launch`."""

    def __init__(
        self, directory: Path, command: ChildCommand | None = None, output: LiveOutput | None = None
    ) -> None:
        """`command` is its launcher, and `output` what shows what that prints, where this process
        has started it."""
        self.directory = directory
        """Where its files are: README.md has them."""
        self._paths, self._command, self._output = RunPaths(directory), command, output

    def __repr__(self) -> str:
        has_files = self._paths.config.is_file()
        return (
            f"<Run {self.directory}:"
            f" {describe_status(self.status()) if has_files else 'no files yet'}>"
        )

    @property
    def _is_launched_here(self) -> bool:
        """Whether its launcher is this process's child, and goes on."""
        return self._command is not None and self._command.exit_code is None

    @property
    def config(self) -> Config:
        """Its configuration, with all that was chosen. Raises ConfigError while it is not there
        yet."""
        return load_config(self._paths.config)

    @property
    def state(self) -> str:
        """queued, starting, running, finished, failed or stopped."""
        goes_on = self._is_launched_here  # first: its last word is there once it has ended
        # before it is prepared, or refused
        if self._command is not None and not self._paths.config.is_file():
            return "starting" if goes_on else "failed"
        return self.status().state

    def status(self) -> RunStatus:
        """What `aligner status` tells: step, metrics, pace, time left, roles and why it ended."""
        return read_status(self.directory)

    def metrics(self) -> "pd.DataFrame":
        """A row a step, by step, and a column a metric; also while it runs. Raises ConfigError
        where pandas is missing."""
        frame = _pandas("run.metrics()").DataFrame(read_metrics(self._paths.metrics))
        return frame.astype({"step": int}).set_index("step") if len(frame) else frame

    def samples(
        self,
        *,
        steps: Collection[int] | None = None,
        tokens: bool = False,
        columns: Sequence[str] | None = None,
    ) -> "pd.DataFrame":
        """A row a sample, of these steps or of all that are kept; also while it runs.
        docs/observing.md has the columns.

        With `tokens` what there is of each response token, as lists; `columns` are those that are
        wanted. A run that keeps no sample files has those of `samples.jsonl`. Raises ConfigError
        where pandas is missing, KeyError for an unknown column.
        """
        pandas = _pandas("run.samples()")
        if tokens or sample_steps(self.directory):
            table = read_samples(self.directory, tokens=tokens, steps=steps, columns=columns)
            return table.to_pandas(maps_as_pydicts="strict")
        records = read_records(self._paths.samples)
        return pandas.DataFrame(
            [record for record in records if steps is None or record["step"] in steps],
            columns=columns,
        )

    def export(self, output: str | os.PathLike[str]) -> Path:
        """Write the policy of its last checkpoint as a Hugging Face directory, as `aligner convert`
        does; returns that.

        Raises ConfigError where there is no checkpoint, or `output` exists.
        """
        ChildCommand(["convert", str(self.directory), os.fspath(output)]).finish()
        return Path(output)

    def wait(self, timeout_s: float | None = None) -> "Run":
        """Wait for the run's end and return it; what it prints is shown meanwhile.

        Raises what has ended it otherwise, in the launcher's words: ConfigError, AlignerError,
        Stopped where it can go on from a checkpoint, Interrupted where a signal has ended it;
        TimeoutError where it takes longer. Who interrupts the waiting does not end the run.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            if self._command is not None and self._output is not None:
                while self._is_launched_here:
                    self._output.update()
                    self._check(deadline)
                    time.sleep(_POLL_S)
                self._output.close()
                state = read_state(self._paths.status)
                self._command.raise_error(None if state is None else state.why_ended)
                if self.state in OVER:
                    return self
            self._watch(deadline)  # another process has started it, or Slurm will
        except KeyboardInterrupt:
            print(
                "the run continues in the background; run.stop() stops it, and"
                f" aligner.load_run({str(self.directory)!r}) returns a handle to it"
            )
            raise
        return self

    def _watch(self, deadline: float | None) -> None:
        """Tell how a run is that this process has not started, until it has ended; raise what has
        ended it."""
        told = ""
        while (now := self.status()).state not in OVER:
            if (line := describe_status(now).partition("  last step")[0]) != told:
                print(line, flush=True)
                told = line
            self._check(deadline)
            time.sleep(_WATCH_S)
        if now.state != "finished":
            message = now.note or f"{now.name}: {now.state}"
            if now.exit_code is None:
                raise AlignerError(message)
            if now.exit_code:
                raise error_of(now.exit_code, message)

    def _check(self, deadline: float | None) -> None:
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(
                f"{self.directory}: timed out waiting for the end of the run; the run continues"
            )

    def stop(self, *, now: bool = False) -> None:
        """Have the run take a checkpoint and end, or end at once, and wait for that; nothing where
        it has ended.

        Raises AlignerError where its launcher is not on this machine.
        """
        number = signal.SIGTERM if now else STOP_SIGNAL
        if self._command is not None and self._is_launched_here:
            os.kill(self._command.pid, number)
        elif self.state not in OVER:
            state = read_state(self._paths.status)
            if state is None or state.job is not None or state.host != os.uname().nodename:
                job = "JOB" if state is None or state.job is None else state.job
                raise AlignerError(
                    f"{self.directory}: the run is not on this machine; stop it there, or, if it is"
                    f" a Slurm job, with: scancel --batch --signal=USR1 {job}"
                )
            os.kill(state.pid, number)
        while self._is_launched_here or self.state not in OVER:
            time.sleep(_POLL_S)


def _pandas(what: str) -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(
            f"{what} requires pandas; install the notebook extra: pip install 'aligner[notebook]'"
        ) from error
    return pandas
