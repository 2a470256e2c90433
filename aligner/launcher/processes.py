"""Processes of this machine: ranks and all that comes of them, started, ended, and tied to their
launcher's life."""

import contextlib
import ctypes
import functools
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
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
from aligner.triton_cleanup import kill_processes, remove_triton_files


class Interrupts:
    """Notes signals inside a `with` block, so that stopping is never itself interrupted, and tells
    of an early end."""

    def __init__(
        self, console: Console, goes_on: str = "resume the run with run.resume=auto"
    ) -> None:
        """`goes_on` is printed after a stop: how the run resumes."""
        self._console, self._goes_on = console, goes_on
        self._received: int | None = None
        self.told_to_stop = False
        """Whether the run should end with a checkpoint."""

    def __enter__(self) -> "Interrupts":
        numbers = [signal.SIGINT, signal.SIGTERM, STOP_SIGNAL]
        # a launcher that was started with nohup outlives its terminal
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
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
            if self._received == signal.SIGINT:
                hint = (
                    "to save a checkpoint before the run ends, send SIGUSR1 to the launcher instead"
                    " of Ctrl-C: kill -USR1 PID"
                )
                print_line(self._console, hint)
        elif isinstance(error, Stopped):
            print_line(self._console, f"stopped; {self._goes_on}")

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == STOP_SIGNAL:
            self.told_to_stop = True
        else:
            self._received = self._received or number

    def check(self) -> None:
        """Raise Interrupted once a signal has come that ends the run at once."""
        if self._received is not None:
            raise Interrupted(self._received)

    def check_before_training(self) -> None:
        """As `check`, and raise Stopped where the run was told to stop: there is nothing yet that
        would be lost."""
        self.check()
        if self.told_to_stop:
            self.stop("stopped on request before training started")

    def stop(self, why: str) -> NoReturn:
        """Tell why the run ends early, at once, for its processes may take long to end, and raise
        Stopped."""
        print_line(self._console, why)
        raise Stopped(why)


LAUNCHER_PID = "ALIGNER_LAUNCHER_PID"
"""Environment variable by which a rank knows its launcher."""
_KILL_TIMEOUT_S = 3.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(eq=False)
class RankProcess(Rank):
    """One started rank."""

    process: subprocess.Popen[bytes] | AdoptedProcess
    mark: str
    """Value of `START` that only what came of this start has."""

    def poll(self) -> bool:
        """Whether it runs; notes its end."""
        if (code := self.process.poll()) is not None:
            self.note_end(code, time.monotonic())
        return code is None


class Processes:
    """Ranks that are processes of this machine.

    It adopts orphaned descendants (child subreaper): a helper that a rank left behind, such as
    tritonserver, is still ended. Where this process is killed, what is left by `stop_timeout_s` is
    killed by `aligner.launcher.processes`.
    """

    def __init__(self, stop_timeout_s: float) -> None:
        self._stop_timeout_s = stop_timeout_s
        self._started = 0
        self._ranks: list[RankProcess] = []
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._mark = launch_mark()
        self._watcher = subprocess.Popen(
            [sys.executable, "-m", "aligner.launcher.processes", self._mark, str(stop_timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._not_ours = set(psutil.Process().children(recursive=True))
        self._forks: ForkServer | None = None

    def fork_ranks(self, server: ForkServer) -> None:
        """Fork ranks from now on, and end the server with them."""
        self._forks = server

    def spawn(
        self,
        role: str,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        restarts: int = 0,
    ) -> RankProcess:
        """Start a rank in a session of its own, its output appended to `log`; it knows this process
        as its launcher."""
        self._started += 1
        mark = f"{self._mark}-{self._started}"
        environment = {**os.environ, **environment, LAUNCHER_PID: str(os.getpid()), START: mark}
        with log.open("ab") as output:
            process = (
                None
                if self._forks is None
                else self._forks.fork(role.partition(".")[0], command, environment, log)
            )
            started = RankProcess(
                role,
                rank,
                log,
                output.tell(),
                restarts,
                process or _start(command, environment, output),
                mark,
            )
        self._ranks.append(started)
        return started

    @property
    def running(self) -> list[RankProcess]:
        """See `Ranks`."""
        return [rank for rank in self._ranks if rank.exit_code is None]

    def poll(self) -> None:
        """See `Ranks`."""
        for rank in self._ranks:
            rank.poll()

    def wait(self, timeout_s: float) -> None:
        """See `Ranks`."""
        try:
            _wait_for_exit([rank.process.pid for rank in self.running], timeout_s)
        except OSError:  # the kernel, or a sandbox, has no descriptors of processes
            time.sleep(timeout_s)

    def send(self, number: signal.Signals, ranks: Sequence[Rank]) -> None:
        """See `Ranks`."""
        for rank in self._ranks:
            if rank in ranks:
                rank.process.send_signal(number)

    def kill(self, ranks: Sequence[Rank]) -> bool:
        """See `Ranks`."""
        own = [rank for rank in self._ranks if rank in ranks]
        numbers, marks = {rank.process.pid for rank in own}, {rank.mark for rank in own}
        rest = [
            process
            for process in self._descendants()
            if process.pid in numbers or _mark(process) in marks
        ]
        self._kill(rest)
        if not rest:
            for rank in own:
                remove_triton_files(rank.process.pid)
                self._ranks.remove(rank)
        return not rest

    def close(self) -> None:
        """See `Ranks`; what comes of the ranks is killed when they have ended."""
        self.send(signal.SIGTERM, self._ranks)
        deadline = time.monotonic() + self._stop_timeout_s
        while time.monotonic() < deadline and any(rank.poll() for rank in self._ranks):
            self.wait(_POLL_S)
        if self._forks is not None:
            self._forks.close()
        # Repeated, because a process may fork between being listed and being killed.
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while rest := self._descendants():
            self._kill(rest)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"processes are still running {_KILL_TIMEOUT_S:g} s after the first SIGKILL:"
                    f" {', '.join(map(str, rest))}"
                )
        self._watcher.kill()
        self._watcher.communicate()
        for rank in self._ranks:
            remove_triton_files(rank.process.pid)

    def _kill(self, processes: Sequence[psutil.Process]) -> None:
        """Kill and reap them."""
        kill_processes(processes)
        self.poll()
        own = {rank.process.pid for rank in self._ranks}
        psutil.wait_procs(
            [process for process in processes if process.pid not in own], timeout=_POLL_S
        )

    def _descendants(self) -> list[psutil.Process]:
        return [
            child
            for child in psutil.Process().children(recursive=True)
            if child not in self._not_ours
        ]


def launch_mark() -> str:
    """Return the beginning of the marks of all that this process starts (`START`)."""
    return _mark_of(os.getpid())


@functools.cache
def _mark_of(pid: int) -> str:
    # Other launchers may have had this process's number, and other containers do: a kill by mark
    # must not reach theirs.
    return f"{pid}-{secrets.token_hex(8)}"


def _start(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """A process in a session of its own."""
    # It does not die of the signal to stop, which it may take when it is ready.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {STOP_SIGNAL})
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
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for_exit(pids: Iterable[int], timeout_s: float) -> None:
    """Return when one of these children exits, or after the timeout."""
    exits = select.poll()
    with contextlib.ExitStack() as opened:
        for pid in pids:
            descriptor = os.pidfd_open(pid)
            opened.callback(os.close, descriptor)
            exits.register(descriptor, select.POLLIN)
        exits.poll(timeout_s * 1000)


def _mark(process: psutil.Process) -> str | None:
    """None for a process that has ended, reaped or not."""
    try:
        return process.environ().get(START)
    except psutil.Error:
        return None


def end_with_launcher() -> None:
    """Have SIGTERM sent to this process when its launcher dies, however it dies; nothing without a
    launcher."""
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None:
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):
        raise AlignerError("the launcher exited while this rank was starting")


def _prctl(option: int, argument: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, *(ctypes.c_ulong(value) for value in (argument, 0, 0, 0))) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def process_start(pid: int) -> int | None:
    """When a living process was started, in clock ticks since boot; None where there is none."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


START = "ALIGNER_START"
"""Environment variable of whatever comes of one start of a rank, its helpers' helpers included: the
mark of that start."""
_TIMEOUT_S = 30.0
"""A process that the kernel does not let go is not waited for any longer."""


def end_orphans(mark: str, patience_s: float) -> None:
    """Give the processes whose mark begins so some time to end by themselves, then kill them and
    remove what Triton left."""
    kill_at, seen = time.monotonic() + patience_s, set[int]()
    while (left := _marked(mark)) and time.monotonic() < kill_at + _TIMEOUT_S:
        seen.update(process.pid for process in left)
        if time.monotonic() > kill_at:
            kill_processes(left)
        time.sleep(0.1)
    for pid in seen.difference(process.pid for process in left):
        remove_triton_files(pid)


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or one that has ended
            if process.environ().get(START, "").startswith(f"{mark}-"):
                found.append(process)
    return found


if __name__ == "__main__":
    sys.stdin.read()
    end_orphans(sys.argv[1], float(sys.argv[2]))
