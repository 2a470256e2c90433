"""The ranks of a run inside its Slurm job: a job step, one `srun`, for each start of a role."""

from __future__ import annotations

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
from aligner.launch.rank_environment import DEVICES, IS_TASK, role_command, world_environment
from aligner.launch.ranks import Rank, Ranks, log_of
from aligner.launch.server_ports import FreePorts
from aligner.launch.slurm.allocation import Allocation, Nodes
from aligner.launch.slurm.slurm_commands import slurm_command
from aligner.paths import run_paths
from aligner.placement.roles import role_ranks
from aligner.placement.slurm_layout import Layout, Place, container_image, container_mounts, numbers, slurm_role
from aligner.schema import Config

_POLL_S = 0.2
_KILL_TIMEOUT_S = 30.0
_TELL_AGAIN_S = 2.0
_ENDED = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.*)$", re.MULTILINE)
_SIGNALS = {signal.strsignal(number): number for number in signal.Signals} | {"Out Of Memory": signal.SIGKILL}
"""What srun calls the signals that end tasks."""
_USUAL = re.compile(
    r"^srun: (error: \S+: tasks? [\d,-]+: (?!Out Of Memory)|launch/slurm: |(Force )?Terminat(ing|ed) StepId="
    r"|Job step aborted: ).*$",
    re.MULTILINE,
)
"""What srun says of tasks that have ended by themselves, which is told of the ranks, or when it ends others for that."""


@dataclass(eq=False)
class TaskRank(Rank):
    """One rank of a step."""

    messages: Path
    """What srun itself says of the step."""

    @property
    def starter_messages(self) -> str:
        """See `Rank`."""
        said = _USUAL.sub("", self.messages.read_text(errors="replace")) if self.messages.exists() else ""
        return "\n".join(line for line in said.splitlines() if line)


@dataclass(eq=False)
class Step:
    """The ranks of one `srun`, and what it says of them; it does not end before all of them have."""

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
        """Whether this signal is due: Slurm's controller, which passes it on, is not asked for one several times a second."""
        now = time.monotonic()
        if now - self._told.get(number, -math.inf) < _TELL_AGAIN_S:
            return False
        self._told[number] = now
        return True

    def poll(self) -> None:
        """Note which ranks have ended, and how. Those of which srun says nothing have ended well once it has ended."""
        if all(rank.exit_code is not None for rank in self.ranks):
            return
        code = self.process.poll()
        for place, (tasks, how) in enumerate(_ENDED.findall(self.messages.read_text(errors="replace"))):
            for task in numbers(tasks):
                if task < len(self.ranks):
                    # In the order in which srun tells: what comes first is likelier to be the cause.
                    self.ranks[task].note_end(_task_code(how), time.monotonic() + place * 1e-6)
        if code is not None:
            told = any(rank.exit_code for rank in self.ranks)
            for rank in self.ranks:
                rank.note_end(0 if told or code == 0 else code, time.monotonic())


class SlurmSteps(Ranks):
    """The ranks of a run as tasks of its job's steps."""

    def __init__(self, layout: Layout, allocation: Allocation, config: Config, ports: FreePorts) -> None:
        self._config = config
        self._layout = layout
        self._allocation = allocation
        self._steps: list[Step] = []
        self._started = 0
        self._ports = ports

    def start(self, role: str, restarts: int = 0) -> Sequence[TaskRank]:
        """See `Ranks`."""
        place, nodes, ranks = self._place(role)
        self._started += 1
        name = f"{role}-{self._started}"
        # As on one machine: the node's cores, as many as the job has, shared by the ranks there.
        sharing = self._layout.components[place.component].ranks_per_node
        threads = self._config.cluster.threads_per_rank or max(1, nodes.cpus // sharing)
        cores = None if self._layout.is_shared(place) else threads
        program = None if container_image(self._config, role) is None else ("aligner",)  # the image's own
        command = role_command(role, run_paths(self._config).config, program)
        environment = {
            **task_environment(ranks, place.ranks_per_node, nodes.address, next(self._ports), threads),
            **configured_environment(self._config, role, place),
        }
        logs = [log_of(self._config, role, rank, restarts) for rank in range(ranks)]
        for log in logs:
            log.touch()  # of a step that does not come to be, too
        # A job that is queued again keeps its number, and what was said of its earlier starts.
        messages = logs[0].with_name(f"srun-{self._allocation.job}-{self._allocation.requeues}-{name}.log")
        started = [TaskRank(role, rank, log, log.stat().st_size, restarts, messages) for rank, log in enumerate(logs)]
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

    def poll(self) -> None:
        """See `Ranks`."""
        for step in self._steps:
            step.poll()

    def send(self, number: signal.Signals, ranks: Sequence[Rank]) -> None:
        """See `Ranks`. Not through srun, which dies of the signal to stop before its tasks run, and takes SIGTERM as a wish to
        have them killed.
        """
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
        for number, timeout_s in ((signal.SIGTERM, self._config.cluster.stop_timeout_s), (signal.SIGKILL, _KILL_TIMEOUT_S)):
            self._signal(number, self._steps)
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline and any(step.is_running for step in self._steps):
                time.sleep(_POLL_S)
        for step in self._steps:
            if step.is_running:
                step.process.kill()
            step.process.wait()

    def _signal(self, number: signal.Signals, steps: Sequence[Step]) -> None:
        """A signal to all tasks of steps that run. One that Slurm does not take is no reason for the run to end: what must
        get it is told again, and the end of the job ends all steps.
        """
        running = {step.name for step in steps if step.is_running and step.is_to_be_told(number)}
        if not running:
            return
        # Components of a heterogeneous job have numbers of their own.
        parts = [os.environ.get(f"SLURM_JOB_ID_HET_GROUP_{index}") for index in range(len(self._layout.components))]
        jobs = ",".join(part for part in parts if part) or self._allocation.job
        with contextlib.suppress(AlignerError):
            listed = slurm_command("squeue", "--noheader", "--steps", f"--jobs={jobs}", "--format=%i %j")
            chosen = [step for step, name in (line.split(maxsplit=1) for line in listed.splitlines()) if name in running]
            if chosen:
                slurm_command("scancel", f"--signal={number.name.removeprefix('SIG')}", *chosen)

    def _of(self, ranks: Sequence[Rank]) -> list[Step]:
        return [step for step in self._steps if any(rank in ranks for rank in step.ranks)]

    def _place(self, role: str) -> tuple[Place, Nodes, int]:
        if role != "prepare":
            return self._layout.places[role], self._allocation.nodes[role], role_ranks(self._config)[role]
        place, nodes = self._layout.places["trainer"], self._allocation.nodes["trainer"]
        return replace(place, nodes=1, ranks_per_node=1), replace(nodes, names=nodes.names[:1]), 1


def srun_command(
    config: Config, role: str, place: Place, nodes: Nodes, ranks: int, cores: int | None, name: str, command: Sequence[str]
) -> list[str]:
    """`srun` of all ranks of a role or server group; `prepare` runs where the trainer's rank 0 does.

    `cores` are what each rank has for itself; None: they share their nodes' cores with other groups' ranks.
    """
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
        # The supervisor ends the others: a rank that says why, or that still writes its last, is not cut short.
        "--kill-on-bad-exit=0",
        f"--wait={config.cluster.collective_timeout_s:.0f}",
        "--unbuffered",
        f"--output={paths.logs / f'{role}-%t.log'}",
        "--open-mode=append",
    ]
    if (image := container_image(config, role)) is not None:
        flags += [
            f"--container-image={image}",
            f"--container-mounts={','.join(container_mounts(config))}",
            f"--container-workdir={slurm.workdir or paths.root}",
            "--container-mount-home" if slurm.mount_home else "--no-container-mount-home",
        ]
    # A rank that is still starting would die of the signal to stop; a trainer takes it when it can heed it.
    heedless = ("sh", "-c", "trap '' USR1; exec \"$@\"", "sh")
    return ["srun", *flags, *slurm.srun, *settings.srun, *heedless, *command]


def task_environment(ranks: int, ranks_per_node: int, master: str, master_port: int, threads: int) -> dict[str, str]:
    """What tasks find in their environment; which rank each is they learn from Slurm."""
    return {IS_TASK: "1", **world_environment(ranks, ranks_per_node, master, master_port, threads)}


def configured_environment(config: Config, role: str, place: Place) -> Mapping[str, str]:
    """What the configuration adds to a role's environment."""
    settings = slurm_role(config, role)
    chosen = {} if place.devices is None else {DEVICES: ",".join(map(str, place.devices))}
    given = {**config.cluster.slurm.environment, **settings.environment}
    return chosen | {name: str(value) for name, value in given.items()}


def _task_code(how: str) -> int:
    """What srun says of a task's end as an exit code, negative for a signal."""
    if code := re.match(r"Exited with exit code (\d+)", how):
        return int(code[1])
    return next((-number for text, number in _SIGNALS.items() if text is not None and how.startswith(text)), 1)
