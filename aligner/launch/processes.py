"""Starting ranks, and ending every process that came of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import psutil

from aligner.launch.kernel import adopt_orphans
from aligner.launch.ranks import Rank
from aligner.signals import STOP_SIGNAL
from aligner.triton_cleanup import remove_triton_files

_Self = TypeVar("_Self", bound="Processes")
_KILL_TIMEOUT_S = 3.0
_POLL_S = 0.05
_START = "ALIGNER_START"
"""Environment variable of whatever comes of one start of a rank, its helpers' helpers included."""


@dataclass
class RankProcess:
    """One started rank."""

    role: str
    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    """Where its own part of the log begins, in bytes."""
    mark: str
    """Value of `_START` that only what came of this start has."""
    restarts: int = 0
    """How often its group had been started again by then."""
    ended_at: float | None = None
    """`time.monotonic()` at which its end was noticed."""
    starter_said: str = ""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self.process.returncode


class Processes:
    """The processes of a run; leaving the `with` block ends all of them.

    This process adopts orphaned descendants (child subreaper), so a helper that a rank left behind in another session,
    such as tritonserver, is still found and ended.
    """

    def __init__(self, stop_timeout_s: float) -> None:
        self._stop_timeout_s = stop_timeout_s
        self._started = 0
        self.ranks: list[RankProcess] = []
        adopt_orphans()
        self._not_ours = set(psutil.Process().children(recursive=True))

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def spawn(
        self, role: str, rank: int, command: Sequence[str], environment: Mapping[str, str], log: Path, restarts: int = 0
    ) -> RankProcess:
        """Start a rank in a session of its own, its output appended to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._started += 1
        mark = f"{os.getpid()}-{self._started}"
        with log.open("ab") as output:
            with _blocked_stop():
                process = subprocess.Popen(
                    list(command),
                    env={**os.environ, **environment, _START: mark},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            started = RankProcess(role, rank, process, log, output.tell(), mark, restarts)
        self.ranks.append(started)
        return started

    def poll(self) -> None:
        """Notice which ranks have ended since the last call."""
        for rank in self.ranks:
            if rank.ended_at is None and rank.process.poll() is not None:
                rank.ended_at = time.monotonic()

    def send(self, number: signal.Signals, ranks: Sequence[Rank]) -> None:
        """A signal to those that still run, not to what came of them."""
        for rank in self._own(ranks):
            rank.process.send_signal(number)

    def terminate(self, ranks: Sequence[Rank]) -> None:
        """SIGTERM to those that still run. Not to their helpers, such as Triton, which they need until they have drained."""
        self.send(signal.SIGTERM, ranks)

    def kill(self, ranks: Sequence[Rank]) -> bool:
        """Kill these ranks and all that came of them; returns whether there was nothing left to kill."""
        marks = {rank.mark for rank in self._own(ranks)}
        rest = [process for process in self._descendants() if _mark(process) in marks]
        _kill(rest)
        self._reap(rest)
        if not rest:
            for rank in self._own(ranks):
                remove_triton_files(rank.process.pid)
        return not rest

    def forget(self, ranks: Sequence[Rank]) -> None:
        """Ended ranks that are of no account any more."""
        self.ranks = [rank for rank in self.ranks if rank not in ranks]

    def stop(self) -> None:
        """End everything: SIGTERM to each rank, and what is left when all have ended, or by `stop_timeout_s`, is killed."""
        self.terminate(self.ranks)
        deadline = time.monotonic() + self._stop_timeout_s
        while time.monotonic() < deadline and any(rank.process.poll() is None for rank in self.ranks):
            time.sleep(_POLL_S)
        self._kill_rest()

    def _own(self, ranks: Sequence[Rank]) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank in ranks]

    def _kill_rest(self) -> None:
        # Repeated, because a process may fork between being listed and being killed.
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while rest := self._descendants():
            _kill(rest)
            self._reap(rest)
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes that cannot be killed: {', '.join(map(str, rest))}")
        for rank in self.ranks:
            remove_triton_files(rank.process.pid)

    def _reap(self, processes: Sequence[psutil.Process]) -> None:
        for rank in self.ranks:
            rank.process.poll()
        own = {rank.process.pid for rank in self.ranks}
        psutil.wait_procs([process for process in processes if process.pid not in own], timeout=_POLL_S)

    def _descendants(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive=True) if child not in self._not_ours]


@contextlib.contextmanager
def _blocked_stop() -> Iterator[None]:
    """A process that is started meanwhile does not die of the signal to stop, which it may take when it is ready."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {STOP_SIGNAL})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _mark(process: psutil.Process) -> str | None:
    """None for a process that has ended, reaped or not."""
    try:
        return process.environ().get(_START)
    except psutil.Error:
        return None
