"""What the supervisor knows of the ranks that it watches, wherever they run."""

import contextlib
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aligner.files import drop_older_half
from aligner.launcher.exhausted_resources import count_oom_kills
from aligner.observability.logs import launcher_line
from aligner.paths import run_paths
from aligner.schema import Config


@dataclass(eq=False)
class Rank:
    """One started rank."""

    role: str
    rank: int
    log: Path
    log_start: int
    """Where its own part of the log begins, in bytes."""
    restarts: int
    """How often its group had been started again by then."""
    exit_code: int | None = field(default=None, kw_only=True)
    """None while it runs; negative: the signal that ended it."""
    ended_at: float | None = field(default=None, kw_only=True)
    """`time.monotonic()` at which its end was noticed."""
    killed_for: str | None = field(default=None, kw_only=True)
    """Why the launcher killed it, where that was no part of ending or replacing its group."""
    oom_kills_before: int = field(default_factory=count_oom_kills, kw_only=True)
    """Processes that the kernel had killed for lack of memory when it was started."""
    has_stacks: bool = field(default=False, kw_only=True)
    """Whether all ranks of the run were made to print their Python stacks because this rank sends
    no heartbeats."""

    def shorten_log(self, limit: int) -> None:
        """Drop the older half of its log where that has more than `limit` bytes."""
        with contextlib.suppress(OSError):
            self.log_start = max(0, self.log_start - drop_older_half(self.log, limit))

    @property
    def is_local(self) -> bool:
        """Whether it runs on the launcher's machine for certain, within the launcher's limits."""
        return True

    @property
    def starter_messages(self) -> str:
        """What was said of it by what started it, and is not in its log; empty where that is
        nothing."""
        return ""

    def note_end(self, code: int, moment: float) -> None:
        """Note how and when it has ended; what is noted first stays."""
        if self.exit_code is None:
            self.exit_code, self.ended_at = code, moment


class Ranks(ABC):
    """Starts, watches and ends the ranks of a run."""

    @abstractmethod
    def start(self, role: str, restarts: int = 0) -> Sequence[Rank]:
        """Start all ranks of a role or server group, their output appended to their logs; `prepare`
        is a role of one rank."""

    @property
    @abstractmethod
    def running(self) -> Sequence[Rank]:
        """All ranks of the run that have not ended."""

    @property
    def start_delay_s(self) -> float:
        """Longest time between `start` and the first line of a rank's process, in seconds, if
        something else than this machine starts it."""
        return 0.0

    @abstractmethod
    def poll(self) -> None:
        """Notice which ranks have ended since the last call."""

    def wait(self, timeout_s: float) -> None:
        """Wait for a time, or only until the next rank ends if that can be noticed."""
        time.sleep(timeout_s)

    @abstractmethod
    def send(self, number: signal.Signals, ranks: Sequence[Rank]) -> None:
        """A signal to those that still run, as often as one likes; not to helpers such as Triton,
        which they need to drain."""

    @abstractmethod
    def kill(self, ranks: Sequence[Rank]) -> bool:
        """Kill these ranks and all that came of them; returns whether nothing was left to kill, and
        forgets them then."""

    def kill_for(self, why: str, rank: Rank) -> None:
        """Kill a rank, if it runs: that is its end as any other, also where the kernel cannot end
        it now."""
        if rank.exit_code is None:
            rank.killed_for = why
            self.send(signal.SIGKILL, [rank])
            rank.note_end(-signal.SIGKILL, time.monotonic())

    @abstractmethod
    def close(self) -> None:
        """End all of them: SIGTERM to each rank, and what is left by `cluster.stop_timeout_s` is
        killed."""


def max_restarts(config: Config, role: str) -> int:
    """Return how often per hour the trainer or a server group may be restarted."""
    is_server = role not in ("prepare", "trainer")
    return config.server.max_restarts if is_server else config.run.max_restarts


def log_of(config: Config, role: str, rank: int, restarts: int) -> Path:
    """The log of a rank that is about to start; noted in it where that is another start of the
    role."""
    log = run_paths(config).log(role, rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    if restarts:
        told = f"restarting {role} (restart {restarts} of this launch)"
        with log.open("a") as lines:
            lines.write(launcher_line(config.logging.format, role, rank, told))
    return log
