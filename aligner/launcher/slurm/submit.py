"""`aligner launch cluster=slurm`: check a run, render its batch script, and submit the job.

If the configuration or Slurm rejects the run, no files are left behind.
"""

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from aligner.config.compose import save_config
from aligner.config.prerequisites import RunPlan
from aligner.config.resume import check_directory, with_date
from aligner.errors import STOP_SIGNAL, AlignerError, ConfigError
from aligner.files import write_file
from aligner.launcher.run_directory import (
    lock_directory,
    record_cache_uses,
    require_unlocked,
)
from aligner.launcher.slurm.job_steps import describe_steps
from aligner.launcher.slurm.slurm_commands import (
    TIMEOUT_S,
    NoAnswerError,
    find_job,
    output_pattern,
    slurm_command,
)
from aligner.models.model_source import NOTHING_EXPECTED, ExpectedInputs
from aligner.paths import PRIVATE_MODE, RunPaths, get_cache_directory, get_run_paths
from aligner.placement.addresses import create_access_key
from aligner.placement.slurm_layout import Component, compute_slurm_layout, get_slurm_settings
from aligner.schema import Config
from aligner.terminal import print_text

# Slurm variables that select the cluster. All others describe the job in which `aligner launch`
# runs, if any.
_CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS")
# Timeout of `sbatch` in seconds: it retries by itself while the controller is busy.
_SUBMIT_TIMEOUT_S = 600.0


def render_preview(plan: RunPlan, expected_inputs: ExpectedInputs = NOTHING_EXPECTED) -> str:
    """Check a run, and return its batch script, followed by its job steps as comments.

    Args:
        plan: The run and its prerequisite experiments.
        expected_inputs: Model directories that need not exist yet.

    Raises:
        ConfigError: The configuration has an error that is known without asking Slurm.
    """
    script = render_checked_script(plan, expected_inputs)
    lines = [
        "",
        "# The supervisor starts these job steps, each of which may be repeated after a failure.",
        "# NODE0, NODE1, … stand for the nodes that Slurm chooses. CORES stands for the number of",
        "# CPUs of a node divided by its number of ranks.",
        *(f"# {line}" for line in describe_steps(plan.config)),
    ]
    return script + "\n".join(lines) + "\n"


def render_checked_script(plan: RunPlan, expected_inputs: ExpectedInputs = NOTHING_EXPECTED) -> str:
    """Check a run, and return its batch script.

    Args:
        plan: The run and its prerequisite experiments.
        expected_inputs: Model directories that need not exist yet, for a script that is only
            printed.

    Raises:
        ConfigError: The configuration has an error that is known without asking Slurm.
    """
    plan.check(expected_inputs)
    if missing := ", ".join(prerequisite.name for prerequisite in plan.missing_prerequisites):
        raise ConfigError(
            f"{missing}: the run needs the result of this experiment, which has not run yet. A"
            f" Slurm job does not run prerequisite experiments; launch {missing} first"
        )
    return render_script(plan.config)


def submit(plan: RunPlan) -> None:
    """Submit the run as a job, and print the job id and the commands to follow and stop it.

    If it is unknown whether Slurm accepted the job, the run directory keeps the files that the job
    needs.

    Args:
        plan: The run and its prerequisite experiments.

    Raises:
        ConfigError: The configuration is invalid or Slurm rejected the job, with Slurm's message.
            The run directory is unchanged.
        NoAnswerError: It is unknown whether the job was submitted.
    """
    config = plan.config
    paths = get_run_paths(plan.config)
    require_unlocked(paths.root)
    script = render_checked_script(plan)
    print(f"run directory: {paths.root}", flush=True)
    # Let Slurm check the script before anything is written to the run directory.
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "job.sh"
        file.write_text(script)
        _sbatch("--test-only", str(file))
    with lock_directory(paths.root, mode=PRIVATE_MODE):
        # A queued job holds no lock yet, and will read the files of this directory. The job may
        # have been submitted by hand, so the function asks Slurm for it.
        if (queued_job := find_job(paths.job_script)) is not None:
            instructions = f"wait until the job ends, or cancel the job with `scancel {queued_job}`"
            raise ConfigError(
                f"run.dir={paths.root}: already queued as job {queued_job}; {instructions}"
            )
        check_directory(config)
        config = with_date(config)
        with _restore_if_rejected(paths):
            paths.logs.mkdir(parents=True, exist_ok=True)
            get_cache_directory().mkdir(parents=True, exist_ok=True)  # a container mounts it
            save_config(config, paths.config)
            create_access_key(config)
            record_cache_uses(config)
            write_file(paths.job_script, script)
            job = _submit_job(paths, config)
        paths.status.unlink(missing_ok=True)  # belongs to an earlier launch
    resume_text = (
        "then the job is requeued"
        if config.cluster.slurm.requeue
        else f"resume with `sbatch {paths.job_script}`"
    )
    lines = (
        f"job {job}",
        f"script: {paths.job_script}",
        f"log:    {paths.job_log(job)}",
        f"follow: tail -F {paths.job_log(job)}",
        f"status: squeue --jobs={job}; aligner status {paths.root}",
        f"stop:   scancel --batch --signal=USR1 {job}   # saves a checkpoint; {resume_text}",
        f"end:    scancel {job}   # without a checkpoint",
    )
    print_text("\n".join(lines))


@contextlib.contextmanager
def _restore_if_rejected(paths: RunPaths) -> Iterator[None]:
    """Restore the run directory if the block fails.

    The directory keeps its new files if the block succeeds, or if its outcome is unknown.
    """
    files_before = {*paths.root.iterdir()}
    overwritten = {
        file: file.read_bytes() for file in (paths.config, paths.job_script) if file in files_before
    }
    try:
        yield
    except NoAnswerError:
        raise
    except BaseException:
        for path in {*paths.root.iterdir()} - files_before:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        for file, content in overwritten.items():
            write_file(file, content)
        raise


def _submit_job(paths: RunPaths, config: Config) -> str:
    """Submit the job, and return its job id.

    Raises:
        NoAnswerError: It is unknown whether the job was submitted.
    """
    try:
        printed = _sbatch("--parsable", str(paths.job_script), timeout_s=_SUBMIT_TIMEOUT_S)
    except (NoAnswerError, KeyboardInterrupt) as error:
        raise NoAnswerError(
            f"{str(error) or 'interrupted'}: it is unknown whether the job was queued. Check with"
            f" `squeue --me --name={config.run.name}`; if the job is not queued, launch again with"
            " run.resume=auto"
        ) from error
    # A federation appends the name of the cluster: 1234;cluster.
    return printed.splitlines()[-1].partition(";")[0]


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
    prerequisite, *others = compute_slurm_layout(config).components
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
