"""`aligner supervise`: the run inside its Slurm job, from the batch script on the trainer's first node."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from aligner.config.compose import load_config
from aligner.config.paths import RunPaths
from aligner.config.placement import role_ranks
from aligner.config.schema import Config
from aligner.config.slurm_layout import slurm_layout
from aligner.errors import RESUMABLE, AlignerError, ConfigError
from aligner.launch.endpoints import pick_endpoints
from aligner.launch.interrupts import Interrupts
from aligner.launch.run import interruptible, run_directory
from aligner.launch.slurm.allocation import Allocation, read_allocation
from aligner.launch.slurm.commands import slurm_command
from aligner.launch.slurm.steps import SlurmSteps
from aligner.launch.state import StateRecorder
from aligner.launch.supervisor import Supervisor


def supervise(directory: Path) -> int:
    """Run what a run directory's configuration says on the job's nodes; returns the exit code, as `aligner launch` does.

    It resumes where there is something to resume from: a job that is queued again carries on. Told to stop, it takes a
    checkpoint and has the job queued again, unless cluster.slurm.requeue is false.
    """
    paths = RunPaths(directory.absolute())
    config = load_config(paths.config)
    if config.cluster.kind != "slurm":
        raise ConfigError(f"{directory}: cluster.kind={config.cluster.kind}; `aligner launch` runs it")
    config = replace(config, run=replace(config.run, resume="auto"))
    layout, console = slurm_layout(config), Console(width=120)
    allocation = read_allocation(layout)
    count = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    again = f", queued again {count} time{'s' * (count > 1)}" if count else ""
    print(f"job {allocation.job}{again}; run directory: {directory}", flush=True)

    def work(interrupts: Interrupts) -> bool:
        with (
            run_directory(config, console) as settled,
            StateRecorder(paths.status, role_ranks(settled), allocation.job) as state,
            SlurmSteps(settled, paths, layout, allocation) as steps,
        ):
            supervisor = Supervisor(settled, paths, steps, state, interrupts, console)
            supervisor.prepare()
            hosts = {group: nodes.address for group, nodes in allocation.nodes.items()}
            return supervisor.train(pick_endpoints(settled, hosts, steps.ports))

    requeue = config.cluster.slurm.requeue
    goes_on = "when the job, queued again, starts" if requeue else "when it is launched again with run.resume=true"
    code = interruptible(work, console, goes_on)
    if code == RESUMABLE and requeue:
        _requeue(config, allocation)
    return code


def _requeue(config: Config, allocation: Allocation) -> None:
    """Have the job queued again. Slurm ends this process for it."""
    try:
        slurm_command("scontrol", "requeue", allocation.job)
    except AlignerError as error:
        raise AlignerError(f"the run took a checkpoint, but job {allocation.job} is not queued again: {error}") from error
