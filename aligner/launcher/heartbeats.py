"""Heartbeats: each rank updates a file every few seconds, and the supervisor kills a rank that has
not done so for too long.

The supervisor notices the exit of a process by itself. A missing heartbeat is the only sign of a
process that is stopped, or whose interpreter hangs.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from aligner.launcher.rank_environment import is_healthy
from aligner.launcher.rank_heartbeat import HEARTBEAT, STACKS_SIGNAL, require_for_heartbeat
from aligner.launcher.ranks import Rank, Ranks
from aligner.observability.logs import launcher_line
from aligner.paths import run_paths
from aligner.placement.addresses import load_endpoints
from aligner.placement.roles import server_ranks
from aligner.schema import Config

_TELL_S = 30.0
"""Longest silence of a rank that the console does not mention."""


def _timeout(config: Config, role: str) -> tuple[str, float, float]:
    """Return the key and the seconds of a role's heartbeat timeout, and the seconds between two
    heartbeats."""
    key, seconds = "cluster.heartbeat_timeout_s", config.cluster.heartbeat_timeout_s
    if role in server_ranks(config):
        key, seconds = "server.health_timeout_s", config.server.health_timeout_s
    return key, seconds, min(5.0, seconds / 6)


def heartbeat_environment(config: Config, role: str, ranks: int) -> dict[str, str]:
    """Return the environment variable that makes the ranks of a role send heartbeats.

    Creates their files: on a full disk the ranks could not.
    """
    files = [run_paths(config).heartbeat(role, rank) for rank in range(ranks)]
    with contextlib.suppress(OSError):
        files[0].parent.mkdir(parents=True, exist_ok=True)
        for file in files:
            file.touch()
    _, _, pause_s = _timeout(config, role)
    prefix = str(files[0]).removesuffix("0")
    return {HEARTBEAT: f"{pause_s:g}:{prefix}"}


def require_triton(config: Config, role: str) -> None:
    """On rank 0 of a server: from the time that the server is healthy, send heartbeats only while
    its Triton answers. Nothing on other ranks."""
    file = run_paths(config).endpoints
    if role not in server_ranks(config) or int(os.environ["RANK"]) or not file.is_file():
        return
    endpoint = load_endpoints(file)[role]
    _, _, pause_s = _timeout(config, role)
    was_healthy = False

    def answers() -> bool:
        nonlocal was_healthy
        healthy = is_healthy(config, role, endpoint, timeout_s=2 * pause_s)
        was_healthy = was_healthy or healthy
        return healthy or not was_healthy

    require_for_heartbeat(answers)


class LifeWatch:
    """The silence of each rank of a role or server group: seconds since its start or its last
    heartbeat.

    Seconds count only while this process runs: if a whole run was suspended, as some schedulers do,
    no rank was silent. Clocks of different machines are not compared.
    """

    def __init__(
        self, config: Config, role: str, ranks: Sequence[Rank], first_heartbeat_s: float = 0.0
    ) -> None:
        """Watch ranks that were started just now.

        Args:
            first_heartbeat_s: Time for the first heartbeat, if it is longer than the timeout: ranks
                that Slurm starts may wait for their image.
        """
        self._key, self._limit_s, self._pause_s = _timeout(config, role)
        self._format, self._logs = config.logging.format, run_paths(config).logs
        self._files = {rank: run_paths(config).heartbeat(role, rank.rank) for rank in ranks}
        self._last = {rank: _touched(file) for rank, file in self._files.items()}
        self._silent_s = dict.fromkeys(ranks, 0.0)
        self._limits_s = dict.fromkeys(ranks, max(self._limit_s, first_heartbeat_s))
        self._reported: set[Rank] = set()
        """Ranks that the console was told to be silent."""
        self._looked_at = time.monotonic()

    @property
    def is_in_doubt(self) -> bool:
        """Whether a running rank has been silent for half of the timeout."""
        return any(
            silent_s > self._limits_s[rank] / 2
            for rank, silent_s in self._silent_s.items()
            if rank.exit_code is None
        )

    def kill_silent(self, ranks: Ranks, tell: Callable[[str], None]) -> None:
        """Kill the ranks whose timeout is over, which is handled like a crash. To be called often.

        One look before that, all ranks of the run are made to print their Python stacks.

        Args:
            ranks: All ranks of the run.
            tell: Prints a line on the console.
        """
        elapsed = time.monotonic() - self._looked_at
        if elapsed < self._pause_s:
            return
        self._looked_at += elapsed
        for rank, file in self._files.items():
            if (touched := _touched(file)) != self._last[rank]:
                self._last[rank] = touched
                self._note_heartbeat(rank, tell)
            elif rank.exit_code is None:
                self._silent_s[rank] += min(elapsed, 2 * self._pause_s)
                self._handle_silence(rank, ranks, tell)

    def _note_heartbeat(self, rank: Rank, tell: Callable[[str], None]) -> None:
        self._silent_s[rank] = 0.0
        self._limits_s[rank] = self._limit_s
        rank.has_stacks = False
        if rank in self._reported:
            self._reported.remove(rank)
            tell(f"{rank.role} rank {rank.rank} sends heartbeats again")

    def _handle_silence(self, rank: Rank, ranks: Ranks, tell: Callable[[str], None]) -> None:
        silent_s, limit_s = self._silent_s[rank], self._limits_s[rank]
        if silent_s > min(limit_s / 2, _TELL_S) and rank not in self._reported:
            self._reported.add(rank)
            tell(
                f"waiting for {rank.role} rank {rank.rank}: no heartbeat for {silent_s:.0f} s"
                f" (limit {limit_s:g} s, {self._key}). Log: {rank.log}"
            )
        if silent_s <= limit_s - self._pause_s:
            return
        # Killed at a later look: a rank whose interpreter runs gets time to print its stacks.
        if not rank.has_stacks:
            self._print_stacks(rank, ranks)
        elif silent_s > limit_s:
            ranks.kill_for(f"sent no heartbeat for {limit_s:g} s ({self._key})", rank)

    def _print_stacks(self, silent: Rank, ranks: Ranks) -> None:
        """Make all ranks of the run print their stacks into their logs. A stopped process cannot;
        the stacks of the others may show what it was waited for."""
        running = ranks.running
        why = (
            f"{silent.role} rank {silent.rank} has sent no heartbeat for"
            f" {self._silent_s[silent]:.0f} s; the Python stacks of this rank follow if it responds"
        )
        for rank in running:
            with contextlib.suppress(OSError), rank.log.open("a") as lines:
                lines.write(launcher_line(self._format, rank.role, rank.rank, why))
        ranks.send(STACKS_SIGNAL, running)
        silent.has_stacks = True


def _touched(file: Path) -> int | None:
    """Return the file's modification time by its own machine's clock, None without a file.

    Opens the file: a shared file system may report an unopened file's attributes of a minute ago.
    """
    try:
        with file.open() as opened:
            return os.fstat(opened.fileno()).st_mtime_ns
    except OSError:
        return None
