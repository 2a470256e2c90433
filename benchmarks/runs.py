"""Helpers that launch whole runs, as a user does, and compare their results."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from aligner.launcher.failure import read_log_tail
from aligner.observability.metrics import read_metrics
from aligner.paths import RunPaths, find_complete_steps
from aligner.triton_cleanup import kill_processes, remove_triton_files

REPOSITORY = Path(__file__).parents[1]
MARKER = "ALIGNER_OBSERVED_RUN"
"""Environment variable that all processes of a run inherit, including those of Triton. Its value is
the run directory."""


def python_path() -> str:
    """Return the PYTHONPATH of a process that imports modules of this repository.

    It contains the repository and this process's PYTHONPATH.
    """
    return os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))


@dataclass(frozen=True)
class Finished:
    """A run that has ended: its paths, exit code, standard output and standard error."""

    paths: RunPaths
    code: int
    out: str
    error: str

    @property
    def metrics(self) -> list[dict[str, float]]:
        return read_metrics(self.paths.metrics)

    def report(self) -> str:
        """Return a report for the message of a failed assertion."""
        restarts = "".join(f"{line}\n" for line in self.out.splitlines() if "; restarting " in line)
        return f"exit code {self.code}\n{restarts}{self.error}\n{_logs(self.paths)}"


class Launch:
    """A running `aligner launch`. A context manager, which kills all remaining processes on
    exit."""

    def __init__(
        self,
        directory: Path,
        *overrides: str,
        experiment: str = "tiny_ppo",
        before: Sequence[str] = (),
        python: str | Path = sys.executable,
    ) -> None:
        """Start a launch.

        Args:
            directory: Run directory.
            *overrides: Overrides of the experiment, `key=value`.
            experiment: Name of the experiment.
            before: Command that runs the launch, such as `sh -c 'ulimit -n 256; exec "$@"' sh`.
            python: Python interpreter of the launcher.
        """
        self.paths = RunPaths(directory)
        command = [
            *before,
            str(python),
            "-m",
            "aligner",
            "launch",
            f"experiment={experiment}",
            f"run.dir={directory}",
            *overrides,
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": python_path(),
            "COLUMNS": "120",
            MARKER: str(directory),
        }
        # Files instead of pipes, because nobody reads a pipe before the end of the run.
        self._out, self._error = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._launcher = subprocess.Popen(
            command, cwd=directory.parent, env=environment, stdout=self._out, stderr=self._error
        )

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._launcher.kill()
        self._launcher.wait()
        self._out.close()
        self._error.close()
        left = self.processes()
        kill_processes(left)
        for process in left:
            remove_triton_files(process.pid)

    def processes(self) -> list[psutil.Process]:
        """Return the running processes of this launch."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if run_of(process) == str(self.paths.root):
                    found.append(process)
        return found

    def rank(self, group: str, rank: int) -> psutil.Process:
        """Return the process of a rank of the trainer or of a server group.

        Raises psutil.NoSuchProcess if it does not run.
        """
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                # Triton's helpers inherit the environment but not the command line. A forked rank
                # has its number only in the command line.
                words, number = " ".join(process.cmdline()).split(), process.environ().get("RANK")
                is_of_group = ("train" if group == "trainer" else f"role={group}") in words
                if is_of_group and (number == str(rank) or f"rank={rank}" in words):
                    return process
        raise psutil.NoSuchProcess(-1, f"{group} rank {rank}")

    @property
    def process_id(self) -> int:
        """Process id of the launcher."""
        return self._launcher.pid

    @property
    def has_ended(self) -> bool:
        """Whether the launcher has exited."""
        return self._launcher.poll() is not None

    @property
    def steps(self) -> int:
        """Number of the last step in `metrics.jsonl`; 0 if it has no step, or only the evaluation
        of the initial policy."""
        return max((int(step["step"]) for step in read_metrics(self.paths.metrics)), default=0)

    def wait_for_step(self, step: int, timeout_s: float = 150) -> None:
        """Wait until `metrics.jsonl` contains this step."""
        self._wait(lambda: self.steps >= step, f"step {step}", timeout_s)

    def wait_for_checkpoint(self, step: int, timeout_s: float = 150) -> None:
        """Wait until the checkpoint of this step is complete. It is written during the next
        step."""
        self._wait(
            lambda: step in find_complete_steps(self.paths.checkpoints),
            f"the checkpoint of step {step}",
            timeout_s,
        )

    def wait_for_rank(self, group: str) -> None:
        """Wait until rank 0 of the trainer or of a server group runs."""

        def runs() -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):
                return self.rank(group, 0).is_running()
            return False

        self._wait(runs, f"{group} rank 0", timeout_s=60)

    def wait_for_step_or_end(self, step: int, timeout_s: float = 150) -> None:
        """Wait until `metrics.jsonl` contains this step, or the launcher has exited."""
        self._wait(lambda: self.steps >= step or self.has_ended, f"step {step}", timeout_s)

    def interrupt(self, number: int) -> None:
        """Send a signal to the launcher only."""
        self._launcher.send_signal(number)

    def finish(self, timeout_s: float, orphans_s: float = 0) -> Finished:
        """Wait until the launcher exits, and return the run.

        Raises AssertionError after the timeout, or if other processes of the run still exist. If
        the launcher was killed, they have `orphans_s` more seconds to exit.
        """
        try:
            self._launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the launcher did not exit within {timeout_s:g} s\n{_logs(self.paths)}"
            ) from None
        deadline = time.monotonic() + orphans_s * (self._launcher.returncode < 0)
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        told = []
        for file in (self._out, self._error):
            file.seek(0)
            told.append(file.read())
        assert not left, f"processes still run after the launcher exited: {left}\n{told[1]}"
        return Finished(self.paths, self._launcher.returncode, *told)

    def _wait(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.has_ended and not condition():
                raise AssertionError(
                    f"the launcher exited before {what}\n{self.finish(1).report()}"
                )
            assert time.monotonic() < deadline, (
                f"no {what} within {timeout_s:g} s\n{_logs(self.paths)}"
            )
            time.sleep(0.05)


def run_of(process: psutil.Process) -> str | None:
    """Return the directory of the run to which a process belongs; None if it belongs to no run.

    Raises psutil.Error.
    """
    return process.environ().get(MARKER)


def run_to_end(
    directory: Path, *overrides: str, experiment: str = "tiny_ppo", timeout_s: float = 180
) -> Finished:
    """Run an experiment to its end, and return the run. Raises AssertionError if it fails."""
    with Launch(directory, *overrides, experiment=experiment) as launch:
        finished = launch.finish(timeout_s)
    assert finished.code == 0, finished.report()
    return finished


def run_of_interpreter(
    python: str | Path, directory: Path, *overrides: str, timeout_s: float = 300
) -> Finished:
    """Run `tiny_ppo` with another Python interpreter, and return the run, also if it has failed."""
    with Launch(directory, *overrides, python=python) as launch:
        return launch.finish(timeout_s)


def repeatable(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return metrics without those that measure time, or that depend on the time at which a weight
    sync is complete."""
    timed = ("time/", "throughput/", "episode/environment_s", "episode/retries/", "verify/")
    return [
        {key: value for key, value in step.items() if not key.startswith(timed)} for step in metrics
    ]


def checkpoint_differences(
    expected: RunPaths, got: RunPaths, step: int, part: str = ""
) -> list[str]:
    """Return the files of checkpoint `step` that two runs have with different contents, or only one
    has.

    `part` restricts the comparison to `policy` or `critic`. The configuration in a manifest is not
    compared, because the number of steps and of stored checkpoints may differ.
    """
    roots = [paths.checkpoints / f"step_{step}" / part for paths in (expected, got)]
    files = sorted(
        {file.relative_to(root) for root in roots for file in root.rglob("*") if file.is_file()}
    )
    contents = [{file: _content(root / file) for file in files} for root in roots]
    return [
        str(file)
        for file in files
        if contents[0][file] is None or contents[0][file] != contents[1][file]
    ]


def _content(file: Path) -> object:
    if not file.is_file():
        return None
    if file.name != "manifest.json":
        return file.read_bytes()
    return {
        key: value
        for key, value in json.loads(file.read_text()).items()
        if key not in ("config", "checksum")
    }


def _logs(paths: RunPaths) -> str:
    parts = []
    for log in sorted((paths.root / "logs").glob("*.log")):
        parts += [f"--- {log.name}", *read_log_tail(log)]
    return "\n".join(parts)
