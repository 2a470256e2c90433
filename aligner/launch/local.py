"""`aligner launch` on one machine: a process a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from aligner.checks.check import check
from aligner.config.prerequisites import RunPlan
from aligner.launch.endpoints import free_ports, local_hosts, pick_endpoints
from aligner.launch.free_ports import FreePorts
from aligner.launch.interrupts import Interrupts
from aligner.launch.lock import refuse_locked
from aligner.launch.prerequisites import complete
from aligner.launch.processes import Processes
from aligner.launch.ranks import Rank, append_restart
from aligner.launch.roles import Command, rank_environment, role_command
from aligner.launch.run import interruptible, run_directory
from aligner.launch.state import StateRecorder
from aligner.launch.supervisor import Supervisor
from aligner.paths import RunPaths, run_paths
from aligner.placement.roles import role_ranks, threads_per_rank
from aligner.schema import Config
from aligner.signals import STOP_SIGNAL


def launch(plan: RunPlan, command: Command = role_command, tell: Callable[[Console], None] | None = None) -> int:
    """Run a whole configuration on this machine, what it needs first; returns the exit code: 0, 75 when told to stop with a
    checkpoint, or 128 + signal when told to end at once.

    Prints the run directory first, and then what `tell` does. Raises ConfigError before any role starts, with nothing left
    behind, and AlignerError when a role fails; by then every process has ended.
    """
    print(f"run directory: {run_paths(plan.config).root}", flush=True)
    refuse_locked(run_paths(plan.config).root)
    plan.check()
    console = Console()
    if tell is not None:
        tell(console)

    def work(interrupts: Interrupts) -> bool:
        def run(config: Config) -> bool:
            return _run(config, command, interrupts, console)

        return all(complete(first, run, interrupts, console) for first in plan.prerequisites) and run(plan.config)

    return interruptible(work, console)


def _run(config: Config, command: Command, interrupts: Interrupts, console: Console) -> bool:
    """One run, from its check to its summary; whether it is at its end."""
    check(config)
    paths = run_paths(config)
    with (
        run_directory(config, console) as config,
        StateRecorder(paths.status, role_ranks(config)) as state,
        free_ports(config) as ports,
        LocalRanks(config, paths, command, ports) as ranks,
    ):
        supervisor = Supervisor(config, paths, ranks, state, interrupts, console)
        return supervisor.run(lambda: pick_endpoints(config, local_hosts(config), ports))


class LocalRanks(Processes):
    """The ranks of a run as processes of this machine; leaving the `with` block ends all of them."""

    def __init__(self, config: Config, paths: RunPaths, command: Command, ports: FreePorts) -> None:
        super().__init__(config.cluster.stop_timeout_s)
        self._config = config
        self._paths = paths
        self._command = command
        self._threads = threads_per_rank(config)
        self._sizes = {"prepare": 1, **role_ranks(config)}
        self._ports = ports

    def start(self, role: str, restarts: int = 0) -> list[Rank]:
        """See `Ranks`."""
        command, port, ranks = self._command(role, self._paths.config), next(self._ports), self._sizes[role]
        started: list[Rank] = []
        for rank in range(ranks):
            log = self._paths.log(role, rank)
            if restarts:
                append_restart(log, role, rank, restarts, self._config)
            environment = rank_environment(rank, ranks, port, self._threads)
            started.append(self.spawn(role, rank, command, environment, log, restarts))
        return started

    def tell_to_stop(self, ranks: Sequence[Rank]) -> None:
        """See `Ranks`."""
        self.send(STOP_SIGNAL, ranks)
