"""Processes on this machine: start ranks, end them with all their helpers, and handle signals.

Every start of a rank has a start id, which is in the environment of the rank and of all its helpers
(`START_ID_VARIABLE`). The start ids of one launcher are its launch id, a hyphen, and a number.

`python -m aligner.launcher.processes` is the watcher of a launcher (`watch_launcher`). The kernel
sends SIGTERM to the ranks when their launcher dies, so most ranks exit by themselves. A rank that
is suspended or ignores the signal, and helpers of a rank, would survive. Each launcher therefore
starts a watcher whose standard input is a pipe. The pipe closes when the launcher dies, and the
watcher then ends all remaining processes of the launch id. As long as there are processes, the
watcher also limits the size of their logs.
"""

import contextlib
import ctypes
import functools
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, NoReturn

import psutil
from rich.console import Console

from aligner.errors import STOP_SIGNAL, AlignerError, Interrupted, Stopped
from aligner.launcher.forks import AdoptedProcess, ForkServer
from aligner.launcher.ranks import Rank
from aligner.observability.console import print_line
from aligner.observability.log_files import LogLimit, count_output_bytes
from aligner.triton_cleanup import kill_processes, remove_triton_files


class Interrupts:
    """Context manager that records signals to the launcher, and prints why a run ended early.

    The first SIGINT (Ctrl-C) and SIGUSR1 request a stop after a checkpoint. A second SIGINT,
    SIGTERM and SIGHUP end the run immediately. The handlers only record a signal, so no signal
    interrupts the clean-up of a run; the supervisor polls `check`.
    """

    def __init__(
        self,
        console: Console,
        resume_hint: str = "resume the run with run.resume=auto",
        stop_signals: Collection[signal.Signals] = (STOP_SIGNAL,),
    ) -> None:
        """Create the context manager. The `with` statement installs the handlers.

        Args:
            console: Console for the messages.
            resume_hint: How to resume the run; printed after a stop.
            stop_signals: Signals that request a stop after a checkpoint, in addition to the first
                SIGINT.
        """
        self._console = console
        self._resume_hint = resume_hint
        self._stop_signals = stop_signals
        self._received: int | None = None
        self._has_sigint = False
        self.is_stop_requested = False
        """Whether a stop signal or a first SIGINT requested that the run saves a checkpoint and
        ends."""

    def __enter__(self) -> "Interrupts":
        numbers = [signal.SIGINT, signal.SIGTERM, STOP_SIGNAL]
        # nohup sets SIGHUP to be ignored, so that the launcher survives its terminal.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._record_signal) for number in numbers}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if isinstance(error, Interrupted):
            print_line(self._console, f"{error}; all processes of the run have exited")
        elif isinstance(error, Stopped):
            print_line(self._console, f"stopped; {self._resume_hint}")

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        if number in self._stop_signals:
            self.is_stop_requested = True
        elif number == signal.SIGINT and not self._has_sigint:
            self._has_sigint = True
            self.is_stop_requested = True
        else:
            self._received = self._received or number

    def request_stop(self) -> None:
        """Request that the run saves a checkpoint and ends, like a stop signal."""
        self.is_stop_requested = True

    def describe_stop(self, step: int) -> str:
        """Return the message about the requested stop, until the checkpoint is saved.

        Args:
            step: The step that is running.
        """
        plan = f"finishing step {step}, then saving a checkpoint"
        if self._has_sigint:
            return f"Ctrl-C: {plan}; press Ctrl-C again to stop at once"
        return f"stop requested: {plan}"

    def check(self) -> None:
        """Raise Interrupted if a signal requested the immediate end of the run."""
        if self._received is not None:
            raise Interrupted(self._received)

    def check_before_training(self) -> None:
        """Raise Interrupted or Stopped if a signal requested the end or a stop of the run.

        Before training there is no progress that a checkpoint would save, so a stop takes effect
        immediately.
        """
        self.check()
        if self._has_sigint:
            raise Interrupted(signal.SIGINT)
        if self.is_stop_requested:
            self.stop("stopped on request before training started")

    def stop(self, reason: str) -> NoReturn:
        """Print the reason for which the run ends early, and raise Stopped.

        The reason is printed now, because the processes of the run may take long to exit.
        """
        print_line(self._console, reason)
        raise Stopped(reason)


LAUNCHER_PID_VARIABLE = "ALIGNER_LAUNCHER_PID"
"""Name of the environment variable of a rank that contains the process id of its launcher."""
_KILL_TIMEOUT_S = 3.0
_POLL_S = 0.05
# Constants of prctl(2).
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(eq=False)
class RankProcess(Rank):
    """A rank that is a process of this machine."""

    process: subprocess.Popen[bytes] | AdoptedProcess
    start_id: str
    """Start id of this start, in the environment of the rank and its helpers."""

    def poll(self) -> bool:
        """Return whether the rank is running; record its exit if it is not."""
        if (code := self.process.poll()) is not None:
            self.record_exit(code, time.monotonic())
        return code is None


class Processes:
    """Ranks that are processes of this machine.

    `local.LocalRanks` implements the interface `ranks.Ranks` with the methods of this class.

    The launcher is a child subreaper: it adopts orphaned descendants, so that it can end a helper
    of a rank that has exited, such as tritonserver. If the launcher itself is killed, its watcher
    kills the processes that still run after `stop_timeout_s` (`end_orphans`).
    """

    def __init__(self, stop_timeout_s: float, log_limit: LogLimit) -> None:
        """Become a child subreaper, and start the watcher of this launcher.

        Args:
            stop_timeout_s: Seconds that ranks get to exit after SIGTERM.
            log_limit: Maximum size of the logs.
        """
        self._stop_timeout_s = stop_timeout_s
        self._log_limit = log_limit
        self._start_count = 0
        self._ranks: list[RankProcess] = []
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._launch_id = get_launch_id()
        self._watcher = subprocess.Popen(
            [sys.executable, "-m", "aligner.launcher.processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._watcher.stdin is not None
        log_settings = [str(log_limit.directory.absolute()), log_limit.max_mib, log_limit.format]
        settings = json.dumps([self._launch_id, stop_timeout_s, *log_settings])
        self._watcher.stdin.write(f"{settings}\n".encode())
        self._watcher.stdin.flush()
        self._unrelated_children = set(psutil.Process().children(recursive=True))
        self._fork_server: ForkServer | None = None

    def use_fork_server(self, server: ForkServer) -> None:
        """Fork all further ranks from `server`, and close the server together with the ranks."""
        self._fork_server = server

    def spawn(
        self,
        role: str,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        restarts: int = 0,
    ) -> RankProcess:
        """Start a rank in its own session.

        Args:
            role: Role or server group, such as `reward.1`.
            rank: Number of the rank in its role.
            command: Command line of the rank.
            environment: Variables that are added to this process's environment.
            log: File to which the rank's output is appended.
            restarts: Number of restarts of the rank's group before this start.
        """
        self._start_count += 1
        start_id = f"{self._launch_id}-{self._start_count}"
        environment = {
            **os.environ,
            **environment,
            LAUNCHER_PID_VARIABLE: str(os.getpid()),
            START_ID_VARIABLE: start_id,
        }
        with log.open("ab") as output:
            process: subprocess.Popen[bytes] | AdoptedProcess | None = None
            if self._fork_server is not None:
                # The name of a further replica has a number: `reward.1` has the role `reward`.
                process = self._fork_server.fork(role.partition(".")[0], command, environment, log)
            rank_process = RankProcess(
                role,
                rank,
                log,
                count_output_bytes(log),
                restarts,
                process or _start_process(command, environment, output),
                start_id,
            )
        self._ranks.append(rank_process)
        return rank_process

    @property
    def running(self) -> list[RankProcess]:
        """All ranks that have not ended."""
        return [rank for rank in self._ranks if rank.exit_code is None]

    def poll(self) -> None:
        """Record the exits of ranks since the last call."""
        for rank in self._ranks:
            rank.poll()

    def wait(self, timeout_s: float) -> None:
        """Wait until a rank exits, but at most `timeout_s` seconds."""
        try:
            _wait_for_exit([rank.process.pid for rank in self.running], timeout_s)
        except OSError:  # the kernel or a sandbox does not support pidfd_open
            time.sleep(timeout_s)

    def send(self, number: signal.Signals, ranks: Sequence[Rank]) -> None:
        """Send a signal to the given ranks that still run, but not to their helpers."""
        for rank in self._ranks:
            if rank in ranks:
                rank.process.send_signal(number)

    def kill(self, ranks: Sequence[Rank]) -> bool:
        """Kill the given ranks and their helpers, and forget the ranks when all are gone.

        Returns:
            Whether no process was left to kill; call the method again until it returns True.
        """
        killed_ranks = [rank for rank in self._ranks if rank in ranks]
        pids = {rank.process.pid for rank in killed_ranks}
        start_ids = {rank.start_id for rank in killed_ranks}
        processes = [
            process
            for process in self._descendants()
            if process.pid in pids or _read_start_id(process) in start_ids
        ]
        self._kill(processes)
        if not processes:
            for rank in killed_ranks:
                remove_triton_files(rank.process.pid)
                self._ranks.remove(rank)
        return not processes

    def close(self) -> None:
        """Send SIGTERM to all ranks, and kill all processes that remain.

        The ranks get `stop_timeout_s` to exit. Their helpers are killed after that, or as soon as
        all ranks have exited.

        Raises:
            RuntimeError: If processes still run some seconds after the first SIGKILL.
        """
        self.send(signal.SIGTERM, self._ranks)
        deadline = time.monotonic() + self._stop_timeout_s
        while time.monotonic() < deadline and any(rank.poll() for rank in self._ranks):
            self.wait(_POLL_S)
        if self._fork_server is not None:
            self._fork_server.close()
        # A process may fork between the listing and its kill, so the loop lists all of them again.
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while processes := self._descendants():
            self._kill(processes)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"processes are still running {_KILL_TIMEOUT_S:g} s after the first SIGKILL:"
                    f" {', '.join(map(str, processes))}"
                )
        self._watcher.kill()
        self._watcher.communicate()
        self._log_limit.enforce()
        for rank in self._ranks:
            remove_triton_files(rank.process.pid)

    def _kill(self, processes: Sequence[psutil.Process]) -> None:
        """Kill the processes, and reap those that are not ranks; `poll` reaps the ranks."""
        kill_processes(processes)
        self.poll()
        rank_pids = {rank.process.pid for rank in self._ranks}
        psutil.wait_procs(
            [process for process in processes if process.pid not in rank_pids], timeout=_POLL_S
        )

    def _descendants(self) -> list[psutil.Process]:
        """Return the descendants of this process that started after `__init__`."""
        return [
            child
            for child in psutil.Process().children(recursive=True)
            if child not in self._unrelated_children
        ]


def get_launch_id() -> str:
    """Return the launch id of this process: the prefix of the start ids of all ranks it starts."""
    return _create_launch_id(os.getpid())


# Cached by process id: all calls in a process return the same launch id, but a forked process,
# which inherits the cache, gets another one.
@functools.cache
def _create_launch_id(pid: int) -> str:
    # The process id is not unique: earlier launchers and other containers may use the same one. A
    # kill by launch id must not reach their processes.
    return f"{pid}-{secrets.token_hex(8)}"


def _start_process(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a process in its own session, and append its output to `output`."""
    # The stop signal stays blocked until the process installs a handler; otherwise, the signal
    # would kill a process that is still starting.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {STOP_SIGNAL})
    try:
        return subprocess.Popen(
            list(command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _wait_for_exit(pids: Iterable[int], timeout_s: float) -> None:
    """Return when one of the given children exits, or after `timeout_s` seconds."""
    exits = select.poll()
    with contextlib.ExitStack() as opened:
        for pid in pids:
            descriptor = os.pidfd_open(pid)
            opened.callback(os.close, descriptor)
            exits.register(descriptor, select.POLLIN)
        exits.poll(timeout_s * 1000)


def _read_start_id(process: psutil.Process) -> str | None:
    """Return the start id in a process's environment; None without one, or if the process has ended
    or belongs to another user."""
    try:
        return process.environ().get(START_ID_VARIABLE)
    except psutil.Error:
        return None


def terminate_with_launcher() -> None:
    """Make the kernel send SIGTERM to this process when its launcher dies.

    Has no effect in a process without a launcher.

    Raises:
        AlignerError: The launcher has already exited.
    """
    launcher_pid = os.environ.get(LAUNCHER_PID_VARIABLE)
    if launcher_pid is None:
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher_pid):
        raise AlignerError("the launcher exited while this rank was starting")


def _prctl(option: int, argument: int) -> None:
    """Call prctl(2), and raise OSError if it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, *(ctypes.c_ulong(value) for value in (argument, 0, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def read_start_ticks(pid: int) -> int | None:
    """Return the start time of a running process in clock ticks since boot.

    Together with the process id, this time identifies a process. The result is None for a process
    that has ended, whether it has been reaped or not.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # proc(5): field 22 of the file is the start time, and 3 fields precede `fields`.
    return None if state in "ZX" else int(fields[18])


START_ID_VARIABLE = "ALIGNER_START"
"""Name of the environment variable that contains the start id of a rank. All helpers of the rank
inherit it."""
# Seconds after which the watcher gives up on processes that the kernel cannot end.
_UNKILLABLE_TIMEOUT_S = 30.0
# Seconds between two checks of the sizes of the logs. A process that prints 1 GB/s exceeds the
# limit by 100 MB.
_LOG_CHECK_S = 0.1


def watch_launcher(launch_id: str, timeout_s: float, log_limit: LogLimit) -> None:
    """Limit the logs of a launch until all of its processes have ended.

    Standard input must be a pipe on which nothing more arrives until the launcher dies.

    Args:
        launch_id: Launch id of the processes (`get_launch_id`).
        timeout_s: Seconds after the death of the launcher before its processes are killed.
        log_limit: Maximum size of the logs.
    """
    while not select.select([sys.stdin], [], [], _LOG_CHECK_S)[0]:
        log_limit.enforce()
    end_orphans(launch_id, timeout_s, log_limit)


def end_orphans(launch_id: str, timeout_s: float, log_limit: LogLimit) -> None:
    """Give the processes of a launch time to exit, and kill those that remain.

    Then remove the Triton files of all processes that have exited.

    Args:
        launch_id: Launch id of the processes (`get_launch_id`).
        timeout_s: Seconds before the processes are killed.
        log_limit: Maximum size of the logs, until the processes have ended.
    """
    kill_at = time.monotonic() + timeout_s
    seen_pids = set[int]()
    while (
        processes := _find_launched_processes(launch_id)
    ) and time.monotonic() < kill_at + _UNKILLABLE_TIMEOUT_S:
        seen_pids.update(process.pid for process in processes)
        if time.monotonic() > kill_at:
            kill_processes(processes)
        log_limit.enforce()
        time.sleep(_LOG_CHECK_S)
    for pid in seen_pids.difference(process.pid for process in processes):
        remove_triton_files(pid)


def _find_launched_processes(launch_id: str) -> list[psutil.Process]:
    """Return the running processes of a launch: the ranks, their helpers and the fork server."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # the process has ended, or belongs to another user
            if process.environ().get(START_ID_VARIABLE, "").startswith(f"{launch_id}-"):
                processes.append(process)
    return processes


if __name__ == "__main__":
    # The line is empty if the launcher has died before it started any process.
    if line := sys.stdin.readline():
        launch_id, timeout_s, log_directory, log_mib, log_format = json.loads(line)
        watch_launcher(launch_id, timeout_s, LogLimit(Path(log_directory), log_mib, log_format))
