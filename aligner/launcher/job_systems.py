"""The clusters to which `aligner launch` submits runs."""

from aligner.launcher.job_system import JobSystem
from aligner.launcher.kubernetes.submit_job_set import KubernetesJobs
from aligner.launcher.skypilot.submit_task import SkyPilotJobs
from aligner.launcher.slurm.submit import SlurmJobs
from aligner.schema import Config


def get_job_system(config: Config) -> JobSystem:
    """Return the cluster of a run that does not run on this machine."""
    systems: dict[str, type[JobSystem]] = {
        "slurm": SlurmJobs,
        "kubernetes": KubernetesJobs,
        "skypilot": SkyPilotJobs,
    }
    return systems[config.cluster.kind]()
