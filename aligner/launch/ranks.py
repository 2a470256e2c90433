"""What the supervisor knows of the ranks that it watches, wherever they run."""

import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

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

    @property
    def starter_messages(self) -> str:
        """What was said of it by what started it, and is not in its log; empty where that is nothing."""
        return ""

    def note_end(self, code: int, moment: float) -> None:
        """Note how and when it has ended; what is noted first stays."""
        if self.exit_code is None:
            self.exit_code, self.ended_at = code, moment


class Ranks(ABC):
    """Starts, watches and ends the ranks of a run."""

    @abstractmethod
    def start(self, role: str, restarts: int = 0) -> Sequence[Rank]:
        """Start all ranks of a role or server group, their output appended to their logs; `prepare` is a role of one rank."""

    @abstractmethod
    def poll(self) -> None:
        """Notice which ranks have ended since the last call."""

    @abstractmethod
    def send(self, number: signal.Signals, ranks: Sequence[Rank]) -> None:
        """A signal to those that still run, as often as one likes; not to helpers such as Triton, which they need to drain."""

    @abstractmethod
    def kill(self, ranks: Sequence[Rank]) -> bool:
        """Kill these ranks and all that came of them; returns whether nothing was left to kill, and forgets them then."""

    @abstractmethod
    def close(self) -> None:
        """End all of them: SIGTERM to each rank, and what is left by `cluster.stop_timeout_s` is killed."""


def log_of(config: Config, role: str, rank: int, restarts: int) -> Path:
    """The log of a rank that is about to start; noted in it where that is another start of the role."""
    log = run_paths(config).log(role, rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    if restarts:
        told = f"{role} is started again ({restarts} of {config.server.max_restarts})"
        with log.open("a") as lines:
            lines.write(launcher_line(config.logging.format, role, rank, told))
    return log
