"""`aligner launch cluster=slurm`: the run is checked and queued, and nothing is left of one that is refused."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from aligner.config.compose import save_config
from aligner.config.prerequisites import RunPlan
from aligner.config.resume import check_directory
from aligner.errors import AlignerError, ConfigError
from aligner.files import write_file
from aligner.launch.lock import locked, refuse_locked
from aligner.launch.slurm.commands import TIMEOUT_S, NoAnswerError, job_of, slurm_command
from aligner.launch.slurm.script import render_script
from aligner.models.model_source import NOTHING_EXPECTED, ExpectedInputs
from aligner.paths import RunPaths, cache_directory, run_paths
from aligner.placement.addresses import create_access_key
from aligner.schema import Config

_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS")
_QUEUEING_S = 600.0
"""So long `sbatch` may take: it tries again by itself where the controller is busy."""


class _NotKnownError(AlignerError):
    """Whether the job is queued."""


def checked_script(plan: RunPlan, described: ExpectedInputs = NOTHING_EXPECTED) -> str:
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

    Raises ConfigError where Slurm refuses the job, with Slurm's own message; the run directory is then as it was before.
    Where it is not known whether the job is queued, the directory stays as the job needs it.
    """
    config, paths = plan.config, run_paths(plan.config)
    refuse_locked(paths.root)
    script = checked_script(plan)
    print(f"run directory: {paths.root}", flush=True)
    _ask_slurm(script)
    with locked(paths.root):
        _refuse_queued(paths)
        check_directory(config)
        with _undone_when_refused(paths):
            paths.logs.mkdir(parents=True, exist_ok=True)
            cache_directory().mkdir(parents=True, exist_ok=True)  # containers mount it
            save_config(config, paths.config)
            create_access_key(config)
            write_file(paths.job_script, script)
            job = _queued(paths, config)
        paths.status.unlink(missing_ok=True)  # that of the start before this one
    print(_told(job, config))


def _refuse_queued(paths: RunPaths) -> None:
    """Raise ConfigError where a job of the directory's waits: it has no lock yet, and starts with what it finds there.

    Slurm is asked, and not a file: a job may have been queued again, or by `sbatch RUN/job.sh`.
    """
    if (job := job_of(paths.job_script)) is not None:
        raise ConfigError(f"run.dir={paths.root}: queued already, as job {job}; wait for its end, or `scancel {job}` first")


@contextlib.contextmanager
def _undone_when_refused(paths: RunPaths) -> Iterator[None]:
    """The run directory is as it was before, unless the block succeeds, or may have."""
    before = {*paths.root.iterdir()}
    written_over = {file: file.read_bytes() for file in (paths.config, paths.job_script) if file in before}
    try:
        yield
    except _NotKnownError:
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


def _ask_slurm(script: str) -> None:
    """Whether Slurm would take the job, before anything is written where the run will be."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "job.sh"
        file.write_text(script)
        _sbatch("--test-only", str(file))


def _queued(paths: RunPaths, config: Config) -> str:
    """The number of the job, which is queued now."""
    try:
        printed = _sbatch("--parsable", str(paths.job_script), timeout_s=_QUEUEING_S)
    except (NoAnswerError, KeyboardInterrupt) as error:
        unknown = _NotKnownError(
            f"{str(error) or 'interrupted'}: it is not known whether the job is queued; `squeue --me --name={config.run.name}`"
            " tells; where it is not, launch again with run.resume=auto"
        )
        if isinstance(error, KeyboardInterrupt):
            unknown.exit_code = 128 + signal.SIGINT
        raise unknown from error
    return printed.splitlines()[-1].partition(";")[0]  # without the cluster that a federation adds


def _sbatch(*arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    """What it prints. Raises ConfigError with Slurm's message where it refuses, NoAnswerError where it says nothing."""
    # What a shell inside another job has of that one, such as how its tasks are bound, is not for this one.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name in _OF_THE_CLUSTER}
    try:
        return slurm_command("sbatch", *arguments, environment=kept, timeout_s=timeout_s)
    except (ConfigError, NoAnswerError):
        raise
    except AlignerError as error:
        raise ConfigError(f"cluster.slurm: Slurm refuses the job: {error}") from error


def _told(job: str, config: Config) -> str:
    paths = run_paths(config)
    then = "the job is queued again" if config.cluster.slurm.requeue else f"`sbatch {paths.job_script}` goes on"
    return "\n".join(
        (
            f"job {job}",
            f"script: {paths.job_script}",
            f"log:    {paths.job_log(job)}",
            f"follow: tail -F {paths.job_log(job)}",
            f"status: squeue --jobs={job}; aligner status {paths.root}",
            f"stop:   scancel --batch --signal=USR1 {job}   # with a checkpoint; {then}",
            f"end:    scancel {job}",
        )
    )
