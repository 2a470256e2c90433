"""`aligner launch` on one machine: each rank is a process of this machine.

Prerequisite experiments, whose results the run needs, run first. The module also launches dry runs:
the run's roles with a tiny model on this machine's CPUs (`dry_run.scale=tiny`).
"""

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

from aligner.cache_entries import record_use
from aligner.config.dry_run.dry_run_plan import DryRun, build_changes_table, plan_dry_run
from aligner.config.prerequisites import Prerequisite, RunPlan
from aligner.errors import AlignerError, ConfigError
from aligner.files import create_directory
from aligner.launcher.failure import build_failure_error, resume_command
from aligner.launcher.forks import ForkServer
from aligner.launcher.heartbeats import HeartbeatMonitor, heartbeat_environment
from aligner.launcher.processes import (
    START_ID_VARIABLE,
    Interrupts,
    Processes,
    RankProcess,
    get_launch_id,
)
from aligner.launcher.rank_environment import (
    CommandBuilder,
    FreePorts,
    build_role_command,
    library_environment,
    local_hosts,
    world_environment,
)
from aligner.launcher.ranks import Ranks, prepare_log
from aligner.launcher.run_directory import LockedError, lock_directory, require_unlocked
from aligner.launcher.supervisor import Supervisor
from aligner.observability.console import (
    RunConsole,
    print_line,
    print_table,
)
from aligner.observability.log_files import LogLimit
from aligner.observability.metrics import read_metrics
from aligner.observability.user_errors import user_error_environment
from aligner.paths import get_run_paths
from aligner.placement.addresses import LOOPBACK
from aligner.placement.local_devices import assign_local_devices
from aligner.placement.placement_table import build_placement_table, build_placements
from aligner.placement.roles import (
    GPU_COUNT_VARIABLE,
    compute_threads_per_rank,
    count_role_ranks,
    describe_model,
    get_visible_gpus,
    has_generator,
    uses_gpus,
)
from aligner.placement.server_environment import get_server_python
from aligner.schema import Config
from aligner.terminal import print_text

_POLL_S = 0.1


def start_fork_server() -> ForkServer:
    """Start a process that imports modules for the ranks of a run.

    The configuration need not be known yet: `ForkServer.set_up` passes it to the process later.
    """
    # `ForkServer.set_up` replaces the number of threads before any library reads it.
    return ForkServer({**library_environment(threads=1), START_ID_VARIABLE: f"{get_launch_id()}-0"})


def launch(
    plan: RunPlan,
    command: CommandBuilder = build_role_command,
    print_details: Callable[[Console], None] | None = None,
    fork_server: ForkServer | None = None,
    console: RunConsole | None = None,
) -> None:
    """Run a configuration and its prerequisite experiments on this machine.

    Args:
        plan: The run and its prerequisite experiments.
        command: Function that returns the command of a role's ranks.
        print_details: Function that prints details of the run after the run directory.
        fork_server: A fork server for the first run, started before the configuration was known.
        console: Console for the output; default is a console of the mode `normal`.

    Raises:
        ConfigError: The configuration is invalid. No rank was started, and no files are left
            behind.
        AlignerError: A role failed. After this error and the following ones, all processes have
            ended.
        Stopped: The launcher received a stop request, and the run has saved a checkpoint.
        Interrupted: A signal requested the immediate end of the run.
    """
    if pretended_gpus := os.environ.get(GPU_COUNT_VARIABLE):
        raise ConfigError(
            f"{GPU_COUNT_VARIABLE}={pretended_gpus}: is supported only by `aligner validate`; unset"
            " it to launch a run"
        )
    root = get_run_paths(plan.config).root
    console = console or RunConsole()
    console.print_event("launch", directory=str(root))
    if console.mode in ("normal", "verbose"):
        # Unlike `console`, `print` never colors the line, which the Python API reads.
        print(f"run directory: {root}", flush=True)
    require_unlocked(root)
    plan.check()
    if print_details is not None:
        print_details(console)
    # The run itself begins to use the cache only after its prerequisites, which may take days.
    for prerequisite in plan.prerequisites:
        record_use(prerequisite.entry, root)

    with Interrupts(console, f"resume the run with: {resume_command(plan.config)}") as interrupts:
        # The first run, which may be a prerequisite experiment, uses the fork server.
        fork_servers = [] if fork_server is None else [fork_server]

        def run(config: Config) -> None:
            RunPlan(config, ()).check()
            make_ranks = partial(
                LocalRanks, command, fork_server=fork_servers.pop() if fork_servers else None
            )
            Supervisor(config, console, interrupts, make_ranks, local_hosts(config)).run()

        for prerequisite in plan.prerequisites:
            _complete_prerequisite(prerequisite, run, interrupts, console)
        run(plan.config)


def _complete_prerequisite(
    prerequisite: Prerequisite,
    run: Callable[[Config], None],
    interrupts: Interrupts,
    console: Console,
) -> None:
    """Wait for the result of a prerequisite experiment, and run the experiment if necessary.

    If the result exists, the function returns. If another launch is producing the result, the
    function waits for it. Otherwise, it runs the experiment, from the last checkpoint if there is
    one.

    Args:
        prerequisite: The experiment.
        run: Function that runs a configuration.
        interrupts: Signals to the launcher.
        console: Console for messages.

    Raises:
        AlignerError: The experiment failed; the error has the type of the original error, and names
            the experiment.
        Stopped: A stop was requested.
        Interrupted: A signal requested the immediate end of the run.
    """
    is_reported = False

    def wait(error: LockedError) -> None:
        """Report the launch that produces the result, once, and check for signals."""
        nonlocal is_reported
        if not is_reported:
            print_line(
                console,
                f"waiting for prerequisite experiment {prerequisite.name} in {prerequisite.entry},"
                f" which {error.holder} is running",
            )
            is_reported = True
        interrupts.check_before_training()
        time.sleep(_POLL_S)

    if not prerequisite.is_complete:
        with lock_directory(prerequisite.entry, wait):
            if not prerequisite.is_complete:
                root = get_run_paths(prerequisite.config).root
                print_line(
                    console,
                    f"running prerequisite experiment {prerequisite.name}"
                    f" ({prerequisite.result_kind}) first; run directory: {root}",
                )
                try:
                    _run_prerequisite(prerequisite, run, interrupts, console)
                except AlignerError as error:
                    raise type(error)(
                        f"prerequisite experiment {prerequisite.name}: {error}"
                    ) from error
    print_line(
        console, f"prerequisite experiment {prerequisite.name}: result in {prerequisite.result}"
    )


class _Converter(Processes, Ranks):
    """The process that converts the last checkpoint of a prerequisite experiment."""

    def __init__(self, command: tuple[str, ...], config: Config) -> None:
        super().__init__(config.cluster.stop_timeout_s, LogLimit.from_config(config))
        self._command = command
        self._config = config

    def start(self, role: str, restarts: int = 0) -> list[RankProcess]:
        """See `Ranks`."""
        environment = heartbeat_environment(self._config, role, 1)
        log = prepare_log(self._config, role, 0, restarts)
        return [self.spawn(role, 0, self._command, environment, log, restarts)]


def _run_prerequisite(
    prerequisite: Prerequisite,
    run: Callable[[Config], None],
    interrupts: Interrupts,
    console: Console,
) -> None:
    """Run an experiment, and store its result atomically.

    The result consists of files of the run directory, or of the converted last checkpoint. See
    `_complete_prerequisite` for the arguments.
    """
    config = prerequisite.config
    paths = get_run_paths(prerequisite.config)
    # A launch that was killed may have left an incomplete result.
    for unfinished in prerequisite.entry.glob(".result.*"):
        shutil.rmtree(unfinished)
    run(replace(config, run=replace(config.run, resume="auto")))
    if prerequisite.files:
        with create_directory(prerequisite.result) as directory:
            for name in prerequisite.files:
                copy = shutil.copytree if (paths.root / name).is_dir() else shutil.copyfile
                copy(paths.root / name, directory / name)
    else:
        # The conversion needs torch, which the launcher never imports, so it runs in a process.
        command = (
            sys.executable,
            "-m",
            "aligner",
            "convert",
            str(paths.root),
            str(prerequisite.result),
        )
        with closing(_Converter(command, config)) as converter:
            (rank,) = converter.start("convert")
            heartbeats = HeartbeatMonitor(config, "convert", [rank])
            while rank.exit_code is None:
                interrupts.check_before_training()
                time.sleep(_POLL_S)
                converter.poll()
                heartbeats.kill_silent(converter, partial(print_line, console))
        if rank.exit_code:
            raise build_failure_error([rank])
        # Checkpoints with optimizer states are several times larger than the result, and no run
        # resumes from them.
        shutil.rmtree(paths.checkpoints)


class LocalRanks(Processes, Ranks):
    """The ranks of a run as processes of this machine. See `Ranks`."""

    def __init__(
        self,
        command: CommandBuilder,
        config: Config,
        ports: FreePorts,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Prepare to start ranks, and start a fork server if the ranks can be forked.

        Args:
            command: Function that returns the command of a role's ranks.
            config: The run's configuration.
            ports: Free ports for the process groups.
            fork_server: A fork server that was started before the configuration was known.
        """
        super().__init__(config.cluster.stop_timeout_s, LogLimit.from_config(config))
        self._command = command
        self._config = config
        self._ports = ports
        # A process cannot use CUDA after a fork from a process that initialized CUDA. The fork
        # server supports only aligner's own commands.
        if command is build_role_command and not uses_gpus(config):
            server = fork_server or start_fork_server()
            self.use_fork_server(server)
            roles = dict.fromkeys(role.partition(".")[0] for role in count_role_ranks(config))
            if get_server_python(config) != sys.executable:
                roles = {"trainer": None}  # the server imports only modules of its own environment
            environment = library_environment(compute_threads_per_rank(config))
            server.set_up(get_run_paths(config).config, roles, environment)

    def start(self, role: str, restarts: int = 0) -> list[RankProcess]:
        """See `Ranks`."""
        ranks = count_role_ranks(self._config).get(role, 1)
        started = []
        command = self._command(role, self._config)
        shared_environment = {
            **world_environment(
                ranks, ranks, LOOPBACK, next(self._ports), compute_threads_per_rank(self._config)
            ),
            **heartbeat_environment(self._config, role, ranks),
            **user_error_environment(self._config, role),
        }
        for rank in range(ranks):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                **shared_environment,
                **self._device_environment(role),
            }
            log = prepare_log(self._config, role, rank, restarts)
            started.append(self.spawn(role, rank, command, environment, log, restarts))
        return started

    def _device_environment(self, group: str) -> dict[str, str]:
        """Return the environment variable that restricts CUDA to the devices of a group.

        In the ranks, the indices of these devices begin at 0.
        """
        devices = assign_local_devices(self._config).get(group)
        visible = get_visible_gpus()
        if devices is None:
            return {}
        # If the launcher itself is restricted to some devices, the group's indices refer to these.
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(
                str(device) if visible is None else visible[device] for device in devices
            )
        }


_CONNECT_TIMEOUT_S = 2.0


def launch_dry_run(plan: RunPlan, fork_server: ForkServer | None = None) -> None:
    """Plan a dry run, print its changes, run it, and print the parts of the run that it has tested.

    Args:
        plan: The run and its prerequisite experiments.
        fork_server: See `launch`.

    Raises:
        AlignerError: A role failed. `launch` describes the other errors.
    """
    dry_run = _plan_cpu_dry_run(plan)
    launch(dry_run.plan, print_details=partial(_print_changes, dry_run), fork_server=fork_server)
    config = dry_run.plan.config
    print_text(_summarize_dry_run(config, read_metrics(get_run_paths(config).metrics)))


def validate_dry_run(plan: RunPlan) -> None:
    """Check a configuration, and print the changes, roles and model of its dry run; start nothing.

    Raises:
        ConfigError: The configuration is invalid.
    """
    dry_run = _plan_cpu_dry_run(plan)
    console = Console()
    shape = dry_run.plan.check()
    _print_changes(dry_run, console)
    print_table(console, build_placement_table(dry_run.plan.config))
    print_text(describe_model(dry_run.plan.config, shape))


def _plan_cpu_dry_run(plan: RunPlan) -> DryRun:
    """Return the dry run on this machine, and hide the GPUs from this process and its children."""
    dry_run = plan_dry_run(plan, _is_reachable)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return dry_run


def _print_changes(dry_run: DryRun, console: Console) -> None:
    """Print the differences between the dry run and the run, and notes about them."""
    print_table(console, build_changes_table(dry_run))
    for note in dry_run.notes:
        print_line(console, f"note: {note}")


def _summarize_dry_run(config: Config, metrics: Sequence[Mapping[str, float]]) -> str:
    """Return one line about a finished dry run.

    The line contains the layouts that ran, whether weights reached the engine, and the largest
    difference between the log-probs of the engine and the trainer.
    """
    roles = ", ".join(
        f"{placement.role} {placement.layout}"
        for placement in build_placements(config)
        if placement.layout != "-"
    )
    steps = [record for record in metrics if record["step"] > 0]
    parts = [f"dry run passed: {len(steps)} steps with {roles}"]
    if config.algorithm.generates_samples and any(
        "time/reshard" in step or "time/snapshot" in step for step in steps
    ):
        owner = "the generator's" if has_generator(config) else "the engine's"
        parts.append(f"weights resharded into {owner} layout, verified by checksum")
    # Compare only steps with on-policy samples: log-probs of samples from older weights also differ
    # because of the training steps in between.
    on_policy_steps = [step for step in steps if not step.get("staleness/max")]
    if mismatches := [
        step["mismatch/logprob_abs"] for step in on_policy_steps if "mismatch/logprob_abs" in step
    ]:
        parts.append(f"engine and trainer log-probs differ by at most {max(mismatches):.1e}")
    return "; ".join(parts)


def _is_reachable(url: str) -> bool:
    """Return whether a server listens at the address of an HTTP scorer or a judge."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname, port), timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False
