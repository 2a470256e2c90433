"""The interface between the supervisor and the ranks: `Rank` and `Ranks`.

Ranks are local processes, or tasks of a Slurm job.
"""

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aligner.launcher.exhausted_resources import count_oom_kills
from aligner.observability.logs import format_launcher_line
from aligner.paths import get_run_paths
from aligner.schema import Config


@dataclass(eq=False)
class Rank:
    """One started rank. `RankProcess` is a local process; `TaskRank` is a Slurm task."""

    role: str
    rank: int
    log: Path
    log_start: int
    """Number of bytes of earlier output of the log, see `observability.log_files`."""
    restarts: int
    """Number of restarts of the rank's group before this rank was started."""
    exit_code: int | None = field(default=None, kw_only=True)
    """Exit code, or the negative number of the signal that ended the rank; None while it runs."""
    ended_at: float | None = field(default=None, kw_only=True)
    """Time from `time.monotonic()` at which the exit was detected; None while the rank runs."""
    kill_reason: str | None = field(default=None, kw_only=True)
    """Reason for which the launcher killed only this rank; None if the launcher did not, or killed
    the whole group."""
    oom_kills_before: int = field(default_factory=count_oom_kills, kw_only=True)
    """Number of processes that the kernel had killed for lack of memory when this rank was
    started."""
    has_stacks: bool = field(default=False, kw_only=True)
    """Whether the Python stacks of all ranks were requested because this rank is silent."""

    @property
    def is_local(self) -> bool:
        """Whether the rank runs on the launcher's machine, within the launcher's limits."""
        return True

    @property
    def starter_messages(self) -> str:
        """Messages of the program that started the rank, such as srun; empty without messages.

        These messages are not in the rank's log.
        """
        return ""

    def record_exit(self, code: int, ended_at: float) -> None:
        """Record how and when the rank ended. Later calls have no effect.

        Args:
            code: Exit code, negative for a signal.
            ended_at: Time of the exit from `time.monotonic()`, in seconds.
        """
        if self.exit_code is None:
            self.exit_code = code
            self.ended_at = ended_at


class Ranks(ABC):
    """Start, monitor and end the ranks of a run.

    This is the interface of `LocalRanks` and `SlurmSteps`. The supervisor and its groups use it.
    """

    @abstractmethod
    def start(self, role: str, restarts: int = 0) -> Sequence[Rank]:
        """Start all ranks of a role or server group.

        Args:
            role: Role or server group; `prepare` is a role of one rank.
            restarts: Number of restarts of the group before this start.

        Returns:
            The started ranks, in the order of their numbers. Their output is appended to their
            logs.
        """

    @property
    @abstractmethod
    def running(self) -> Sequence[Rank]:
        """All ranks of the run that have not ended."""

    @property
    def start_delay_s(self) -> float:
        """Maximum seconds between the call of `start` and the beginning of a rank's process.

        The value is 0 if the launcher starts the process itself.
        """
        return 0.0

    @abstractmethod
    def poll(self) -> None:
        """Record the exits of ranks since the last call."""

    def wait(self, timeout_s: float) -> None:
        """Wait for `timeout_s` seconds.

        If the implementation can detect the exit of a process, the method returns at the next exit.
        """
        time.sleep(timeout_s)

    @abstractmethod
    def send(self, number: signal.Signals, ranks: Sequence[Rank]) -> None:
        """Send a signal to the given ranks that still run. The call may be repeated.

        Helper processes such as Triton do not receive the signal, because a rank needs them until
        it has drained its requests.
        """

    @abstractmethod
    def kill(self, ranks: Sequence[Rank]) -> bool:
        """Kill the given ranks and their helper processes, and drop the ranks when all have ended.

        Returns:
            True if all of these processes had already ended.
        """

    def kill_rank(self, reason: str, rank: Rank) -> None:
        """Kill a running rank, and record its end like any other exit.

        The end is recorded even if the kernel cannot end the process at this moment.

        Args:
            reason: Text that error messages append to the name of the rank.
            rank: The rank; nothing happens if it has ended.
        """
        if rank.exit_code is None:
            rank.kill_reason = reason
            self.send(signal.SIGKILL, [rank])
            rank.record_exit(-signal.SIGKILL, time.monotonic())

    @abstractmethod
    def close(self) -> None:
        """Send SIGTERM to all ranks, and wait until they have ended.

        Processes that still run after `cluster.stop_timeout_s` are killed.
        """


def get_max_restarts(config: Config, role: str) -> int:
    """Return the maximum number of restarts per hour of the trainer, `prepare` or a server
    group."""
    is_server = role not in ("prepare", "trainer")
    return config.server.max_restarts if is_server else config.run.max_restarts


def prepare_log(config: Config, role: str, rank: int, restarts: int) -> Path:
    """Return the path of the log of a rank that is about to start.

    Creates the directory of the log. If the rank is restarted, notes the restart in the log.
    """
    log = get_run_paths(config).log(role, rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    if restarts:
        message = f"restarting {role} (restart {restarts} of this launch)"
        with log.open("a") as lines:
            lines.write(format_launcher_line(config.logging.format, role, rank, message))
    return log
