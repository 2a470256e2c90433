"""`aligner supervise`: the run inside its Slurm job, from the batch script on the trainer's first
node."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from aligner.config.compose import load_config
from aligner.errors import AlignerError, ConfigError
from aligner.launcher.processes import Interrupts
from aligner.launcher.slurm.job_steps import SlurmSteps, read_allocation
from aligner.launcher.slurm.slurm_commands import PATIENT, slurm_command
from aligner.launcher.supervisor import Supervisor
from aligner.paths import RunPaths
from aligner.placement.slurm_layout import slurm_layout

_PATIENCE_S = 60.0
"""For whoever submitted the job, and what is left of its start before this one, to let go of the
run directory."""

_PENDING = "Job is pending execution"
"""What scontrol says of a job that is queued again: Slurm, which preempts it, may be first, or an
answer of its be lost."""


def supervise(directory: Path) -> None:
    """Run what a run directory's configuration says on the job's nodes; raises what
    `aligner.launcher.local.launch` does.

    It resumes where it can. Told to stop, it takes a checkpoint and has the job queued again,
    unless cluster.slurm.requeue is false; so it does, without a checkpoint, where Slurm has ended
    the trainer.
    """
    paths = RunPaths(directory.absolute())
    config = load_config(paths.config)
    if config.cluster.kind != "slurm":
        raise ConfigError(
            f"{directory}: cluster.kind={config.cluster.kind}: must be slurm; start this run with"
            " `aligner launch`"
        )
    config = replace(config, run=replace(config.run, resume="auto", dir=str(paths.root)))
    console, requeue = Console(width=120), config.cluster.slurm.requeue
    how = (
        "Slurm requeues the job, which resumes the run"
        if requeue
        else f"resume the run with: sbatch {paths.job_script}"
    )
    with Interrupts(console, how) as interrupts:
        layout = slurm_layout(config)
        allocation = read_allocation(layout)
        count = allocation.requeues
        again = f" (requeued {count} time{'s' * (count > 1)})" if count else ""
        print(f"job {allocation.job}{again}; run directory: {directory}", flush=True)
        hosts = {group: nodes.address for group, nodes in allocation.nodes.items()}
        again_later = partial(_requeue, allocation.job) if requeue else None
        make_ranks = partial(SlurmSteps, layout, allocation)
        Supervisor(
            config, console, interrupts, make_ranks, hosts, allocation.job, again_later, _PATIENCE_S
        ).run()


def _requeue(job: str) -> None:
    """Have the job queued again. Slurm ends its steps and, a little later, this process for it."""
    try:
        slurm_command("scontrol", "requeue", job, attempts=PATIENT, done=_PENDING)
    except AlignerError as error:
        raise AlignerError(
            f"the run has stopped, but its job could not be requeued: {error}"
        ) from error
