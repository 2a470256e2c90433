"""One start of a role in a Slurm job: a job step of all its ranks."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aligner.launch.slurm.allocation import Nodes
from aligner.launch.task import DEVICES
from aligner.paths import RunPaths
from aligner.placement.slurm_layout import Place, container_image, container_mounts, numbers, slurm_role
from aligner.schema import Config

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


@dataclass
class TaskRank:
    """One rank of a step."""

    role: str
    rank: int
    log: Path
    log_start: int
    restarts: int
    messages: Path
    """What srun itself says of the step."""
    ended_at: float | None = None
    exit_code: int | None = None

    @property
    def starter_said(self) -> str:
        """See `aligner.launch.ranks.Rank`."""
        said = _USUAL.sub("", self.messages.read_text(errors="replace")) if self.messages.exists() else ""
        return "\n".join(line for line in said.splitlines() if line)


class Step:
    """The ranks of one `srun`, and what it says of them; it does not end before all of them have."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], messages: Path, ranks: list[TaskRank]) -> None:
        """`messages` is the file that srun's own messages go to, of this step alone."""
        self.name = name
        self.process = process
        self.ranks = ranks
        self._messages = messages
        self._told: dict[str, float] = {}

    def is_to_be_told(self, signal_name: str) -> bool:
        """Whether this signal is due: Slurm's controller, which passes it on, is not asked for one several times a second."""
        now = time.monotonic()
        if now - self._told.get(signal_name, -math.inf) < _TELL_AGAIN_S:
            return False
        self._told[signal_name] = now
        return True

    def poll(self) -> None:
        """Note which ranks have ended, and how. Those of which srun says nothing have ended well once it has ended."""
        if all(rank.exit_code is not None for rank in self.ranks):
            return
        code = self.process.poll()
        for place, (tasks, how) in enumerate(_ENDED.findall(self._messages.read_text(errors="replace"))):
            for task in numbers(tasks):
                if task < len(self.ranks):
                    # In the order in which srun tells: what comes first is likelier to be the cause.
                    self._end(self.ranks[task], _exit_code(how), time.monotonic() + place * 1e-6)
        if code is not None:
            told = any(rank.exit_code for rank in self.ranks)
            for rank in self.ranks:
                self._end(rank, 0 if told or code == 0 else code, time.monotonic())

    @staticmethod
    def _end(rank: TaskRank, code: int, moment: float) -> None:
        if rank.exit_code is None:
            rank.exit_code, rank.ended_at = code, moment


def srun_command(
    config: Config,
    paths: RunPaths,
    role: str,
    place: Place,
    nodes: Nodes,
    ranks: int,
    cores: int | None,
    name: str,
    command: Sequence[str],
) -> list[str]:
    """`srun` of all ranks of a role or server group; `prepare` runs where the trainer's rank 0 does.

    `cores` are what each rank has for itself; None: they share their nodes' cores with other groups' ranks.
    """
    slurm, settings = config.cluster.slurm, slurm_role(config, role)
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


def configured_environment(config: Config, role: str, place: Place) -> Mapping[str, str]:
    """What the configuration adds to a role's environment."""
    settings = slurm_role(config, role)
    chosen = {} if place.devices is None else {DEVICES: ",".join(map(str, place.devices))}
    given = {**config.cluster.slurm.environment, **settings.environment}
    return chosen | {name: str(value) for name, value in given.items()}


def _exit_code(how: str) -> int:
    """What srun says of a task's end as an exit code, negative for a signal."""
    if code := re.match(r"Exited with exit code (\d+)", how):
        return int(code[1])
    return next((-number for text, number in _SIGNALS.items() if text is not None and how.startswith(text)), 1)
