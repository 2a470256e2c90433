"""Submit a run to a cluster: check the run, write the files of its job, and submit the job.

If the configuration or the cluster rejects the run, no files are left behind.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from aligner.config.compose import save_config
from aligner.config.prerequisites import RunPlan
from aligner.config.resume import check_directory, with_date
from aligner.errors import ConfigError
from aligner.files import write_file
from aligner.launcher.cluster_commands import NoAnswerError
from aligner.launcher.job_system import JobSystem
from aligner.launcher.job_systems import get_job_system
from aligner.launcher.run_directory import lock_directory, record_cache_uses, require_unlocked
from aligner.models.model_source import NOTHING_EXPECTED, ExpectedInputs
from aligner.paths import PRIVATE_MODE, RunPaths, get_cache_directory, get_run_paths
from aligner.placement.addresses import create_access_key
from aligner.terminal import print_text


def render_preview(plan: RunPlan, expected_inputs: ExpectedInputs = NOTHING_EXPECTED) -> str:
    """Check a run, and return the file of its job, followed by comments about its ranks.

    Args:
        plan: The run and its prerequisite experiments.
        expected_inputs: Model directories that need not exist yet.

    Raises:
        ConfigError: The configuration has an error that is known without asking the cluster.
    """
    system = get_job_system(plan.config)
    text = _render_checked(plan, system, expected_inputs)
    lines = system.describe_ranks(plan.config)
    return text + "".join(f"{line}\n" for line in lines)


def _render_checked(
    plan: RunPlan, system: JobSystem, expected_inputs: ExpectedInputs = NOTHING_EXPECTED
) -> str:
    """Check a run, and return the file of its job. See `render_preview`."""
    plan.check(expected_inputs)
    if missing := ", ".join(prerequisite.name for prerequisite in plan.missing_prerequisites):
        raise ConfigError(
            f"{missing}: the run needs the result of this experiment, which has not run yet. A"
            f" {system.job_noun} does not run prerequisite experiments; launch {missing} first"
        )
    return system.render(plan.config)


def submit(plan: RunPlan) -> None:
    """Submit the run as a job, and print the job id and the commands to follow and stop it.

    If it is unknown whether the cluster accepted the job, the run directory keeps the files that
    the job needs.

    Args:
        plan: The run and its prerequisite experiments.

    Raises:
        ConfigError: The configuration is invalid or the cluster rejected the job, with the
            cluster's message. The run directory is unchanged.
        NoAnswerError: It is unknown whether the job was submitted.
    """
    config = plan.config
    system = get_job_system(config)
    paths = get_run_paths(config)
    require_unlocked(paths.root)
    text = _render_checked(plan, system)
    print(f"run directory: {paths.root}", flush=True)
    job_file = system.get_job_file(paths)
    # Let the cluster check the job before anything is written to the run directory.
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / job_file.name
        file.write_text(text)
        system.test(config, file)
    with lock_directory(paths.root, mode=PRIVATE_MODE):
        # A queued job holds no lock yet, and will read the files of this directory. The job may
        # have been submitted by hand, so the function asks the cluster for it.
        system.check_not_submitted(config)
        check_directory(config)
        config = with_date(config)
        with _restore_if_rejected(paths, job_file):
            paths.logs.mkdir(parents=True, exist_ok=True)
            get_cache_directory().mkdir(parents=True, exist_ok=True)  # a container mounts it
            save_config(config, paths.config)
            create_access_key(config)
            record_cache_uses(config)
            write_file(job_file, text)
            job = system.submit(config, job_file)
        paths.status.unlink(missing_ok=True)  # belongs to an earlier launch
    print_text("\n".join(system.describe_job(config, job)))


@contextlib.contextmanager
def _restore_if_rejected(paths: RunPaths, job_file: Path) -> Iterator[None]:
    """Restore the run directory if the block fails.

    The directory keeps its new files if the block succeeds, or if its outcome is unknown.
    """
    files_before = {*paths.root.iterdir()}
    overwritten = {
        file: file.read_bytes() for file in (paths.config, job_file) if file in files_before
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
