"""The nodes of a run's Slurm job, and the ranks on them.

Whenever the ranks of a role or server group are started, `srun` starts one job step for them.
"""

import contextlib
import math
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from aligner.errors import STOP_SIGNAL, AlignerError
from aligner.launcher.job_ranks import (
    PlacedRanks,
    compute_job_threads,
    configured_environment,
    device_environment,
    job_environment,
    place_ranks,
    prepare_logs,
)
from aligner.launcher.rank_environment import FreePorts, build_role_command
from aligner.launcher.rank_heartbeat import IS_TASK, STACKS_SIGNAL
from aligner.launcher.ranks import Rank, Ranks
from aligner.launcher.slurm.containers import (
    has_bundle,
    list_bundle_shell_lines,
    list_pyxis_flags,
    send_to_bundle_step,
    write_bundle,
)
from aligner.launcher.slurm.slurm_commands import (
    expand_host_names,
    output_pattern,
    read_node_addresses,
    slurm_command,
)
from aligner.observability.log_files import LogLimit, count_output_bytes
from aligner.paths import get_run_paths
from aligner.placement.job_layout import JobLayout, RolePlacement, compute_job_layout
from aligner.placement.local_devices import parse_numbers
from aligner.placement.roles import count_role_ranks, get_role
from aligner.placement.slurm_container import (
    get_container_image,
    get_slurm_settings,
    uses_oci_bundles,
)
from aligner.schema import Config

# Seconds between two checks while the steps end.
_POLL_S = 0.2
# Seconds to wait for the end of killed steps.
_KILL_TIMEOUT_S = 30.0
# Printed for the cores of a rank if they follow from the CPUs of the nodes, which are not known
# before the job starts.
_UNKNOWN_CORES = "CORES"
# Seconds between two checks of the sizes of the logs, which are on a shared file system.
_LOG_CHECK_S = 5.0
# Minimum seconds between two identical signals to a step.
_RESEND_S = 2.0
# Message of srun for each task that ended with an error: task numbers and reason.
_TASK_EXITS = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.*)$", re.MULTILINE)
# Names that srun uses for the signals that end tasks.
_SIGNALS = {signal.strsignal(number): number for number in signal.Signals} | {
    "Out Of Memory": signal.SIGKILL
}
# Exit code of an OCI runtime whose container was ended by a signal, minus the signal's number.
_CONTAINER_SIGNAL_OFFSET = 128
# Messages of srun about ended tasks, and about the tasks that it ends because of them. The
# supervisor reports the exits of ranks itself.
_ROUTINE_MESSAGES = re.compile(
    r"^srun: (error: \S+: tasks? [\d,-]+: (?!Out Of Memory)|launch/slurm: |(Force"
    r" )?Terminat(ing|ed) StepId="
    r"|Job step aborted: ).*$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Nodes:
    """The nodes of one role or server group."""

    component: int | None
    """Index of the component in a heterogeneous job; None for other jobs."""
    names: tuple[str, ...]
    """Names of the nodes in Slurm."""
    address: str
    """Address of the first node, where rank 0 runs."""
    cpus: int | None = 1
    """Number of CPUs that the job has on each node; None before the job starts."""


@dataclass(frozen=True)
class Allocation:
    """A running job, and the nodes of each of its roles and server groups."""

    job: str
    """Slurm job id of the whole job, not of a component."""
    nodes: Mapping[str, Nodes]
    requeues: int = 0
    """Number of times that the job has been requeued."""


def read_allocation(layout: JobLayout, environment: Mapping[str, str] = os.environ) -> Allocation:
    """Return the allocation of the current job from Slurm's environment variables.

    Args:
        layout: Placement of the roles.
        environment: Environment variables of the job.

    Raises:
        AlignerError: This process is not in a Slurm job, or the job has a different number of
            nodes.
    """
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        raise AlignerError(
            "SLURM_JOB_ID is not set: `aligner supervise` must be called by the script of a Slurm"
            " job"
        )
    is_heterogeneous = "SLURM_HET_SIZE" in environment

    def read_variable(variable: str) -> list[str]:
        """Return the value of a Slurm variable for each component; missing values are empty."""
        variables = [f"{variable}_HET_GROUP_{index}" for index in range(len(layout.components))]
        return [
            environment.get(name, "") for name in (variables if is_heterogeneous else [variable])
        ]

    names = [
        expand_host_names(text) if text else [] for text in read_variable("SLURM_JOB_NODELIST")
    ]
    # The value is a list such as 64(x2),32 for nodes with 64, 64 and 32 CPUs; use the minimum.
    counts = [
        re.findall(r"(?:^|,)(\d+)", text) for text in read_variable("SLURM_JOB_CPUS_PER_NODE")
    ]
    cpus = [min(map(int, component_names), default=1) for component_names in counts]
    actual = [len(component_names) for component_names in names]
    required = [component_names.nodes for component_names in layout.components]
    if actual != required:
        raise AlignerError(
            f"the Slurm job's components have {actual} nodes, but the configuration requires"
            f" {required}"
        )
    addresses = {
        name: address
        for component_names in names
        for name, address in zip(component_names, read_node_addresses(component_names), strict=True)
    }

    def nodes(placement: RolePlacement) -> Nodes:
        group_names = _select_names(names, placement)
        return Nodes(
            placement.component if is_heterogeneous else None,
            group_names,
            addresses[group_names[0]],
            cpus[placement.component],
        )

    requeues = int(environment.get("SLURM_RESTART_COUNT", "0"))
    return Allocation(
        job, {group: nodes(placement) for group, placement in layout.placements.items()}, requeues
    )


def _select_names(names: Sequence[Sequence[str]], placement: RolePlacement) -> tuple[str, ...]:
    """Return the names of a group's nodes, from the names of each component's nodes."""
    component_names = names[placement.component]
    return tuple(component_names[index] for index in placement.node_range)


def describe_steps(config: Config) -> list[str]:
    """Return the command line of each job step of a run, in the order in which they start.

    The names of the nodes are placeholders, because Slurm chooses the nodes when the job starts:
    NODE0 is the first node of the first component.

    Raises:
        ConfigError: A role cannot be placed on the nodes.
    """
    layout = compute_job_layout(config)
    names: list[list[str]] = []
    for component in layout.components:
        first = sum(len(component_names) for component_names in names)
        names.append([f"NODE{first + index}" for index in range(component.nodes)])

    def nodes(placement: RolePlacement) -> Nodes:
        group_names = _select_names(names, placement)
        component = placement.component if len(layout.components) > 1 else None
        return Nodes(component, group_names, group_names[0], cpus=None)

    allocation = Allocation(
        "JOB", {group: nodes(placement) for group, placement in layout.placements.items()}
    )
    lines = []
    for number, role in enumerate(["prepare", *count_role_ranks(config)], start=1):
        step = plan_step(config, layout, allocation, role, f"{role}-{number}")
        variables = [
            f"{name}={value}" for name, value in device_environment(step.ranks.placement).items()
        ]
        lines.append(" ".join([*variables, shlex.join(step.command)]))
    return lines


@dataclass(eq=False)
class TaskRank(Rank):
    """A rank that is a task of a job step."""

    messages: Path
    """File with the messages of srun about the step."""

    @property
    def is_local(self) -> bool:
        """See `Rank`."""
        return False

    @property
    def starter_messages(self) -> str:
        """See `Rank`."""
        text = (
            _ROUTINE_MESSAGES.sub("", self.messages.read_text(errors="replace"))
            if self.messages.exists()
            else ""
        )
        return "\n".join(line for line in text.splitlines() if line)


@dataclass(eq=False)
class Step:
    """The ranks of one `srun` process.

    The process runs until all of its tasks have ended.
    """

    name: str
    process: subprocess.Popen[bytes]
    messages: Path
    """File with the messages of this srun process only."""
    ranks: Sequence[TaskRank]
    is_contained: bool = False
    """Whether the tasks are OCI runtimes, whose exit codes stand for those of the ranks."""
    _last_sent: dict[signal.Signals, float] = field(default_factory=dict)
    """Time at which each signal was last sent to the step."""

    @property
    def is_running(self) -> bool:
        """Whether srun is running."""
        return self.process.poll() is None

    def should_send(self, number: signal.Signals) -> bool:
        """Return whether a signal may be sent now, and record that it is sent.

        Slurm's controller forwards the signals, and should not receive several requests per second.
        """
        now = time.monotonic()
        if now - self._last_sent.get(number, -math.inf) < _RESEND_S:
            return False
        self._last_sent[number] = now
        return True

    def poll(self) -> None:
        """Record the exits of ranks that srun reports.

        When srun has ended, ranks without a message have exited with code 0.
        """
        if all(rank.exit_code is not None for rank in self.ranks):
            return
        code = self.process.poll()
        for index, (tasks, reason) in enumerate(
            _TASK_EXITS.findall(self.messages.read_text(errors="replace"))
        ):
            for task in parse_numbers(tasks):
                if task < len(self.ranks):
                    # Keep the order of srun's messages: an earlier exit is more likely the cause.
                    self.ranks[task].record_exit(
                        _parse_exit_code(reason, self.is_contained), time.monotonic() + index * 1e-6
                    )
        if code is not None:
            has_failed_rank = any(rank.exit_code for rank in self.ranks)
            for rank in self.ranks:
                rank.record_exit(0 if has_failed_rank or code == 0 else code, time.monotonic())


class SlurmSteps(Ranks):
    """The ranks of a run as tasks of job steps. See `Ranks`."""

    def __init__(
        self, layout: JobLayout, allocation: Allocation, config: Config, ports: FreePorts
    ) -> None:
        """Prepare to start steps.

        Args:
            layout: Placement of the roles.
            allocation: The nodes of the current job.
            config: The run's configuration.
            ports: Free ports for the process groups.
        """
        self._layout = layout
        self._allocation = allocation
        self._config = config
        self._ports = ports
        self._steps: list[Step] = []
        self._started = 0
        self._log_limit = LogLimit.from_config(config)
        self._check_logs_at = 0.0

    def start(self, role: str, restarts: int = 0) -> Sequence[TaskRank]:
        """See `Ranks`."""
        self._started += 1
        name = f"{role}-{self._started}"
        step = plan_step(self._config, self._layout, self._allocation, role, name)
        assert step.threads is not None  # the CPUs of a job's nodes are known
        is_contained = has_bundle(self._config, role)
        if is_contained:
            write_bundle(self._config, role, step.ranks.placement, name)
        # Each task reads its rank from Slurm's variables.
        environment = {
            IS_TASK: "1",
            **job_environment(
                self._config, role, step.ranks, step.nodes.address, next(self._ports), step.threads
            ),
            **configured_environment(self._config, role, step.ranks.placement),
        }
        logs = prepare_logs(self._config, role, len(step.ranks), restarts)
        # A requeued job keeps its job id. The number of requeues distinguishes the files of its
        # attempts.
        messages = logs[0].with_name(
            f"srun-{self._allocation.job}-{self._allocation.requeues}-{name}.log"
        )
        started = [
            TaskRank(role, rank, log, count_output_bytes(log), restarts, messages)
            for rank, log in enumerate(logs)
        ]
        with messages.open("wb") as output:
            process = subprocess.Popen(
                step.command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._steps.append(Step(name, process, messages, started, is_contained))
        return started

    @property
    def running(self) -> list[Rank]:
        """See `Ranks`."""
        return [rank for step in self._steps for rank in step.ranks if rank.exit_code is None]

    @property
    def start_delay_s(self) -> float:
        """See `Ranks`. A step may wait for its nodes and download its image."""
        return self._config.server.start_timeout_s

    def poll(self) -> None:
        """See `Ranks`."""
        for step in self._steps:
            step.poll()
        if time.monotonic() >= self._check_logs_at:
            self._check_logs_at = time.monotonic() + _LOG_CHECK_S
            self._log_limit.enforce()

    def send(self, number: signal.Signals, ranks: Sequence[Rank]) -> None:
        """See `Ranks`.

        srun itself does not receive the signal. The stop signal would end srun while its tasks are
        starting, and SIGTERM would make srun kill the tasks.
        """
        self._signal(number, self._find_steps(ranks))

    def kill(self, ranks: Sequence[Rank]) -> bool:
        """See `Ranks`. Slurm itself ends all processes of a step."""
        steps = self._find_steps(ranks)
        if any(step.is_running for step in steps):
            self._signal(signal.SIGKILL, steps)
            return False
        self._steps = [step for step in self._steps if step not in steps]
        return True

    def close(self) -> None:
        """See `Ranks`."""
        for number, timeout_s in (
            (signal.SIGTERM, self._config.cluster.stop_timeout_s),
            (signal.SIGKILL, _KILL_TIMEOUT_S),
        ):
            self._signal(number, self._steps)
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline and any(step.is_running for step in self._steps):
                time.sleep(_POLL_S)
        for step in self._steps:
            if step.is_running:
                step.process.kill()
            step.process.wait()

    def _signal(self, number: signal.Signals, steps: Sequence[Step]) -> None:
        """Send a signal to all tasks of the given steps that are running.

        A failure of Slurm's command is ignored, because callers repeat important signals.
        """
        receivers = [step for step in steps if step.is_running and step.should_send(number)]
        if number in (STOP_SIGNAL, signal.SIGTERM):
            contained = [step for step in receivers if step.is_contained]
            for step in contained:
                send_to_bundle_step(self._config, step.name, number)
            receivers = [step for step in receivers if step not in contained]
        running = {step.name for step in receivers}
        if not running:
            return
        # Each component of a heterogeneous job has its own job id.
        component_jobs = [
            os.environ.get(f"SLURM_JOB_ID_HET_GROUP_{index}")
            for index in range(len(self._layout.components))
        ]
        jobs = ",".join(job for job in component_jobs if job) or self._allocation.job
        with contextlib.suppress(AlignerError):
            listing = slurm_command(
                "squeue", "--noheader", "--steps", f"--jobs={jobs}", "--format=%i %j"
            )
            if step_ids := [
                line.split()[0]
                for line in listing.splitlines()
                if line.split(maxsplit=1)[1] in running
            ]:
                slurm_command("scancel", f"--signal={_signal_text(number)}", *step_ids)

    def _find_steps(self, ranks: Sequence[Rank]) -> list[Step]:
        """Return the steps that contain any of the given ranks."""
        return [step for step in self._steps if any(rank in ranks for rank in step.ranks)]


@dataclass(frozen=True)
class PlannedStep:
    """The command of a job step, and what it is built from."""

    ranks: PlacedRanks
    nodes: Nodes
    threads: int | None
    """Number of CPU threads per rank; None if it depends on nodes that are not known yet."""
    command: list[str]
    """The `srun` command."""


def plan_step(
    config: Config, layout: JobLayout, allocation: Allocation, role: str, name: str
) -> PlannedStep:
    """Return the job step that starts a role or server group.

    `SlurmSteps` starts the returned command, and `aligner launch --dry-run` prints it.

    Args:
        config: The run's configuration.
        layout: Placement of the roles.
        allocation: The nodes of the job.
        role: Role or server group; `prepare` has one rank, on the first node of the trainer.
        name: Name of the step.
    """
    ranks = place_ranks(config, layout, role)
    placement = ranks.placement
    nodes = allocation.nodes["trainer" if role == "prepare" else role]
    nodes = replace(nodes, names=nodes.names[: placement.nodes])
    threads = compute_job_threads(config, layout, placement, nodes.cpus)
    cores = None if layout.is_shared(placement) else str(threads or _UNKNOWN_CORES)

    # In a container, use the image's own installation of aligner.
    program = None if get_container_image(config, role) is None else ("aligner",)
    command = build_role_command(role, config, program)
    return PlannedStep(
        ranks,
        nodes,
        threads,
        srun_command(config, role, placement, nodes, len(ranks), cores, name, command),
    )


def srun_command(
    config: Config,
    role: str,
    placement: RolePlacement,
    nodes: Nodes,
    ranks: int,
    cores: int | str | None,
    name: str,
    command: Sequence[str],
) -> list[str]:
    """Return the `srun` command that starts all ranks of a role or server group.

    Args:
        config: The run's configuration.
        role: Role or server group.
        placement: Placement of the role in the job.
        nodes: Nodes of the role.
        ranks: Number of ranks.
        cores: Number of cores reserved for each rank, or a placeholder for it; None if several
            groups share the nodes.
        name: Name of the step.
        command: Command of each rank.
    """
    slurm = config.cluster.slurm
    settings = get_slurm_settings(config, role)
    paths = get_run_paths(config)
    flags = [
        f"--job-name={name}",
        "--export=ALL",  # the job itself may have been submitted with a restricted environment
        *([f"--het-group={nodes.component}"] if nodes.component is not None else []),
        f"--nodes={len(nodes.names)}",
        f"--nodelist={','.join(nodes.names)}",
        f"--ntasks={ranks}",
        f"--ntasks-per-node={placement.ranks_per_node}",
        # Slurm would bind all steps that share a node to the same first cores.
        *(["--whole", "--cpu-bind=none"] if cores is None else [f"--cpus-per-task={cores}"]),
        "--distribution=block",  # neighboring ranks share a node
        "--overlap",  # steps of several roles may share a node
        # The supervisor ends the other ranks, so that a rank can finish writing its error message.
        "--kill-on-bad-exit=0",
        f"--wait={config.cluster.collective_timeout_s:.0f}",
        "--unbuffered",
        f"--output={output_pattern(paths.logs, f'{role}-%t.log')}",
        "--open-mode=append",
    ]
    # The stop signal would kill a rank that is still starting. The rank inherits from the shell
    # that the signal is ignored, until the trainer installs a handler.
    shell_lines = ["trap '' USR1"]
    if (image := get_container_image(config, role)) is not None:
        if uses_oci_bundles(config):
            flags.append(f"--container={paths.bundle(get_role(role))}")
            shell_lines += list_bundle_shell_lines(config, role, image, ranks, placement, name)
        else:
            flags += list_pyxis_flags(config, image)
    shell = ("sh", "-c", "; ".join([*shell_lines, 'exec "$@"']), "sh")
    return ["srun", *flags, *slurm.srun, *settings.srun, *shell, *command]


def _signal_text(number: signal.Signals) -> str:
    """Return a signal in the form that `scancel` expects; Slurm has no name for `STACKS_SIGNAL`."""
    return str(number.value) if number == STACKS_SIGNAL else number.name.removeprefix("SIG")


def _parse_exit_code(reason: str, is_contained: bool) -> int:
    """Return the exit code in a message of srun about an ended task, negative for a signal.

    An OCI runtime exits with the code 128 + N if signal N has ended its container.
    """
    if match := re.match(r"Exited with exit code (\d+)", reason):
        code = int(match[1])
        was_killed = is_contained and code - _CONTAINER_SIGNAL_OFFSET in _SIGNALS.values()
        return _CONTAINER_SIGNAL_OFFSET - code if was_killed else code
    return next(
        (
            -number
            for text, number in _SIGNALS.items()
            if text is not None and reason.startswith(text)
        ),
        1,
    )
