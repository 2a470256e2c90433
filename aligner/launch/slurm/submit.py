"""`aligner launch cluster=slurm`: the run is checked and queued, and nothing is left of one that is refused."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from aligner.config.access import create_access_key
from aligner.config.compose import save_config
from aligner.config.model_source import NOTHING, Coming
from aligner.config.paths import RunPaths, run_paths
from aligner.config.prerequisites import RunPlan
from aligner.errors import AlignerError, ConfigError
from aligner.files import write_file
from aligner.launch.lock import refuse_locked
from aligner.launch.slurm.commands import slurm_command
from aligner.launch.slurm.script import render_script

SCRIPT = "job.sh"


def checked_script(plan: RunPlan, described: Coming = NOTHING) -> str:
    """The run's batch script. Raises ConfigError for all that is known to be wrong before Slurm is asked.

    `described` are model directories that need not be there: those of a script that is only looked at.
    """
    plan.check(described)
    if missing := ", ".join(first.name for first in plan.missing):
        raise ConfigError(
            f"{missing}: an experiment whose result is needed has not run yet, and a Slurm job runs one alone; launch it first"
        )
    return render_script(plan.config)


def submit(plan: RunPlan) -> None:
    """Queue the run, and print its job and how to follow it.

    Raises ConfigError where Slurm refuses the job, with Slurm's own message; the run directory is not there then.
    """
    paths = run_paths(plan.config)
    refuse_locked(paths.root)
    script = checked_script(plan)
    print(f"run directory: {paths.root}", flush=True)
    _ask_slurm(script)
    created = not paths.root.exists()
    try:
        paths.logs.mkdir(parents=True, exist_ok=True)
        save_config(plan.config, paths.config)
        create_access_key(plan.config)
        write_file(paths.root / SCRIPT, script)
        job = _number(_sbatch("--parsable", str(paths.root / SCRIPT)))
    except AlignerError:
        if created:
            shutil.rmtree(paths.root)
        raise
    print(_told(job, paths))


def _ask_slurm(script: str) -> None:
    """Whether Slurm would take the job, before anything is written where the run will be."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / SCRIPT
        file.write_text(script)
        _sbatch("--test-only", str(file))


def _sbatch(*arguments: str) -> str:
    """What it prints. Raises ConfigError with Slurm's message."""
    try:
        return slurm_command("sbatch", *arguments)
    except ConfigError:
        raise
    except AlignerError as error:
        raise ConfigError(f"cluster.slurm: Slurm refuses the job: {error}") from error


def _number(parsable: str) -> str:
    """A job's number, without the cluster that a federation adds."""
    return parsable.splitlines()[-1].partition(";")[0]


def _told(job: str, paths: RunPaths) -> str:
    return "\n".join(
        (
            f"job {job}",
            f"script: {paths.root / SCRIPT}",
            f"log:    {paths.job_log(job)}",
            f"follow: tail -F {paths.job_log(job)}",
            f"status: squeue --jobs={job}; aligner status {paths.root}",
            f"stop:   scancel --batch --signal=USR1 {job}   # with a checkpoint; the job is queued again",
            f"end:    scancel {job}",
        )
    )
