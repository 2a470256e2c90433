"""`aligner supervise`: supervise a run inside its job on a cluster.

The batch script of a Slurm job runs this command on the first node of the trainer. Each node of a
Kubernetes or SkyPilot job runs it.
"""

from dataclasses import replace
from pathlib import Path

from aligner.config.compose import load_own_config
from aligner.errors import ConfigError
from aligner.launcher.nodes.node_process import run_node
from aligner.launcher.slurm.job import supervise_job
from aligner.observability.console import RunConsole
from aligner.paths import RunPaths


def supervise(directory: Path, *, is_agent: bool = False) -> None:
    """Run the configuration of a run directory on the nodes of this job.

    The run resumes from its last checkpoint, if it has one.

    Args:
        directory: The run directory.
        is_agent: Whether to run only the agent of this node, which starts ranks for the supervisor.

    Raises:
        AlignerError: A role failed. `aligner.launcher.local.launch` describes the other errors.
    """
    paths = RunPaths(directory.absolute())
    config = load_own_config(paths.config)
    if config.cluster.kind == "local":
        raise ConfigError(
            f"{directory}: cluster.kind=local: must be slurm, kubernetes or skypilot; start this"
            " run with `aligner launch`"
        )
    config = replace(config, run=replace(config.run, resume="auto", dir=str(paths.root)))
    # A log file has no terminal width.
    console = RunConsole(width=120)
    if config.cluster.kind == "slurm":
        supervise_job(config, console)
    else:
        run_node(config, console, is_agent=is_agent)
