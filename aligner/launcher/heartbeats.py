"""Signs of life: each rank touches a file every few seconds, and the supervisor counts for how long
it has not.

A process that has ended is noticed by its end; one that is stopped, or whose interpreter is stuck,
by this alone.
"""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from aligner.launcher.processes import LAUNCHER_PID
from aligner.launcher.rank_environment import IS_TASK
from aligner.launcher.ranks import Rank, Ranks
from aligner.launcher.server_ports import is_healthy
from aligner.paths import run_paths
from aligner.placement.addresses import load_endpoints
from aligner.placement.roles import server_ranks
from aligner.schema import Config


def _patience(config: Config, role: str) -> tuple[str, float, float]:
    """For how long ranks of a role or server group may show no life: key and seconds. And those
    between two signs or looks."""
    key, seconds = "server.health_timeout_s", config.server.health_timeout_s
    if role == "trainer":
        key, seconds = "cluster.heartbeat_timeout_s", config.cluster.heartbeat_timeout_s
    return key, seconds, min(5.0, seconds / 6)


def show_life(config: Config, role: str) -> None:
    """Have this rank's file touched while its interpreter runs, and its Triton answers where it has
    one.

    Whatever else the rank does is no matter. Nothing without a launcher.
    """
    if LAUNCHER_PID not in os.environ and IS_TASK not in os.environ:
        return
    rank, paths, (_, _, pause_s) = (
        int(os.environ["RANK"]),
        run_paths(config),
        _patience(config, role),
    )
    file = paths.heartbeat(role, rank)
    endpoint = (
        load_endpoints(paths.endpoints)[role]
        if role in server_ranks(config) and rank == 0
        else None
    )

    def beat() -> None:
        while True:
            if endpoint is None or is_healthy(config, role, endpoint, timeout_s=2 * pause_s):
                # a full disk; without a file the rank is not judged by it
                with contextlib.suppress(OSError):
                    file.parent.mkdir(exist_ok=True)
                    file.touch()
            time.sleep(pause_s)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


class LifeWatch:
    """How long each rank of a role or server group has shown no life. One that has shown none yet
    is still starting.

    Seconds count only while this process runs: where a whole run was suspended, as some schedulers
    do, nobody was silent. Clocks of different machines are not compared.
    """

    def __init__(self, config: Config, role: str, ranks: Sequence[Rank]) -> None:
        """The ranks were started just now: what earlier ones have left is no sign of theirs."""
        self._key, self._limit_s, self._pause_s = _patience(config, role)
        self._files = {rank: run_paths(config).heartbeat(role, rank.rank) for rank in ranks}
        self._last = {rank: _touched(file) for rank, file in self._files.items()}
        self._silent_s: dict[Rank, float] = {}
        self._looked_at = time.monotonic()

    @property
    def is_in_doubt(self) -> bool:
        """Whether a rank that runs has shown no life for half of the time that it may."""
        return any(
            silent_s > self._limit_s / 2
            for rank, silent_s in self._silent_s.items()
            if rank.exit_code is None
        )

    def kill_silent(self, ranks: Ranks) -> None:
        """Kill who has shown no life for too long: that is its end, as any other. To be called
        often."""
        elapsed = time.monotonic() - self._looked_at
        if elapsed < self._pause_s:
            return
        self._looked_at += elapsed
        for rank, file in self._files.items():
            if (touched := _touched(file)) != self._last[rank]:
                self._last[rank], self._silent_s[rank] = touched, 0.0
            elif rank in self._silent_s and rank.exit_code is None:
                self._silent_s[rank] += min(elapsed, 2 * self._pause_s)
                if self._silent_s[rank] > self._limit_s:
                    ranks.kill_for(f"sent no heartbeat for {self._limit_s:g} s ({self._key})", rank)


def _touched(file: Path) -> int | None:
    """When, by its own machine's clock. Opened: what a shared file system tells of an unopened file
    may be a minute old."""
    try:
        with file.open() as opened:
            return os.fstat(opened.fileno()).st_mtime_ns
    except OSError:
        return None
