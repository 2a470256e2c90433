"""`aligner launch cluster=slurm`: render the batch script of a run, and submit it with `sbatch`."""

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from aligner.errors import STOP_SIGNAL, AlignerError, ConfigError
from aligner.launcher.cluster_commands import TIMEOUT_S, NoAnswerError
from aligner.launcher.job_system import JobSystem
from aligner.launcher.slurm.job_steps import describe_steps
from aligner.launcher.slurm.slurm_commands import (
    find_job,
    has_container_tasks,
    is_in_queue,
    output_pattern,
    slurm_command,
)
from aligner.paths import RunPaths, get_cache_directory, get_run_paths
from aligner.placement.job_layout import Component, compute_job_layout
from aligner.placement.roles import count_role_ranks
from aligner.placement.slurm_container import (
    get_container_image,
    get_slurm_settings,
    uses_oci_bundles,
)
from aligner.schema import Config

# Slurm variables that select the cluster. All others describe the job in which `aligner launch`
# runs, if any.
_CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS")
# Timeout of `sbatch` in seconds: it retries by itself while the controller is busy.
_SUBMIT_TIMEOUT_S = 600.0


class SlurmJobs(JobSystem):
    """Runs as jobs of a Slurm cluster. See `JobSystem`."""

    name = "Slurm"
    job_noun = "Slurm job"

    def get_job_file(self, paths: RunPaths) -> Path:
        """See `JobSystem`."""
        return paths.job_script

    def render(self, config: Config) -> str:
        """See `JobSystem`."""
        return render_script(config)

    def describe_ranks(self, config: Config) -> list[str]:
        """See `JobSystem`."""
        return [
            "",
            "# The supervisor starts these job steps, each of which may be repeated after a"
            " failure.",
            "# NODE0, NODE1, … stand for the nodes that Slurm chooses. CORES stands for the number"
            " of",
            "# CPUs of a node divided by its number of ranks.",
            *(f"# {line}" for line in describe_steps(config)),
        ]

    def test(self, config: Config, job_file: Path) -> None:
        """See `JobSystem`."""
        _check_container_tasks(config)
        _sbatch("--test-only", str(job_file))

    def check_not_submitted(self, config: Config) -> None:
        """See `JobSystem`."""
        paths = get_run_paths(config)
        if (queued_job := find_job(paths.job_script)) is not None:
            instructions = f"wait until the job ends, or cancel the job with `scancel {queued_job}`"
            raise ConfigError(
                f"run.dir={paths.root}: already queued as job {queued_job}; {instructions}"
            )

    def submit(self, config: Config, job_file: Path) -> str:
        """See `JobSystem`."""
        try:
            printed = _sbatch("--parsable", str(job_file), timeout_s=_SUBMIT_TIMEOUT_S)
        except (NoAnswerError, KeyboardInterrupt) as error:
            raise NoAnswerError(
                f"{str(error) or 'interrupted'}: it is unknown whether the job was queued. Check"
                f" with `squeue --me --name={config.run.name}`; if the job is not queued, launch"
                " again with run.resume=auto"
            ) from error
        # A federation appends the name of the cluster: 1234;cluster.
        return printed.splitlines()[-1].partition(";")[0]

    def get_own_job(self, config: Config) -> str:
        """See `JobSystem`."""
        return os.environ["SLURM_JOB_ID"]

    def describe_job(self, config: Config, job: str) -> list[str]:
        """See `JobSystem`."""
        paths = get_run_paths(config)
        resume_text = (
            "then the job is requeued"
            if config.cluster.slurm.requeue
            else f"resume with `sbatch {paths.job_script}`"
        )
        return [
            f"job {job}",
            f"script: {paths.job_script}",
            f"log:    {paths.job_log(job)}",
            f"follow: tail -F {paths.job_log(job)}",
            f"status: squeue --jobs={job}; aligner status {paths.root}",
            f"stop:   {self.get_stop_command(job)}   # saves a checkpoint; {resume_text}",
            f"end:    scancel {job}   # without a checkpoint",
        ]

    def is_in_queue(self, config: Config, job: str, timeout_s: float) -> bool | None:
        """See `JobSystem`."""
        return is_in_queue(job, timeout_s)

    def get_queue_command(self, config: Config, job: str | None) -> str:
        """See `JobSystem`."""
        return f"squeue --name={config.run.name}" if job is None else f"squeue --jobs={job}"

    def get_log_hint(self, config: Config, job: str | None) -> str:
        """See `JobSystem`."""
        return str(get_run_paths(config).job_log(job or "*"))

    def get_start_command(self, config: Config) -> str:
        """See `JobSystem`."""
        return f"sbatch {shlex.quote(str(get_run_paths(config).job_script))}"

    def get_stop_command(self, job: str) -> str:
        """See `JobSystem`."""
        return f"scancel --batch --signal=USR1 {job}"


def _check_container_tasks(config: Config) -> None:
    """Raise ConfigError if this release of Slurm cannot start the ranks of a role from a bundle."""
    if not uses_oci_bundles(config) or has_container_tasks():
        return
    for group, ranks in count_role_ranks(config).items():
        if ranks > 1 and get_container_image(config, group) is not None:
            raise ConfigError(
                f"cluster.slurm.container_runtime=oci: {group} has {ranks} ranks, but this release"
                " of Slurm starts one rank of a role in a container; use Slurm 23.02 or later,"
                " container_runtime=pyxis, or a layout with one rank per role"
            )


def _sbatch(*arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    """Run `sbatch` and return its standard output.

    Raises:
        ConfigError: Slurm rejected the job; the error contains Slurm's message.
        NoAnswerError: Slurm did not answer.
    """
    # A shell inside another job has that job's variables, such as its task binding, which would
    # change the options of this job.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name in _CLUSTER_VARIABLES
    }
    try:
        return slurm_command("sbatch", *arguments, environment=environment, timeout_s=timeout_s)
    except (ConfigError, NoAnswerError):
        raise
    except AlignerError as error:
        raise ConfigError(f"cluster.slurm: Slurm rejected the job: {error}") from error


def render_script(config: Config) -> str:
    """Return the batch script of the run, for a heterogeneous job if the roles need one.

    Raises:
        ConfigError: A role cannot be placed on the nodes.
    """
    prerequisite, *others = compute_job_layout(config).components
    lines = [
        "#!/usr/bin/env bash",
        f"# aligner: run {config.run.name}, experiment {config.run.experiment}.",
    ]
    lines += [
        _directive(flag) for flag in (*_job_flags(config), *_component_flags(config, prerequisite))
    ]
    for component in others:
        lines += ["#SBATCH hetjob", *map(_directive, _component_flags(config, component))]
    # Ignore the stop signal until the supervisor handles it; otherwise, it would end the script.
    lines += ["set -eo pipefail", f"trap '' {STOP_SIGNAL.name.removeprefix('SIG')}"]
    # Use one cache directory on all nodes. In a container, the default cache directory would be
    # different, because the home directory is different.
    lines += [f"export ALIGNER_CACHE={shlex.quote(str(get_cache_directory().absolute()))}"]
    # `exec` replaces the shell by the supervisor, which then receives Slurm's signal to the script.
    supervise = shlex.join(
        (sys.executable, "-m", "aligner", "supervise", str(get_run_paths(config).root))
    )
    return "\n".join([*lines, *config.cluster.slurm.setup, f"exec {supervise}", ""])


def _job_flags(config: Config) -> Iterator[str]:
    """Yield the options of the whole job, which Slurm reads with the first component."""
    slurm = config.cluster.slurm
    paths = get_run_paths(config)
    yield f"--job-name={config.run.name}"
    yield f"--chdir={Path.cwd()}"  # paths of the configuration may be relative
    log = paths.job_log("%j")
    yield f"--output={output_pattern(log.parent, log.name)}"
    yield "--open-mode=append"  # a requeued job appends to its log
    yield f"--signal=B:{STOP_SIGNAL.name.removeprefix('SIG')}@{slurm.grace_s}"
    yield "--requeue" if slurm.requeue else "--no-requeue"


def _component_flags(config: Config, component: Component) -> Iterator[str]:
    """Yield the options of one component of the job."""
    slurm = config.cluster.slurm
    role = get_slurm_settings(config, component.role)
    yield f"--nodes={component.nodes}"
    yield f"--ntasks-per-node={component.ranks_per_node}"
    if config.cluster.threads_per_rank is not None:
        yield f"--cpus-per-task={config.cluster.threads_per_rank}"
    if component.devices_per_node:
        option = "--gres=gpu:" if slurm.gpus == "gres" else "--gpus-per-node="
        yield f"{option}{component.devices_per_node}"
    optional_flags = {
        "account": slurm.account,
        "partition": role.partition or slurm.partition,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "constraint": role.constraint or slurm.constraint,
        "time": slurm.time,
    }
    yield from (f"--{name}={value}" for name, value in optional_flags.items() if value is not None)
    yield from slurm.sbatch
    yield from role.sbatch


def _directive(flag: str) -> str:
    """Return an option as a line of a batch script."""
    name, equals, value = flag.partition("=")
    return f"#SBATCH {name}{equals}{shlex.quote(value) if value else ''}"
