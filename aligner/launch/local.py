"""`aligner launch` on one machine: a process a rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rich.console import Console

from aligner.config.prerequisites import RunPlan
from aligner.launch.interrupts import Interrupts
from aligner.launch.lock import refuse_locked
from aligner.launch.prerequisite_runs import complete
from aligner.launch.processes import Processes, RankProcess
from aligner.launch.rank_environment import Command, role_command, world_environment
from aligner.launch.ranks import Ranks, log_of
from aligner.launch.server_ports import FreePorts, local_hosts
from aligner.launch.supervisor import Supervisor
from aligner.paths import run_paths
from aligner.placement.addresses import LOOPBACK
from aligner.placement.roles import role_ranks, threads_per_rank
from aligner.schema import Config


def launch(plan: RunPlan, command: Command = role_command, tell: Callable[[Console], None] | None = None) -> None:
    """Run a whole configuration on this machine, what it needs first.

    Prints the run directory first, and then what `tell` does. Raises ConfigError before any role starts, with nothing left
    behind, AlignerError when a role fails, Stopped when told to stop, with a checkpoint, and Interrupted when told to end
    at once; by then every process has ended.
    """
    root, console = run_paths(plan.config).root, Console()
    print(f"run directory: {root}", flush=True)
    refuse_locked(root)
    plan.check()
    if tell is not None:
        tell(console)
    with Interrupts(console) as interrupts:

        def run(config: Config) -> None:
            RunPlan(config, ()).check()
            Supervisor(config, console, interrupts, partial(LocalRanks, command), local_hosts(config)).run()

        for first in plan.prerequisites:
            complete(first, run, interrupts, console)
        run(plan.config)


class LocalRanks(Processes, Ranks):
    """The ranks of a run as processes of this machine."""

    def __init__(self, command: Command, config: Config, ports: FreePorts) -> None:
        super().__init__(config.cluster.stop_timeout_s)
        self._config = config
        self._command = command
        self._ports = ports

    def start(self, role: str, restarts: int = 0) -> list[RankProcess]:
        """See `Ranks`."""
        ranks, started = role_ranks(self._config).get(role, 1), []
        command = self._command(role, run_paths(self._config).config)
        world = world_environment(ranks, ranks, LOOPBACK, next(self._ports), threads_per_rank(self._config))
        for rank in range(ranks):
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), **world}
            log = log_of(self._config, role, rank, restarts)
            started.append(self.spawn(role, rank, command, environment, log, restarts))
        return started
