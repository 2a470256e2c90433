"""The ranks of a run inside its Slurm job: a job step a role."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from aligner.errors import AlignerError
from aligner.launch.free_ports import FreePorts
from aligner.launch.ranks import Rank, append_restart
from aligner.launch.roles import role_command, task_environment
from aligner.launch.slurm.allocation import Allocation, Nodes
from aligner.launch.slurm.commands import slurm_command
from aligner.launch.slurm.step import Step, TaskRank, configured_environment, srun_command
from aligner.paths import RunPaths
from aligner.placement.roles import role_ranks
from aligner.placement.slurm_layout import Layout, Place, container_image
from aligner.schema import Config
from aligner.signals import STOP_SIGNAL

_POLL_S = 0.2
_KILL_TIMEOUT_S = 30.0


class SlurmSteps:
    """See `aligner.launch.ranks.Ranks`; leaving the `with` block ends all of them."""

    def __init__(self, config: Config, paths: RunPaths, layout: Layout, allocation: Allocation, ports: FreePorts) -> None:
        self._config = config
        self._paths = paths
        self._layout = layout
        self._allocation = allocation
        self._steps: list[Step] = []
        self._started = 0
        self._ports = ports

    def __enter__(self) -> SlurmSteps:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self, role: str, restarts: int = 0) -> list[Rank]:
        """See `Ranks`."""
        place, nodes, ranks = self._place(role)
        self._started += 1
        name = f"{role}-{self._started}"
        logs = [self._paths.log(role, rank) for rank in range(ranks)]
        logs[0].parent.mkdir(parents=True, exist_ok=True)
        if restarts:
            for rank, log in enumerate(logs):
                append_restart(log, role, rank, restarts, self._config)
        threads = self._threads(place, nodes)
        cores = None if self._layout.is_shared(place) else threads
        command = srun_command(self._config, self._paths, role, place, nodes, ranks, cores, name, self._command(role))
        environment = {
            **task_environment(ranks, place.ranks_per_node, nodes.address, next(self._ports), threads),
            **configured_environment(self._config, role, place),
        }
        for log in logs:
            log.touch()  # of a step that does not come to be, too
        # A job that is queued again keeps its number, and what was said of its earlier starts.
        messages = self._paths.logs / f"srun-{self._allocation.job}-{self._allocation.requeues}-{name}.log"
        started = [TaskRank(role, rank, log, log.stat().st_size, restarts, messages) for rank, log in enumerate(logs)]
        with messages.open("wb") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._steps.append(Step(name, process, messages, started))
        return [*started]

    def poll(self) -> None:
        """See `Ranks`."""
        for step in self._steps:
            step.poll()

    def tell_to_stop(self, ranks: Sequence[Rank]) -> None:
        """See `Ranks`. Not through srun, which dies of the signal before its tasks run."""
        self._signal(STOP_SIGNAL.name.removeprefix("SIG"), self._of(ranks))

    def terminate(self, ranks: Sequence[Rank]) -> None:
        """See `Ranks`. Not through srun, which takes SIGTERM as a wish to have its tasks killed."""
        self._signal("TERM", self._of(ranks))

    def kill(self, ranks: Sequence[Rank]) -> bool:
        """See `Ranks`. Slurm itself ends all that came of a step."""
        running = [step for step in self._of(ranks) if step.process.poll() is None]
        if running:
            self._signal("KILL", running)
        return not running

    def forget(self, ranks: Sequence[Rank]) -> None:
        """See `Ranks`."""
        gone = self._of(ranks)
        self._steps = [step for step in self._steps if step not in gone]

    def stop(self) -> None:
        """End everything: SIGTERM to each rank, and what is left by `cluster.stop_timeout_s` is killed."""
        self._wait("TERM", self._config.cluster.stop_timeout_s)
        self._wait("KILL", _KILL_TIMEOUT_S)
        for step in self._steps:
            if step.process.poll() is None:
                step.process.kill()
            step.process.wait()

    def _wait(self, signal_name: str, timeout_s: float) -> None:
        self._signal(signal_name, self._steps)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(step.process.poll() is None for step in self._steps):
            time.sleep(_POLL_S)

    def _signal(self, name: str, steps: Sequence[Step]) -> None:
        """A signal to all tasks of steps that run. One that Slurm does not take is no reason for the run to end: what must
        get it is told again, and the end of the job ends all steps.
        """
        running = {step.name for step in steps if step.process.poll() is None and step.is_to_be_told(name)}
        if not running:
            return
        with contextlib.suppress(AlignerError):
            listed = slurm_command("squeue", "--noheader", "--steps", f"--jobs={self._jobs()}", "--format=%i %j")
            numbers = [number for number, step in (line.split(maxsplit=1) for line in listed.splitlines()) if step in running]
            if numbers:
                slurm_command("scancel", f"--signal={name}", *numbers)

    def _jobs(self) -> str:
        """The numbers of the job's components."""
        parts = [os.environ.get(f"SLURM_JOB_ID_HET_GROUP_{index}") for index in range(len(self._layout.components))]
        return ",".join(part for part in parts if part) or self._allocation.job

    def _of(self, ranks: Sequence[Rank]) -> list[Step]:
        return [step for step in self._steps if any(rank is other for rank in step.ranks for other in ranks)]

    def _place(self, role: str) -> tuple[Place, Nodes, int]:
        if role != "prepare":
            return self._layout.places[role], self._allocation.nodes[role], role_ranks(self._config)[role]
        place, nodes = self._layout.places["trainer"], self._allocation.nodes["trainer"]
        return replace(place, nodes=1, ranks_per_node=1), replace(nodes, names=nodes.names[:1]), 1

    def _command(self, role: str) -> tuple[str, ...]:
        """In a container the image's own `aligner`."""
        is_contained = container_image(self._config, role) is not None
        return role_command(role, self._paths.config, ("aligner",) if is_contained else None)

    def _threads(self, place: Place, nodes: Nodes) -> int:
        """As on one machine: the node's cores, as many as the job has, shared by the ranks there."""
        ranks = self._layout.components[place.component].ranks_per_node
        return self._config.cluster.threads_per_rank or max(1, nodes.cpus // ranks)
