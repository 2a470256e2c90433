"""`aligner launch cluster=skypilot`: submit the task of a run as a managed job of SkyPilot."""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from aligner.errors import AlignerError, ConfigError
from aligner.launcher.cluster_commands import TIMEOUT_S, NoAnswerError, run_cluster_command
from aligner.launcher.job_system import JobSystem
from aligner.launcher.skypilot.task_file import render_task
from aligner.paths import RunPaths, get_run_paths
from aligner.schema import Config

# Timeout of the submission in seconds: SkyPilot starts the controller of its jobs if necessary.
_SUBMIT_TIMEOUT_S = 1200.0
# Job id in the output of `sky jobs launch`.
_JOB_ID = re.compile(r"[Jj]ob ID:? *(?:\x1b\[[0-9;]*m)*(\d+)")
_NAME = re.compile(r"[a-zA-Z]([a-zA-Z0-9._-]*[a-zA-Z0-9])?")


class SkyPilotJobs(JobSystem):
    """Runs as managed jobs of SkyPilot. See `JobSystem`."""

    name = "SkyPilot"
    job_noun = "SkyPilot job"

    def get_job_file(self, paths: RunPaths) -> Path:
        """See `JobSystem`."""
        return paths.task_file

    def render(self, config: Config) -> str:
        """See `JobSystem`."""
        return render_task(config)

    def test(self, config: Config, job_file: Path) -> None:
        """See `JobSystem`. SkyPilot checks a task only when it is launched."""
        for variable in config.cluster.skypilot.secrets:
            if variable not in os.environ:
                raise ConfigError(
                    f"cluster.skypilot.secrets: {variable} is not set in the environment of"
                    " `aligner launch`, from which SkyPilot reads it"
                )
        _sky("--version")

    def check_not_submitted(self, config: Config) -> None:
        """See `JobSystem`."""
        queue = _sky("jobs", "queue", "--skip-finished")
        if any(str(config.run.name) in line.split() for line in queue.splitlines()):
            raise ConfigError(
                f"run.name={config.run.name}: SkyPilot already has an active job with this name;"
                f" stop it with `sky jobs cancel --name {config.run.name}`, or choose another"
                " run.name"
            )

    def submit(self, config: Config, job_file: Path) -> str:
        """See `JobSystem`."""
        secrets = [
            part for variable in config.cluster.skypilot.secrets for part in ("--secret", variable)
        ]
        arguments = ["jobs", "launch", "--yes", "--detach-run", *secrets, str(job_file)]
        try:
            printed = _sky(*arguments, timeout_s=_SUBMIT_TIMEOUT_S)
        except (NoAnswerError, KeyboardInterrupt) as error:
            raise NoAnswerError(
                f"{str(error) or 'interrupted'}: it is unknown whether the job was submitted. Check"
                " with `sky jobs queue`; if the job is not listed, launch again with"
                " run.resume=auto"
            ) from error
        match = _JOB_ID.search(printed)
        return str(config.run.name) if match is None else match[1]

    def get_own_job(self, config: Config) -> str:
        """See `JobSystem`."""
        return os.environ.get("SKYPILOT_TASK_ID", str(config.run.name))

    def describe_job(self, config: Config, job: str) -> Sequence[str]:
        """See `JobSystem`."""
        paths = get_run_paths(config)
        return [
            f"job {job}",
            f"file:   {paths.task_file}",
            f"follow: {self.get_log_hint(config, job)}",
            f"status: {self.get_queue_command(config, job)}; aligner status {paths.root}",
            f"stop:   sky jobs cancel --name {config.run.name}; resume with"
            f" `{self.get_start_command(config)}`",
        ]

    def is_in_queue(self, config: Config, job: str, timeout_s: float) -> bool | None:
        """See `JobSystem`. A request to SkyPilot may take minutes, so the state is unknown."""
        return None

    def get_queue_command(self, config: Config, job: str | None) -> str:
        """See `JobSystem`."""
        return "sky jobs queue"

    def get_log_hint(self, config: Config, job: str | None) -> str:
        """See `JobSystem`."""
        return f"sky jobs logs --name {config.run.name}"

    def get_start_command(self, config: Config) -> str:
        """See `JobSystem`."""
        secrets = "".join(f" --secret {name}" for name in config.cluster.skypilot.secrets)
        return f"sky jobs launch{secrets} {shlex.quote(str(get_run_paths(config).task_file))}"

    def get_stop_command(self, job: str) -> str:
        """See `JobSystem`."""
        return f"sky jobs cancel {job}"


def _sky(*arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    """Run SkyPilot's command and return its standard output.

    Raises:
        ConfigError: SkyPilot rejected the task; the error contains its message.
        NoAnswerError: SkyPilot did not answer.
    """
    try:
        return run_cluster_command(
            ["sky", *arguments],
            missing_text=(
                "cluster.kind=skypilot: requires sky; install SkyPilot (pip install skypilot), or"
                " print the task with --dry-run"
            ),
            read_message=lambda text: "; ".join(text.splitlines()[-5:]),
            timeout_s=timeout_s,
        )
    except (ConfigError, NoAnswerError):
        raise
    except AlignerError as error:
        raise ConfigError(f"cluster.skypilot: SkyPilot rejected the run: {error}") from error
