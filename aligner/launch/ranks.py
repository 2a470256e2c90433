"""What the supervisor knows of the ranks that it watches, wherever they run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from aligner.observability.logs import launcher_line
from aligner.schema import Config


class Rank(Protocol):
    """One started rank."""

    role: str
    rank: int
    log: Path
    log_start: int
    """Where its own part of the log begins, in bytes."""
    restarts: int
    """How often its group had been started again by then."""
    ended_at: float | None
    """`time.monotonic()` at which its end was noticed."""

    @property
    def starter_said(self) -> str:
        """What was said of it by what started it, and is not in its log; empty where that is nothing."""
        ...

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        ...


class Ranks(Protocol):
    """Starts, watches and ends the ranks of a run."""

    def start(self, role: str, restarts: int = 0) -> list[Rank]:
        """Start all ranks of a role or server group, their output appended to their logs; `prepare` is a role of one rank."""
        ...

    def poll(self) -> None:
        """Notice which ranks have ended since the last call."""
        ...

    def tell_to_stop(self, ranks: Sequence[Rank]) -> None:
        """Ask trainer ranks that still run to end with a checkpoint; as often as one likes."""
        ...

    def terminate(self, ranks: Sequence[Rank]) -> None:
        """SIGTERM to those that still run. Not to their helpers, such as Triton, which they need until they have drained."""
        ...

    def kill(self, ranks: Sequence[Rank]) -> bool:
        """Kill these ranks and all that came of them; returns whether there was nothing left to kill."""
        ...

    def forget(self, ranks: Sequence[Rank]) -> None:
        """Ended ranks that are of no account any more."""
        ...


def append_restart(log: Path, role: str, rank: int, restarts: int, config: Config) -> None:
    """Note in a rank's log that what follows is another start of the role."""
    told = f"{role} is started again ({restarts} of {config.server.max_restarts})"
    with log.open("a") as lines:
        lines.write(launcher_line(config.logging.format, role, rank, told))
