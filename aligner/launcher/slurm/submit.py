"""`aligner launch cluster=slurm`: the run's batch script, checked and queued; nothing is left of a
run that is refused."""

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
from aligner.config.resume import check_directory, dated
from aligner.errors import STOP_SIGNAL, AlignerError, ConfigError
from aligner.files import write_file
from aligner.launcher.run_directory import locked, refuse_locked
from aligner.launcher.slurm.slurm_commands import (
    TIMEOUT_S,
    NoAnswerError,
    job_of,
    output_pattern,
    slurm_command,
)
from aligner.models.model_source import NOTHING_EXPECTED, ExpectedInputs
from aligner.paths import PRIVATE, RunPaths, cache_directory, run_paths
from aligner.placement.addresses import create_access_key
from aligner.placement.slurm_layout import Component, slurm_layout, slurm_role
from aligner.schema import Config

_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS")
# so long `sbatch` may take: it tries again by itself where the controller is busy
_QUEUEING_S = 600.0


def checked_script(plan: RunPlan, described: ExpectedInputs = NOTHING_EXPECTED) -> str:
    """The run's batch script. Raises ConfigError for all that is known to be wrong before Slurm is
    asked.

    `described` are model directories that need not be there: those of a script that is only looked
    at.
    """
    plan.check(described)
    if missing := ", ".join(first.name for first in plan.missing):
        raise ConfigError(
            f"{missing}: the run needs the result of this experiment, which has not run yet. A"
            f" Slurm job does not run prerequisite experiments; launch {missing} first"
        )
    return render_script(plan.config)


def submit(plan: RunPlan) -> None:
    """Queue the run, and print its job and how to follow it.

    Raises ConfigError where Slurm refuses the job, with Slurm's own message; the run directory is
    then as it was before. Where it is not known whether the job is queued, the directory stays as
    the job needs it.
    """
    config, paths = plan.config, run_paths(plan.config)
    refuse_locked(paths.root)
    script = checked_script(plan)
    print(f"run directory: {paths.root}", flush=True)
    with tempfile.TemporaryDirectory() as place:  # before anything is written where the run will be
        file = Path(place) / "job.sh"
        file.write_text(script)
        _sbatch("--test-only", str(file))
    with locked(paths.root, mode=PRIVATE):
        # It has no lock yet, and starts with what it finds here. Slurm is asked: a job may have
        # been queued in other ways.
        if (queued := job_of(paths.job_script)) is not None:
            how = f"wait until the job ends, or cancel the job with `scancel {queued}`"
            raise ConfigError(f"run.dir={paths.root}: already queued as job {queued}; {how}")
        check_directory(config)
        config = dated(config)
        with _undone_when_refused(paths):
            paths.logs.mkdir(parents=True, exist_ok=True)
            cache_directory().mkdir(parents=True, exist_ok=True)  # containers mount it
            save_config(config, paths.config)
            create_access_key(config)
            write_file(paths.job_script, script)
            job = _queued(paths, config)
        paths.status.unlink(missing_ok=True)  # that of the start before this one
    then = (
        "then the job is requeued"
        if config.cluster.slurm.requeue
        else f"resume with `sbatch {paths.job_script}`"
    )
    print(
        f"job {job}",
        f"script: {paths.job_script}",
        f"log:    {paths.job_log(job)}",
        f"follow: tail -F {paths.job_log(job)}",
        f"status: squeue --jobs={job}; aligner status {paths.root}",
        f"stop:   scancel --batch --signal=USR1 {job}   # saves a checkpoint; {then}",
        f"end:    scancel {job}   # without a checkpoint",
        sep="\n",
    )


@contextlib.contextmanager
def _undone_when_refused(paths: RunPaths) -> Iterator[None]:
    """The run directory is as it was before, unless the block succeeds, or may have."""
    before = {*paths.root.iterdir()}
    written_over = {
        file: file.read_bytes() for file in (paths.config, paths.job_script) if file in before
    }
    try:
        yield
    except NoAnswerError:
        raise
    except BaseException:
        for path in {*paths.root.iterdir()} - before:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        for file, content in written_over.items():
            write_file(file, content)
        raise


def _queued(paths: RunPaths, config: Config) -> str:
    """The number of the job, which is queued now."""
    try:
        printed = _sbatch("--parsable", str(paths.job_script), timeout_s=_QUEUEING_S)
    except (NoAnswerError, KeyboardInterrupt) as error:
        raise NoAnswerError(
            f"{str(error) or 'interrupted'}: it is unknown whether the job was queued. Check with"
            f" `squeue --me --name={config.run.name}`; if the job is not queued, launch again with"
            " run.resume=auto"
        ) from error
    return printed.splitlines()[-1].partition(";")[0]  # without the cluster that a federation adds


def _sbatch(*arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    """What it prints. Raises ConfigError with Slurm's message where it refuses, NoAnswerError where
    it says nothing."""
    # What a shell inside another job has of that one, such as how its tasks are bound, is not for
    # this one.
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name in _OF_THE_CLUSTER
    }
    try:
        return slurm_command("sbatch", *arguments, environment=kept, timeout_s=timeout_s)
    except (ConfigError, NoAnswerError):
        raise
    except AlignerError as error:
        raise ConfigError(f"cluster.slurm: Slurm rejected the job: {error}") from error


def render_script(config: Config) -> str:
    """A script for `sbatch`, of a heterogeneous job where roles need it. Raises ConfigError where
    roles cannot be placed."""
    first, *others = slurm_layout(config).components
    lines = [
        "#!/usr/bin/env bash",
        f"# aligner: run {config.run.name}, experiment {config.run.experiment}.",
    ]
    lines += [_directive(flag) for flag in (*_job_flags(config), *_component_flags(config, first))]
    for component in others:
        lines += ["#SBATCH hetjob", *map(_directive, _component_flags(config, component))]
    # What tells a job to stop may come before the supervisor can take it, and would end the script.
    lines += ["set -eo pipefail", f"trap '' {STOP_SIGNAL.name.removeprefix('SIG')}"]
    # One cache for all, wherever `sbatch` is called: in a container the home is another, and so
    # would be the cache.
    lines += [f"export ALIGNER_CACHE={shlex.quote(str(cache_directory().absolute()))}"]
    # The shell becomes the supervisor: Slurm's signal to the script is a signal to it.
    supervise = shlex.join(
        (sys.executable, "-m", "aligner", "supervise", str(run_paths(config).root))
    )
    return "\n".join([*lines, *config.cluster.slurm.setup, f"exec {supervise}", ""])


def _job_flags(config: Config) -> Iterator[str]:
    """Of the job as a whole; Slurm reads them with the first component."""
    slurm, paths = config.cluster.slurm, run_paths(config)
    yield f"--job-name={config.run.name}"
    yield f"--chdir={Path.cwd()}"  # paths of the configuration may be relative
    log = paths.job_log("%j")
    yield f"--output={output_pattern(log.parent, log.name)}"
    yield "--open-mode=append"  # a job that is queued again goes on with its log
    yield f"--signal=B:{STOP_SIGNAL.name.removeprefix('SIG')}@{slurm.grace_s}"
    yield "--requeue" if slurm.requeue else "--no-requeue"


def _component_flags(config: Config, component: Component) -> Iterator[str]:
    slurm, role = config.cluster.slurm, slurm_role(config, component.role)
    yield f"--nodes={component.nodes}"
    yield f"--ntasks-per-node={component.ranks_per_node}"
    if config.cluster.threads_per_rank is not None:
        yield f"--cpus-per-task={config.cluster.threads_per_rank}"
    if component.devices_per_node:
        device = "--gres=gpu:" if slurm.gpus == "gres" else "--gpus-per-node="
        yield f"{device}{component.devices_per_node}"
    named = {
        "account": slurm.account,
        "partition": role.partition or slurm.partition,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "constraint": role.constraint or slurm.constraint,
        "time": slurm.time,
    }
    yield from (f"--{name}={value}" for name, value in named.items() if value is not None)
    yield from slurm.sbatch
    yield from role.sbatch


def _directive(flag: str) -> str:
    name, equals, value = flag.partition("=")
    return f"#SBATCH {name}{equals}{shlex.quote(value) if value else ''}"
