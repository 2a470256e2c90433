"""The nodes of a run's Slurm job, and its ranks there: a job step, one `srun`, for each start of a
role."""

import contextlib
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from aligner.errors import AlignerError
from aligner.launcher.heartbeats import heartbeat_environment
from aligner.launcher.rank_environment import DEVICES, FreePorts, role_command, world_environment
from aligner.launcher.rank_heartbeat import IS_TASK, STACKS_SIGNAL
from aligner.launcher.ranks import Rank, Ranks, log_of
from aligner.launcher.slurm.slurm_commands import (
    host_names,
    node_addresses,
    output_pattern,
    slurm_command,
)
from aligner.paths import run_paths
from aligner.placement.local_devices import numbers
from aligner.placement.roles import configured_threads, role_ranks
from aligner.placement.slurm_layout import (
    Layout,
    Place,
    container_image,
    container_mounts,
    slurm_role,
)
from aligner.schema import Config

_POLL_S = 0.2
_KILL_TIMEOUT_S = 30.0
_TELL_AGAIN_S = 2.0
_ENDED = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.*)$", re.MULTILINE)
_SIGNALS = {signal.strsignal(number): number for number in signal.Signals} | {
    "Out Of Memory": signal.SIGKILL
}
"""What srun calls the signals that end tasks."""
_USUAL = re.compile(
    r"^srun: (error: \S+: tasks? [\d,-]+: (?!Out Of Memory)|launch/slurm: |(Force"
    r" )?Terminat(ing|ed) StepId="
    r"|Job step aborted: ).*$",
    re.MULTILINE,
)
"""What srun says of tasks that have ended by themselves, which is told of the ranks, or when it
ends others for that."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of one role or server group."""

    component: int | None
    """Its number in a heterogeneous job; None where the job is not one."""
    names: tuple[str, ...]
    """As Slurm has them."""
    address: str
    """Where the first of them is reached: rank 0 is there."""
    cpus: int = 1
    """Of a node, as many as the job has on each."""


@dataclass(frozen=True)
class Allocation:
    """The job, and where in it each role and server group is."""

    job: str
    """Number that Slurm's commands take, that of the whole job."""
    nodes: Mapping[str, Nodes]
    requeues: int = 0
    """How often the job was queued again before this start of it."""


def read_allocation(layout: Layout, environment: Mapping[str, str] = os.environ) -> Allocation:
    """From what Slurm has set in a job's environment. Raises AlignerError outside a job, or in one
    of another shape."""
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        raise AlignerError(
            "SLURM_JOB_ID is not set: `aligner supervise` must be called by the script of a Slurm"
            " job"
        )
    is_heterogeneous = "SLURM_HET_SIZE" in environment

    def of_components(variable: str) -> list[str]:
        each = [f"{variable}_HET_GROUP_{index}" for index in range(len(layout.components))]
        return [environment.get(name, "") for name in (each if is_heterogeneous else [variable])]

    names = [host_names(text) if text else [] for text in of_components("SLURM_JOB_NODELIST")]
    # The fewest of a list such as 64(x2),32, which is two times 64 and once 32.
    counts = [
        re.findall(r"(?:^|,)(\d+)", text) for text in of_components("SLURM_JOB_CPUS_PER_NODE")
    ]
    cpus = [min(map(int, part), default=1) for part in counts]
    given, wanted = [len(part) for part in names], [part.nodes for part in layout.components]
    if given != wanted:
        raise AlignerError(
            f"the Slurm job's components have {given} nodes, but the configuration requires"
            f" {wanted}"
        )
    whole = {
        name: address
        for part in names
        for name, address in zip(part, node_addresses(part), strict=True)
    }

    def nodes(place: Place) -> Nodes:
        part = names[place.component]
        own = tuple(part[index] for index in place.node_range)
        return Nodes(
            place.component if is_heterogeneous else None, own, whole[own[0]], cpus[place.component]
        )

    requeues = int(environment.get("SLURM_RESTART_COUNT", "0"))
    return Allocation(
        job, {group: nodes(place) for group, place in layout.places.items()}, requeues
    )


@dataclass(eq=False)
class TaskRank(Rank):
    """One rank of a step."""

    messages: Path
    """What srun itself says of the step."""

    @property
    def is_local(self) -> bool:
        """See `Rank`."""
        return False

    @property
    def starter_messages(self) -> str:
        """See `Rank`."""
        said = (
            _USUAL.sub("", self.messages.read_text(errors="replace"))
            if self.messages.exists()
            else ""
        )
        return "\n".join(line for line in said.splitlines() if line)


@dataclass(eq=False)
class Step:
    """The ranks of one `srun`, and what it says of them; it does not end before all of them
    have."""

    name: str
    process: subprocess.Popen[bytes]
    messages: Path
    """The file that srun's own messages go to, of this step alone."""
    ranks: Sequence[TaskRank]
    _told: dict[signal.Signals, float] = field(default_factory=dict)

    @property
    def is_running(self) -> bool:
        """Whether srun has not ended yet."""
        return self.process.poll() is None

    def is_to_be_told(self, number: signal.Signals) -> bool:
        """Whether this signal is due: Slurm's controller, which passes it on, is not asked for one
        several times a second."""
        now = time.monotonic()
        if now - self._told.get(number, -math.inf) < _TELL_AGAIN_S:
            return False
        self._told[number] = now
        return True

    def poll(self) -> None:
        """Note which ranks have ended, and how. Those of which srun says nothing have ended well
        once it has ended."""
        if all(rank.exit_code is not None for rank in self.ranks):
            return
        code = self.process.poll()
        for place, (tasks, how) in enumerate(
            _ENDED.findall(self.messages.read_text(errors="replace"))
        ):
            for task in numbers(tasks):
                if task < len(self.ranks):
                    # In the order in which srun tells: what comes first is likelier to be the
                    # cause.
                    self.ranks[task].note_end(_task_code(how), time.monotonic() + place * 1e-6)
        if code is not None:
            told = any(rank.exit_code for rank in self.ranks)
            for rank in self.ranks:
                rank.note_end(0 if told or code == 0 else code, time.monotonic())


class SlurmSteps(Ranks):
    """The ranks of a run as tasks of its job's steps."""

    def __init__(
        self, layout: Layout, allocation: Allocation, config: Config, ports: FreePorts
    ) -> None:
        self._layout, self._allocation, self._config, self._ports = (
            layout,
            allocation,
            config,
            ports,
        )
        self._steps: list[Step] = []
        self._started = 0

    def start(self, role: str, restarts: int = 0) -> Sequence[TaskRank]:
        """See `Ranks`."""
        place, nodes, ranks = self._place(role)
        self._started += 1
        name = f"{role}-{self._started}"
        # As on one machine: the node's cores, as many as the job has, shared by the ranks there.
        sharing = self._layout.components[place.component].ranks_per_node
        threads = configured_threads(self._config) or max(1, nodes.cpus // sharing)
        cores = None if self._layout.is_shared(place) else threads
        # the image's own
        program = None if container_image(self._config, role) is None else ("aligner",)
        command = role_command(role, run_paths(self._config).config, program)
        environment = {
            **task_environment(
                ranks, place.ranks_per_node, nodes.address, next(self._ports), threads
            ),
            **configured_environment(self._config, role, place),
            **heartbeat_environment(self._config, role, ranks),
        }
        logs = [log_of(self._config, role, rank, restarts) for rank in range(ranks)]
        for log in logs:
            log.touch()  # of a step that does not come to be, too
        # A job that is queued again keeps its number, and what was said of its earlier starts.
        messages = logs[0].with_name(
            f"srun-{self._allocation.job}-{self._allocation.requeues}-{name}.log"
        )
        started = [
            TaskRank(role, rank, log, log.stat().st_size, restarts, messages)
            for rank, log in enumerate(logs)
        ]
        with messages.open("wb") as output:
            process = subprocess.Popen(
                srun_command(self._config, role, place, nodes, ranks, cores, name, command),
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._steps.append(Step(name, process, messages, started))
        return started

    @property
    def running(self) -> list[Rank]:
        """See `Ranks`."""
        return [rank for step in self._steps for rank in step.ranks if rank.exit_code is None]

    @property
    def start_delay_s(self) -> float:
        """See `Ranks`: a step may wait for its nodes, and download its image."""
        return self._config.server.start_timeout_s

    def poll(self) -> None:
        """See `Ranks`."""
        for step in self._steps:
            step.poll()

    def send(self, number: signal.Signals, ranks: Sequence[Rank]) -> None:
        """See `Ranks`. Not through srun, which dies of the signal to stop before its tasks run, and
        kills them at SIGTERM."""
        self._signal(number, self._of(ranks))

    def kill(self, ranks: Sequence[Rank]) -> bool:
        """See `Ranks`. Slurm itself ends all that came of a step."""
        steps = self._of(ranks)
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
        """A signal to all tasks of steps that run. One that Slurm refuses ends nothing: what must
        get it is told again."""
        running = {step.name for step in steps if step.is_running and step.is_to_be_told(number)}
        if not running:
            return
        # Components of a heterogeneous job have numbers of their own.
        parts = [
            os.environ.get(f"SLURM_JOB_ID_HET_GROUP_{index}")
            for index in range(len(self._layout.components))
        ]
        jobs = ",".join(part for part in parts if part) or self._allocation.job
        with contextlib.suppress(AlignerError):
            listed = slurm_command(
                "squeue", "--noheader", "--steps", f"--jobs={jobs}", "--format=%i %j"
            )
            if chosen := [
                line.split()[0]
                for line in listed.splitlines()
                if line.split(maxsplit=1)[1] in running
            ]:
                slurm_command("scancel", f"--signal={_signal_text(number)}", *chosen)

    def _of(self, ranks: Sequence[Rank]) -> list[Step]:
        return [step for step in self._steps if any(rank in ranks for rank in step.ranks)]

    def _place(self, role: str) -> tuple[Place, Nodes, int]:
        if role != "prepare":
            return (
                self._layout.places[role],
                self._allocation.nodes[role],
                role_ranks(self._config)[role],
            )
        place, nodes = self._layout.places["trainer"], self._allocation.nodes["trainer"]
        return replace(place, nodes=1, ranks_per_node=1), replace(nodes, names=nodes.names[:1]), 1


def srun_command(
    config: Config,
    role: str,
    place: Place,
    nodes: Nodes,
    ranks: int,
    cores: int | None,
    name: str,
    command: Sequence[str],
) -> list[str]:
    """`srun` of all ranks of a role or server group. `cores` are each rank's own; None where groups
    share nodes."""
    slurm, settings, paths = config.cluster.slurm, slurm_role(config, role), run_paths(config)
    flags = [
        f"--job-name={name}",
        "--export=ALL",  # also in a job that was submitted with less
        *([f"--het-group={nodes.component}"] if nodes.component is not None else []),
        f"--nodes={len(nodes.names)}",
        f"--nodelist={','.join(nodes.names)}",
        f"--ntasks={ranks}",
        f"--ntasks-per-node={place.ranks_per_node}",
        # Where steps share nodes Slurm would bind each of them to the same first cores.
        *(["--whole", "--cpu-bind=none"] if cores is None else [f"--cpus-per-task={cores}"]),
        "--distribution=block",  # ranks that stand side by side in a layout share a node
        "--overlap",  # steps of several roles may be on a node
        # The supervisor ends the others: a rank that says why, or that still writes its last, is
        # not cut short.
        "--kill-on-bad-exit=0",
        f"--wait={config.cluster.collective_timeout_s:.0f}",
        "--unbuffered",
        f"--output={output_pattern(paths.logs, f'{role}-%t.log')}",
        "--open-mode=append",
    ]
    if (image := container_image(config, role)) is not None:
        flags += [
            f"--container-image={image}",
            f"--container-mounts={','.join(container_mounts(config))}",
            f"--container-workdir={slurm.workdir or paths.root}",
            "--container-mount-home" if slurm.mount_home else "--no-container-mount-home",
        ]
    # A rank that is still starting would die of the signal to stop; a trainer takes it when it can
    # heed it.
    heedless = ("sh", "-c", "trap '' USR1; exec \"$@\"", "sh")
    return ["srun", *flags, *slurm.srun, *settings.srun, *heedless, *command]


def task_environment(
    ranks: int, ranks_per_node: int, master: str, master_port: int, threads: int
) -> dict[str, str]:
    """What tasks find in their environment; which rank each is they learn from Slurm."""
    return {IS_TASK: "1", **world_environment(ranks, ranks_per_node, master, master_port, threads)}


def configured_environment(config: Config, role: str, place: Place) -> Mapping[str, str]:
    """What the configuration adds to a role's environment."""
    settings = slurm_role(config, role)
    chosen = {} if place.devices is None else {DEVICES: ",".join(map(str, place.devices))}
    given = {**config.cluster.slurm.environment, **settings.environment}
    return chosen | {name: str(value) for name, value in given.items()}


def _signal_text(number: signal.Signals) -> str:
    """Return a signal as `scancel` reads it: Slurm has no name for `STACKS_SIGNAL`."""
    return str(number.value) if number == STACKS_SIGNAL else number.name.removeprefix("SIG")


def _task_code(how: str) -> int:
    """What srun says of a task's end as an exit code, negative for a signal."""
    if code := re.match(r"Exited with exit code (\d+)", how):
        return int(code[1])
    return next(
        (-number for text, number in _SIGNALS.items() if text is not None and how.startswith(text)),
        1,
    )
