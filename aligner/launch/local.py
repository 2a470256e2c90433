"""`aligner launch` on one machine: start every role, watch them, end them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import closing

from rich.console import Console

from aligner.config.access import create_access_key
from aligner.config.checks import check
from aligner.config.compose import save_config
from aligner.config.endpoints import Endpoint, save_endpoints
from aligner.config.paths import RunPaths, model_directory, run_paths
from aligner.config.placement import server_ranks, threads_per_rank
from aligner.config.prerequisites import RunPlan
from aligner.config.schema import Config
from aligner.errors import AlignerError, ConfigError
from aligner.launch.endpoints import free_ports, health_address, pick_endpoints
from aligner.launch.failure import failure_error, reported_error, with_log
from aligner.launch.interrupts import Interrupted, Interrupts
from aligner.launch.prerequisites import complete
from aligner.launch.processes import Processes, RankProcess
from aligner.launch.roles import Command, rank_environment, role_command
from aligner.launch.servers import GRACE_S, ServerGroup
from aligner.launch.view import RunView
from aligner.observability.metrics import read_metrics
from aligner.observability.summary import print_summary
from aligner.observability.trace import write_trace

_POLL_S = 0.1


def launch(plan: RunPlan, command: Command = role_command, tell: Callable[[Console], None] | None = None) -> int:
    """Run a whole configuration on this machine, what it needs first; returns the exit code: 0, or 128 + signal when told
    to stop.

    Prints the run directory first, and then what `tell` does. Raises ConfigError before any role starts, with nothing left
    behind, and AlignerError when a role fails; by then every process has ended.
    """
    print(f"run directory: {run_paths(plan.config).root}", flush=True)
    plan.check()
    console = Console()
    if tell is not None:
        tell(console)

    def run(config: Config) -> None:
        _run(config, command, interrupts, console)

    with Interrupts() as interrupts:
        try:
            for first in plan.prerequisites:
                complete(first, run, interrupts, console)
            run(plan.config)
        except Interrupted as stop:
            console.print(f"stopped by {stop}; every process of the run has ended", markup=False)
            return 128 + stop.number
    return 0


def _run(config: Config, command: Command, interrupts: Interrupts, console: Console) -> None:
    """One run, from its check to its summary."""
    paths = run_paths(config)
    check(config)
    paths.root.mkdir(parents=True, exist_ok=True)
    save_config(config, paths.config)
    create_access_key(config)
    try:
        with Processes(config.cluster.stop_timeout_s) as processes:
            run = _LocalRun(config, paths, processes, interrupts, command, console)
            run.prepare()
            run.train()
    except ConfigError:
        if not config.run.resume:  # nothing has started: leave nothing behind
            shutil.rmtree(paths.root)
        raise
    finally:
        _write_trace(paths, console)
    print_summary(read_metrics(paths.metrics), paths, console)


def _write_trace(paths: RunPaths, console: Console) -> None:
    """The run's timeline as one file, however the run has ended; it does not fail for want of it."""
    try:
        write_trace(paths)
    except (AlignerError, OSError) as error:
        console.print(f"{paths.trace} was not written: {error}", markup=False, highlight=False, soft_wrap=True)


class _LocalRun:
    """The run of one configuration, from its model's preparation to its trainer's end."""

    def __init__(
        self,
        config: Config,
        paths: RunPaths,
        processes: Processes,
        interrupts: Interrupts,
        command: Command,
        console: Console,
    ) -> None:
        self._config = config
        self._paths = paths
        self._processes = processes
        self._interrupts = interrupts
        self._command = command
        self._console = console
        self._ports = free_ports(config)
        self._threads = threads_per_rank(config)
        self._groups: list[ServerGroup] = []
        self._trainers: list[RankProcess] = []

    def prepare(self) -> None:
        """Make the model's directory where it does not exist yet, and check it and the prompts against each other."""
        directory = model_directory(self._config)
        timeout = self._config.server.start_timeout_s
        (rank,) = self._start("prepare", 1)
        what = "checking" if directory.exists() else "making"
        self._console.print(f"{what} the model: {directory}", markup=False, highlight=False, soft_wrap=True)
        deadline = time.monotonic() + timeout
        while rank.exit_code is None:
            self._tick()
            if time.monotonic() > deadline:
                raise AlignerError(with_log(f"prepare did not end within server.start_timeout_s={timeout:g} s", rank))
        if rank.exit_code == ConfigError.exit_code:
            raise ConfigError(reported_error(rank))
        if rank.exit_code != 0:
            raise failure_error([rank])
        self._processes.forget([rank])

    def train(self) -> None:
        """Start every role, wait for the trainer's end, and let the servers finish what they have taken."""
        endpoints = pick_endpoints(self._config, self._ports)
        save_endpoints(endpoints, self._paths.endpoints)
        with closing(RunView(self._config, self._paths, self._console)) as view:
            self._groups = [self._server(group, endpoint, view.note) for group, endpoint in endpoints.items()]
            self._trainers = self._start("trainer", self._config.actor.parallel.ranks)
            stragglers = _Stragglers(self._config)
            while any(rank.exit_code != 0 for rank in self._trainers):
                self._tick()
                self._raise_failures()
                stragglers.check(self._trainers)
                for group in self._groups:
                    group.poll()
                view.waiting_for([group.name for group in self._groups if not group.was_healthy])
                view.update()
            view.finish()
        self._drain()

    def _server(self, group: str, endpoint: Endpoint, tell: Callable[[str], None]) -> ServerGroup:
        def start(restarts: int) -> list[RankProcess]:
            return self._start(group, server_ranks(self._config)[group], restarts)

        return ServerGroup(group, health_address(self._config, endpoint), self._config, self._processes, start, tell)

    def _start(self, role: str, ranks: int, restarts: int = 0) -> list[RankProcess]:
        command, port = self._command(role, self._paths.config), next(self._ports)
        started = []
        for rank in range(ranks):
            environment = rank_environment(rank, ranks, port, self._threads)
            log = self._paths.log(role, rank)
            if restarts:
                with log.open("a") as lines:
                    lines.write(f"--- {role} is started again ({restarts} of {self._config.server.max_restarts}) ---\n")
            started.append(self._processes.start(role, rank, command, environment, log, restarts))
        return started

    def _tick(self) -> None:
        self._interrupts.check()
        time.sleep(_POLL_S)
        self._processes.poll()

    def _raise_failures(self) -> None:
        """Raise AlignerError for a trainer rank that failed, or a server that ended and may not be started again."""
        if not self._fatal():
            return
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            self._tick()
        fatal = self._fatal()
        if not fatal:  # what ended first was a consequence of what may be started again
            return
        ended = [rank for group in self._groups for rank in group.ended]
        raise failure_error([*fatal, *(rank for rank in ended if rank not in fatal)], fatal)

    def _fatal(self) -> list[RankProcess]:
        lost = [rank for group in self._groups if group.lost for rank in group.ended]
        return [*lost, *(rank for rank in self._trainers if rank.exit_code)]

    def _drain(self) -> None:
        """SIGTERM to the servers, and time to answer what they have taken; whoever needs more is ended with the run."""
        servers = [rank for rank in self._processes.ranks if rank.role != "trainer"]
        self._processes.terminate(servers)
        deadline = time.monotonic() + self._config.server.drain_timeout_s
        while time.monotonic() < deadline and any(rank.exit_code is None for rank in servers):
            self._tick()


class _Stragglers:
    """Trainer ranks end together; one that does not follow the others is named."""

    def __init__(self, config: Config) -> None:
        self._timeout_s = config.cluster.collective_timeout_s

    def check(self, trainers: list[RankProcess]) -> None:
        """Raise AlignerError when a rank still runs long after the first has ended."""
        ends = [rank.ended_at for rank in trainers if rank.ended_at is not None]
        running = [rank for rank in trainers if rank.exit_code is None]
        if ends and running and time.monotonic() - min(ends) > self._timeout_s:
            message = f"trainer rank {running[0].rank} still runs {self._timeout_s:g} s after another rank ended"
            raise AlignerError(with_log(message, running[0]))
