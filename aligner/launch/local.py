"""`aligner launch` on one machine: start every role, watch them, end them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import closing

from rich.console import Console

from aligner.config.checks import check
from aligner.config.compose import save_config
from aligner.config.endpoints import Endpoint, save_endpoints
from aligner.config.paths import RunPaths, model_directory, run_paths
from aligner.config.placement import role_ranks, threads_per_rank
from aligner.config.schema import Config
from aligner.errors import AlignerError, ConfigError
from aligner.launch.endpoints import free_ports, is_ready, pick_endpoints
from aligner.launch.failure import failure_error, reported_error, with_log
from aligner.launch.interrupts import Interrupted, Interrupts
from aligner.launch.processes import Processes, RankProcess
from aligner.launch.roles import SERVED_MODEL, Command, rank_environment, role_command
from aligner.launch.view import RunView
from aligner.observability.metrics import read_metrics
from aligner.observability.summary import print_summary

_POLL_S = 0.1
_HEALTH_POLL_S = 0.5
_GRACE_S = 1.0
"""After a first failure, how long the ranks that fail with it are waited for: one of them may be the cause."""


def launch(config: Config, command: Command = role_command) -> int:
    """Run a whole configuration on this machine; returns the exit code: 0, or 128 + signal when told to stop.

    Prints the run directory first. Raises ConfigError before any role starts, with nothing left behind, and AlignerError
    when a role fails; by then every process has ended.
    """
    paths = run_paths(config)
    print(f"run directory: {paths.root}", flush=True)
    check(config)
    console = Console()
    paths.root.mkdir(parents=True, exist_ok=True)
    save_config(config, paths.config)
    try:
        with Interrupts() as interrupts, Processes(config.cluster.stop_timeout_s) as processes:
            run = _LocalRun(config, paths, processes, interrupts, command, console)
            run.prepare()
            run.train()
    except ConfigError:
        if not config.run.resume:  # nothing has started: leave nothing behind
            shutil.rmtree(paths.root)
        raise
    except Interrupted as stop:
        console.print(f"stopped by {stop}; every process of the run has ended", markup=False)
        return 128 + stop.number
    print_summary(read_metrics(paths.metrics), paths, console)
    return 0


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

    def prepare(self) -> None:
        """Make the model's directory where it does not exist yet, and check it and the prompts against each other."""
        directory = model_directory(self._config)
        timeout = self._config.server.start_timeout_s
        self._start("prepare", 1, threads=1)
        rank = self._processes.ranks[-1]
        what = "checking" if directory.exists() else "making"
        self._console.print(f"{what} the model: {directory}", markup=False, highlight=False, soft_wrap=True)
        deadline = time.monotonic() + timeout
        while rank.exit_code is None:
            self._tick()
            if time.monotonic() > deadline:
                raise AlignerError(with_log(f"prepare did not end within server.start_timeout_s={timeout:g} s", rank.log))
        if rank.exit_code == ConfigError.exit_code:
            raise ConfigError(reported_error(rank.log))
        if rank.exit_code != 0:
            raise failure_error([rank])
        self._processes.ranks.remove(rank)

    def train(self) -> None:
        """Start every role and wait for the trainer's end."""
        endpoints = pick_endpoints(self._config, self._ports)
        save_endpoints(endpoints, self._paths.endpoints)
        threads = threads_per_rank(self._config)
        with closing(RunView(self._config, self._paths, self._console)) as view:
            for role, ranks in role_ranks(self._config).items():
                self._start(role, ranks, threads)
            health = _Health(self._config, endpoints, self._log_of)
            stragglers = _Stragglers(self._config)
            trainers = [rank for rank in self._processes.ranks if rank.role == "trainer"]
            while any(rank.exit_code != 0 for rank in trainers):
                self._tick()
                self._raise_failures()
                stragglers.check(trainers)
                if (waiting := health.poll()) is not None:
                    view.waiting_for(waiting)
                view.update()
            view.finish()

    def _start(self, role: str, ranks: int, threads: int) -> None:
        command, port = self._command(role, self._paths.config), next(self._ports)
        for rank in range(ranks):
            environment = rank_environment(rank, ranks, port, threads)
            self._processes.start(role, rank, command, environment, self._paths.log(role, rank))

    def _tick(self) -> None:
        self._interrupts.check()
        time.sleep(_POLL_S)
        self._processes.poll()

    def _failed(self) -> list[RankProcess]:
        # A server has no business ending while the trainer runs, however politely.
        return [rank for rank in self._processes.ranks if rank.exit_code or (rank.role != "trainer" and rank.exit_code == 0)]

    def _raise_failures(self) -> None:
        if not self._failed():
            return
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            self._tick()
        raise failure_error(self._failed())

    def _log_of(self, role: str) -> RankProcess:
        return next(rank for rank in self._processes.ranks if rank.role == role)


class _Health:
    """Asks the servers whether they are healthy, until all of them are."""

    def __init__(self, config: Config, endpoints: dict[str, Endpoint], first_rank: Callable[[str], RankProcess]) -> None:
        self._timeout_s = config.server.start_timeout_s
        self._waiting = dict(endpoints)
        self._first_rank = first_rank
        self._started = time.monotonic()
        self._next = self._started

    def poll(self) -> list[str] | None:
        """The roles still waited for; None when nothing was asked. Raises AlignerError past the timeout."""
        now = time.monotonic()
        if now < self._next or not self._waiting:
            return None
        self._next = now + _HEALTH_POLL_S
        for role, endpoint in list(self._waiting.items()):
            if is_ready(endpoint, SERVED_MODEL[role]):
                del self._waiting[role]
            elif now - self._started > self._timeout_s:
                message = f"{role} was not healthy within server.start_timeout_s={self._timeout_s:g} s"
                raise AlignerError(with_log(message, self._first_rank(role).log))
        return list(self._waiting)


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
            raise AlignerError(with_log(message, running[0].log))
