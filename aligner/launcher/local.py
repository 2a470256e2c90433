"""`aligner launch` on one machine: a process a rank, after the experiments whose results the run
needs."""

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

from rich.console import Console

from aligner.config.dry_run.dry_run_plan import DryRun, changes_table, plan_dry_run
from aligner.config.prerequisites import Prerequisite, RunPlan
from aligner.errors import AlignerError, ConfigError
from aligner.files import new_directory
from aligner.launcher.failure import failure_error
from aligner.launcher.forks import ForkServer
from aligner.launcher.heartbeats import LifeWatch, heartbeat_environment
from aligner.launcher.processes import START, Interrupts, Processes, RankProcess, launch_mark
from aligner.launcher.rank_environment import (
    Command,
    FreePorts,
    library_environment,
    local_hosts,
    role_command,
    world_environment,
)
from aligner.launcher.ranks import Ranks, log_of
from aligner.launcher.run_directory import LockedError, locked, refuse_locked
from aligner.launcher.supervisor import Supervisor
from aligner.observability.console import print_line
from aligner.observability.metrics import read_metrics
from aligner.paths import run_paths
from aligner.placement.addresses import LOOPBACK
from aligner.placement.local_devices import local_devices
from aligner.placement.placement_table import placement_table, placements
from aligner.placement.roles import (
    PRETENDED_GPUS,
    describe_model,
    has_generator,
    role_ranks,
    threads_per_rank,
    uses_gpus,
    visible_gpus,
)
from aligner.schema import Config

_POLL_S = 0.1


def start_fork_server() -> ForkServer:
    """Start a process that imports for the ranks of a run whose configuration may follow later."""
    # The number of threads is the run's: `ForkServer.set_up` replaces it before it is read.
    return ForkServer({**library_environment(threads=1), START: f"{launch_mark()}-0"})


def launch(
    plan: RunPlan,
    command: Command = role_command,
    tell: Callable[[Console], None] | None = None,
    forks: ForkServer | None = None,
) -> None:
    """Run a whole configuration and its prerequisite experiments on this machine.

    Args:
        plan: The run and its prerequisite experiments.
        command: Makes the command of a role's ranks.
        tell: Prints more about the run, after its directory.
        forks: A process for the first run, started before the configuration was known.

    Raises:
        ConfigError: Something is wrong with the configuration. No rank was started, and nothing is
            left behind.
        AlignerError: A role failed. Every process has ended, as for the other errors.
        Stopped: The launcher was told to stop, and the run has saved a checkpoint.
        Interrupted: The launcher was told to end at once.
    """
    if told := os.environ.get(PRETENDED_GPUS):
        raise ConfigError(
            f"{PRETENDED_GPUS}={told}: is supported only by `aligner validate`; unset it to launch"
            " a run"
        )
    root, console = run_paths(plan.config).root, Console()
    print(f"run directory: {root}", flush=True)
    refuse_locked(root)
    plan.check()
    if tell is not None:
        tell(console)
    with Interrupts(console) as interrupts:
        servers = [] if forks is None else [forks]

        def run(config: Config) -> None:
            RunPlan(config, ()).check()
            make_ranks = partial(LocalRanks, command, forks=servers.pop() if servers else None)
            Supervisor(config, console, interrupts, make_ranks, local_hosts(config)).run()

        for first in plan.prerequisites:
            _complete(first, run, interrupts, console)
        run(plan.config)


def _complete(
    first: Prerequisite, run: Callable[[Config], None], interrupts: Interrupts, console: Console
) -> None:
    """Return when the result is there: made already, by another launch, or by a `run` that goes on
    from its last checkpoint.

    Raises the run's own error, with the experiment's name, Interrupted, and Stopped.
    """
    waiting = False

    def wait(error: LockedError) -> None:
        """Another launch makes the result: tell which one, once, and look whether to stop."""
        nonlocal waiting
        if not waiting:
            print_line(
                console,
                f"waiting for prerequisite experiment {first.name} in {first.entry}, which"
                f" {error.holder} is running",
            )
            waiting = True
        interrupts.check_before_training()
        time.sleep(_POLL_S)

    if not first.is_complete:
        with locked(first.entry, wait):
            if not first.is_complete:
                root = run_paths(first.config).root
                print_line(
                    console,
                    f"running prerequisite experiment {first.name} ({first.gives}) first; run"
                    f" directory: {root}",
                )
                try:
                    _make(first, run, interrupts, console)
                except AlignerError as error:
                    raise type(error)(f"prerequisite experiment {first.name}: {error}") from error
    print_line(console, f"prerequisite experiment {first.name}: result in {first.result}")


class _Converter(Processes, Ranks):
    """The process that converts the last checkpoint of a prerequisite experiment."""

    def __init__(self, command: tuple[str, ...], config: Config) -> None:
        super().__init__(config.cluster.stop_timeout_s)
        self._command, self._config = command, config

    def start(self, role: str, restarts: int = 0) -> list[RankProcess]:
        """See `Ranks`."""
        environment = heartbeat_environment(self._config, role, 1)
        log = log_of(self._config, role, 0, restarts)
        return [self.spawn(role, 0, self._command, environment, log, restarts)]


def _make(
    first: Prerequisite,
    run: Callable[[Config], None],
    interrupts: Interrupts,
    console: Console,
) -> None:
    """Run the experiment, and keep what it leaves as the result, which appears only when it is
    complete."""
    config, paths = first.config, run_paths(first.config)
    for unfinished in first.entry.glob(".result.*"):  # of a launch that was killed
        shutil.rmtree(unfinished)
    run(replace(config, run=replace(config.run, resume="auto")))
    if first.files:
        with new_directory(first.result) as directory:
            for name in first.files:
                copy = shutil.copytree if (paths.root / name).is_dir() else shutil.copyfile
                copy(paths.root / name, directory / name)
    else:
        # The last checkpoint's model is converted in a process of its own: this one has no torch.
        command = (sys.executable, "-m", "aligner", "convert", str(paths.root), str(first.result))
        with closing(_Converter(command, config)) as converter:
            (rank,) = converter.start("convert")
            life = LifeWatch(config, "convert", [rank])
            while rank.exit_code is None:
                interrupts.check_before_training()
                time.sleep(_POLL_S)
                converter.poll()
                life.kill_silent(converter, partial(print_line, console))
        if rank.exit_code:
            raise failure_error([rank])
        # with optimizer states, several times the result; nothing goes on from here
        shutil.rmtree(paths.checkpoints)


class LocalRanks(Processes, Ranks):
    """The ranks of a run as processes of this machine."""

    def __init__(
        self, command: Command, config: Config, ports: FreePorts, forks: ForkServer | None = None
    ) -> None:
        super().__init__(config.cluster.stop_timeout_s)
        self._command, self._config, self._ports = command, config, ports
        # What CUDA has begun in a process does not go on in its forks. Other commands than
        # aligner's own are not forked.
        if command is role_command and not uses_gpus(config):
            server = forks or start_fork_server()
            self.fork_ranks(server)
            roles = dict.fromkeys(role.partition(".")[0] for role in role_ranks(config))
            environment = library_environment(threads_per_rank(config))
            server.set_up(run_paths(config).config, roles, environment)

    def start(self, role: str, restarts: int = 0) -> list[RankProcess]:
        """See `Ranks`."""
        ranks, started = role_ranks(self._config).get(role, 1), []
        command = self._command(role, run_paths(self._config).config)
        world = {
            **world_environment(
                ranks, ranks, LOOPBACK, next(self._ports), threads_per_rank(self._config)
            ),
            **heartbeat_environment(self._config, role, ranks),
        }
        for rank in range(ranks):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                **world,
                **self._visible_to(role),
            }
            log = log_of(self._config, role, rank, restarts)
            started.append(self.spawn(role, rank, command, environment, log, restarts))
        return started

    def _visible_to(self, group: str) -> dict[str, str]:
        """What has CUDA show a role's ranks its own devices, which they count from 0."""
        devices, visible = local_devices(self._config).get(group), visible_gpus()
        if devices is None:
            return {}
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(
                str(device) if visible is None else visible[device] for device in devices
            )
        }


_CONNECT_S = 2.0


def launch_dry_run(plan: RunPlan, forks: ForkServer | None = None) -> None:
    """Plan the dry run, print its changes, run it, and print what it has exercised.

    Takes `forks` and raises errors as `launch` does.
    """
    dry_run = _plan_here(plan)
    launch(dry_run.plan, tell=partial(_show, dry_run), forks=forks)
    config = dry_run.plan.config
    print(_exercised(config, read_metrics(run_paths(config).metrics)), flush=True)


def validate_dry_run(plan: RunPlan) -> None:
    """Check the configuration as it was given, and say what its dry run would be; start nothing."""
    dry_run, console = _plan_here(plan), Console()
    shape = dry_run.plan.check()
    _show(dry_run, console)
    console.print(placement_table(dry_run.plan.config))
    print(describe_model(dry_run.plan.config, shape))


def _plan_here(plan: RunPlan) -> DryRun:
    """The dry run on this machine, of which it will use the CPU alone, in this process and those it
    starts."""
    dry_run = plan_dry_run(plan, _is_reachable)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return dry_run


def _show(dry_run: DryRun, console: Console) -> None:
    """What is otherwise than in the run, and what a person should know about it."""
    console.print(changes_table(dry_run))
    for note in dry_run.notes:
        print_line(console, f"note: {note}")


def _exercised(config: Config, metrics: Sequence[Mapping[str, float]]) -> str:
    """One line: the layouts that ran, that weights reached the engine, and how far its log-probs
    are from the trainer's."""
    roles = ", ".join(
        f"{place.role} {place.layout}" for place in placements(config) if place.layout != "-"
    )
    steps = [record for record in metrics if record["step"] > 0]
    parts = [f"dry run passed: {len(steps)} steps with {roles}"]
    if config.algorithm.generates and any(
        "time/reshard" in step or "time/snapshot" in step for step in steps
    ):
        where = "the generator's" if has_generator(config) else "the engine's"
        parts.append(f"weights resharded into {where} layout, verified by checksum")
    # Of samples that older weights drew it would measure the training between.
    fresh = [step for step in steps if not step.get("staleness/max")]
    if mismatches := [
        step["mismatch/logprob_abs"] for step in fresh if "mismatch/logprob_abs" in step
    ]:
        parts.append(f"engine and trainer log-probs differ by at most {max(mismatches):.1e}")
    return "; ".join(parts)


def _is_reachable(url: str) -> bool:
    """Whether something listens where an HTTP scorer or a judge should be."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname, port), timeout=_CONNECT_S):
            return True
    except OSError:
        return False
