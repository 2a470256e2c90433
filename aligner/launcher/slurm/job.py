"""The supervisor of a run inside its Slurm job."""

from functools import partial

from aligner.errors import AlignerError
from aligner.launcher.processes import Interrupts
from aligner.launcher.slurm.job_steps import SlurmSteps, read_allocation
from aligner.launcher.slurm.slurm_commands import RETRY_ATTEMPTS, slurm_command
from aligner.launcher.supervisor import Supervisor
from aligner.observability.console import RunConsole
from aligner.paths import get_run_paths
from aligner.placement.job_layout import compute_job_layout
from aligner.schema import Config

# Seconds to wait until `aligner launch`, which submitted the job, or processes of an earlier
# attempt of the job release the run directory.
_LOCK_TIMEOUT_S = 60.0

# Error of `scontrol requeue` for a job that is already requeued: Slurm may have requeued it because
# of a preemption, or its response to an earlier attempt was lost.
_PENDING = "Job is pending execution"


def supervise_job(config: Config, console: RunConsole) -> None:
    """Run a configuration on the nodes of this Slurm job.

    The run resumes from its last checkpoint, if it has one. After a stop request, the run saves a
    checkpoint, and the job is requeued unless `cluster.slurm.requeue` is false. If Slurm itself
    ended the trainer, the job is requeued, too, without a new checkpoint.

    Args:
        config: The run's configuration, which resumes automatically.
        console: Console for the output.

    Raises:
        AlignerError: A role failed. `aligner.launcher.local.launch` describes the other errors.
    """
    paths = get_run_paths(config)
    should_requeue = config.cluster.slurm.requeue
    resume_hint = (
        "Slurm requeues the job, which resumes the run"
        if should_requeue
        else f"resume the run with: sbatch {paths.job_script}"
    )
    with Interrupts(console, resume_hint) as interrupts:
        layout = compute_job_layout(config)
        allocation = read_allocation(layout)
        count = allocation.requeues
        requeue_text = f" (requeued {count} time{'s' * (count > 1)})" if count else ""
        print(f"job {allocation.job}{requeue_text}; run directory: {paths.root}", flush=True)
        hosts = {group: nodes.address for group, nodes in allocation.nodes.items()}
        requeue_job = partial(_requeue, allocation.job) if should_requeue else None
        make_ranks = partial(SlurmSteps, layout, allocation)
        Supervisor(
            config,
            console,
            interrupts,
            make_ranks,
            hosts,
            allocation.job,
            requeue_job,
            _LOCK_TIMEOUT_S,
        ).run()


def _requeue(job: str) -> None:
    """Requeue the job. Slurm then ends the job's steps and, a little later, this process.

    Raises:
        AlignerError: Slurm rejected the command or did not answer.
    """
    try:
        slurm_command("scontrol", "requeue", job, attempts=RETRY_ATTEMPTS, success_text=_PENDING)
    except AlignerError as error:
        raise AlignerError(
            f"the run has stopped, but its job could not be requeued: {error}"
        ) from error
