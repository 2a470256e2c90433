"""Send a heartbeat from each rank, and kill ranks that stop sending heartbeats.

A heartbeat is an update of the rank's file every few seconds. The supervisor detects the exit of a
process without heartbeats. It detects a suspended process or a hanging interpreter only by missing
heartbeats.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from aligner.launcher.rank_environment import is_own_server_healthy
from aligner.launcher.rank_heartbeat import HEARTBEAT, STACKS_SIGNAL, require_for_heartbeat
from aligner.launcher.ranks import Rank, Ranks
from aligner.observability.logs import format_launcher_line
from aligner.paths import get_run_paths
from aligner.placement.addresses import load_endpoints
from aligner.placement.roles import count_server_ranks
from aligner.schema import Config

# Seconds of silence after which the console reports a silent rank.
_REPORTED_SILENCE_S = 30.0


def _heartbeat_timeout(config: Config, role: str) -> tuple[str, float, float]:
    """Return the heartbeat timeout of a role.

    Returns:
        The configuration key of the timeout, the timeout in seconds, and the seconds between two
        heartbeats.
    """
    key = "cluster.heartbeat_timeout_s"
    seconds = config.cluster.heartbeat_timeout_s
    if role in count_server_ranks(config):
        key = "server.health_timeout_s"
        seconds = config.server.health_timeout_s
    return key, seconds, min(5.0, seconds / 6)


def heartbeat_environment(config: Config, role: str, ranks: int) -> dict[str, str]:
    """Return the environment variable that makes the ranks of a role send heartbeats.

    The function also creates the heartbeat files, because the ranks cannot create them on a full
    disk.

    Args:
        config: The run's configuration.
        role: Role or server group.
        ranks: Number of ranks of the role or server group.
    """
    files = [get_run_paths(config).heartbeat(role, rank) for rank in range(ranks)]
    with contextlib.suppress(OSError):
        files[0].parent.mkdir(parents=True, exist_ok=True)
        for file in files:
            file.touch()
    _, _, pause_s = _heartbeat_timeout(config, role)
    prefix = str(files[0]).removesuffix("0")
    return {HEARTBEAT: f"{pause_s:g}:{prefix}"}


def require_triton_for_heartbeat(config: Config, role: str) -> None:
    """Make the heartbeat of a server's rank 0 depend on the health of its Triton server.

    The dependency begins when the server is healthy for the first time, and at the latest after
    `server.start_timeout_s`. Before that, a server that loads its model sends heartbeats, too. On
    other ranks and in other roles, the function does nothing.
    """
    file = get_run_paths(config).endpoints
    if role not in count_server_ranks(config) or int(os.environ["RANK"]) or not file.is_file():
        return
    endpoint = load_endpoints(file)[role]
    _, _, pause_s = _heartbeat_timeout(config, role)
    was_healthy = False
    # The launcher may see a healthy server that hangs before this process asks for the first time.
    start_deadline = time.monotonic() + config.server.start_timeout_s

    def is_triton_alive() -> bool:
        nonlocal was_healthy
        healthy = is_own_server_healthy(config, role, endpoint, timeout_s=2 * pause_s)
        was_healthy = was_healthy or healthy
        return healthy or (not was_healthy and time.monotonic() < start_deadline)

    require_for_heartbeat(is_triton_alive)


class HeartbeatMonitor:
    """Monitor of the seconds since the last heartbeat of each rank of one role or server group.

    `RankGroup` creates one monitor for each start of its ranks. Only time in which this process
    runs is counted, so that no rank becomes silent if a scheduler suspends the whole run. Clocks of
    different machines are not compared.
    """

    def __init__(
        self, config: Config, role: str, ranks: Sequence[Rank], first_heartbeat_s: float = 0.0
    ) -> None:
        """Monitor ranks that have just been started.

        Args:
            config: The run's configuration.
            role: Role or server group.
            ranks: Ranks of the role or server group.
            first_heartbeat_s: Timeout of the first heartbeat in seconds, if it is longer than the
                configured timeout. Ranks that Slurm starts may have to wait for their container
                image.
        """
        self._key, self._limit_s, self._pause_s = _heartbeat_timeout(config, role)
        self._format = config.logging.format
        self._logs = get_run_paths(config).logs
        self._files = {rank: get_run_paths(config).heartbeat(role, rank.rank) for rank in ranks}
        self._last_heartbeats = {
            rank: _modification_time(file) for rank, file in self._files.items()
        }
        self._silent_s = dict.fromkeys(ranks, 0.0)
        self._limits_s = dict.fromkeys(ranks, max(self._limit_s, first_heartbeat_s))
        self._reported: set[Rank] = set()
        """Ranks that the console has reported as silent."""
        self._last_check_at = time.monotonic()

    @property
    def is_silent(self) -> bool:
        """Whether a running rank has been silent for half of the timeout."""
        return any(
            silent_s > self._limits_s[rank] / 2
            for rank, silent_s in self._silent_s.items()
            if rank.exit_code is None
        )

    def kill_silent(self, ranks: Ranks, notify: Callable[[str], None]) -> None:
        """Kill ranks that have exceeded their timeout; the supervisor treats them as crashed.

        Call this method repeatedly. It requests the Python stacks of all ranks of the run one check
        before it kills a rank.

        Args:
            ranks: All ranks of the run.
            notify: Function that prints a line on the console.
        """
        elapsed = time.monotonic() - self._last_check_at
        if elapsed < self._pause_s:
            return
        self._last_check_at += elapsed
        for rank, file in self._files.items():
            if (heartbeat := _modification_time(file)) != self._last_heartbeats[rank]:
                self._last_heartbeats[rank] = heartbeat
                self._note_heartbeat(rank, notify)
            elif rank.exit_code is None:
                # If more time has elapsed, this process itself was suspended.
                self._silent_s[rank] += min(elapsed, 2 * self._pause_s)
                self._handle_silence(rank, ranks, notify)

    def _note_heartbeat(self, rank: Rank, notify: Callable[[str], None]) -> None:
        """Reset the silent time of a rank, and report that a silent rank sends heartbeats again."""
        self._silent_s[rank] = 0.0
        self._limits_s[rank] = self._limit_s
        rank.has_stacks = False
        if rank in self._reported:
            self._reported.remove(rank)
            notify(f"{rank.role} rank {rank.rank} sends heartbeats again")

    def _handle_silence(self, rank: Rank, ranks: Ranks, notify: Callable[[str], None]) -> None:
        """Report a silent rank, then request Python stacks, and finally kill the rank."""
        silent_s = self._silent_s[rank]
        limit_s = self._limits_s[rank]
        if silent_s > min(limit_s / 2, _REPORTED_SILENCE_S) and rank not in self._reported:
            self._reported.add(rank)
            notify(
                f"waiting for {rank.role} rank {rank.rank}: no heartbeat for {silent_s:.0f} s"
                f" (limit {limit_s:g} s, {self._key}). Log: {rank.log}"
            )
        if silent_s <= limit_s - self._pause_s:
            return
        # The kill follows at a later check, so that the ranks have time to print their stacks.
        if not rank.has_stacks:
            self._print_stacks(rank, ranks)
        elif silent_s > limit_s:
            ranks.kill_rank(f"sent no heartbeat for {limit_s:g} s ({self._key})", rank)

    def _print_stacks(self, silent: Rank, ranks: Ranks) -> None:
        """Make all ranks of the run print their Python stacks into their logs.

        A suspended process cannot print its stacks, but stacks of other ranks may show the
        operation that waits for the suspended process.
        """
        running = ranks.running
        reason = (
            f"{silent.role} rank {silent.rank} has sent no heartbeat for"
            f" {self._silent_s[silent]:.0f} s; the Python stacks of this rank follow if it responds"
        )
        for rank in running:
            with contextlib.suppress(OSError), rank.log.open("a") as lines:
                lines.write(format_launcher_line(self._format, rank.role, rank.rank, reason))
        ranks.send(STACKS_SIGNAL, running)
        silent.has_stacks = True


def _modification_time(file: Path) -> int | None:
    """Return a file's modification time in nanoseconds, by the clock of the machine that wrote it.

    The result is None if the file is missing. The function opens the file, because a shared file
    system may report attributes that are a minute old for an unopened file.
    """
    try:
        with file.open() as opened:
            return os.fstat(opened.fileno()).st_mtime_ns
    except OSError:
        return None
