"""The interface of a cluster to which `aligner launch` submits runs: `JobSystem`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from aligner.paths import RunPaths
from aligner.schema import Config


class JobSystem(ABC):
    """A cluster that runs jobs: Slurm, Kubernetes or SkyPilot."""

    name: str
    """Name of the system in messages."""
    job_noun: str
    """Noun for a submitted run in messages, such as `Slurm job`."""

    @abstractmethod
    def get_job_file(self, paths: RunPaths) -> Path:
        """Return the path of the file that describes the job, in the run directory."""

    @abstractmethod
    def render(self, config: Config) -> str:
        """Return the content of the file that describes the job.

        Raises:
            ConfigError: A role cannot be placed on the nodes.
        """

    def describe_ranks(self, config: Config) -> Sequence[str]:
        """Return further lines of the preview, which describe the start of the ranks."""
        return ()

    @abstractmethod
    def test(self, config: Config, job_file: Path) -> None:
        """Let the cluster check a job without running it, if it can.

        Raises:
            ConfigError: The cluster rejected the job, or its command is not installed.
            NoAnswerError: The cluster did not answer.
        """

    @abstractmethod
    def check_not_submitted(self, config: Config) -> None:
        """Raise ConfigError if the run is already queued or running."""

    @abstractmethod
    def submit(self, config: Config, job_file: Path) -> str:
        """Submit the job, and return its id.

        Raises:
            ConfigError: The cluster rejected the job, with the cluster's message.
            NoAnswerError: It is unknown whether the job was submitted.
        """

    @abstractmethod
    def get_own_job(self, config: Config) -> str:
        """Return the id of the job in which this process runs."""

    @abstractmethod
    def describe_job(self, config: Config, job: str) -> Sequence[str]:
        """Return lines with the commands that follow and stop a job."""

    @abstractmethod
    def is_in_queue(self, config: Config, job: str, timeout_s: float) -> bool | None:
        """Return whether a job is queued or running.

        The result is None if the state is unknown, for example because the cluster does not
        answer.
        """

    @abstractmethod
    def get_queue_command(self, config: Config, job: str | None) -> str:
        """Return the command that shows the state of a job; None stands for an unknown job id."""

    @abstractmethod
    def get_log_hint(self, config: Config, job: str | None) -> str:
        """Return the path of the supervisor's log, or the command that prints the log."""

    @abstractmethod
    def get_start_command(self, config: Config) -> str:
        """Return the command that submits an ended job again."""

    @abstractmethod
    def get_stop_command(self, job: str) -> str:
        """Return the command that stops a job after it has saved a checkpoint."""
