"""The ranks of a role in a job on a cluster: their number, threads, environment and logs.

The functions are the same for all clusters: `slurm.job_steps` starts ranks as tasks of job steps,
`nodes.node_ranks` through a process on each node.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from aligner.launcher.heartbeats import heartbeat_environment
from aligner.launcher.rank_environment import DEVICES, world_environment
from aligner.launcher.ranks import prepare_log
from aligner.observability.user_errors import user_error_environment
from aligner.placement.job_layout import JobLayout, RolePlacement, get_node_settings
from aligner.placement.roles import count_role_ranks, get_configured_threads
from aligner.schema import Config


@dataclass(frozen=True)
class PlacedRanks:
    """The ranks of a role or server group, and their nodes and devices."""

    placement: RolePlacement
    count: int
    """Number of ranks."""

    def __len__(self) -> int:
        return self.count

    def get_ranks_of_node(self, node: int) -> range:
        """Return the ranks on a node of the placement, by the index of the node within it."""
        first = node * self.placement.ranks_per_node
        return range(first, min(first + self.placement.ranks_per_node, self.count))


def place_ranks(config: Config, layout: JobLayout, role: str) -> PlacedRanks:
    """Return the ranks of a role or server group.

    Args:
        config: The run's configuration.
        layout: Placement of the roles.
        role: Role or server group; `prepare` has one rank, on the first node of the trainer.
    """
    if role == "prepare":
        return PlacedRanks(replace(layout.placements["trainer"], nodes=1, ranks_per_node=1), 1)
    return PlacedRanks(layout.placements[role], count_role_ranks(config)[role])


def compute_job_threads(
    config: Config, layout: JobLayout, placement: RolePlacement, cpus: int | None
) -> int | None:
    """Return the CPU threads of each rank; None if they depend on nodes that are not known yet.

    As in a local run, the ranks of a node share the cores that the job has on the node.

    Args:
        config: The run's configuration.
        layout: Placement of the roles.
        placement: Placement of the role or server group.
        cpus: CPUs that the job has on each node; None before the job starts.
    """
    threads = get_configured_threads(config)
    if threads is not None or cpus is None:
        return threads
    return max(1, cpus // layout.components[placement.component].ranks_per_node)


def job_environment(
    config: Config, role: str, ranks: PlacedRanks, master: str, master_port: int, threads: int
) -> dict[str, str]:
    """Return the environment variables of all ranks of a role, without the configured ones.

    The function also creates the heartbeat files of the ranks.

    Args:
        config: The run's configuration.
        role: Role or server group.
        ranks: Ranks of the role.
        master: Address of rank 0.
        master_port: Port of the process group's store on rank 0.
        threads: CPU threads per rank.
    """
    return {
        **world_environment(
            len(ranks), ranks.placement.ranks_per_node, master, master_port, threads
        ),
        **heartbeat_environment(config, role, len(ranks)),
        **user_error_environment(config, role),
    }


def configured_environment(
    config: Config, role: str, placement: RolePlacement
) -> Mapping[str, str]:
    """Return the environment variables of a role that the configuration and the devices define."""
    variables = {**config.cluster.job.environment, **get_node_settings(config, role).environment}
    return device_environment(placement) | {name: str(value) for name, value in variables.items()}


def device_environment(placement: RolePlacement) -> dict[str, str]:
    """Return the environment variable that limits a role to its devices; empty without a limit."""
    return {} if placement.devices is None else {DEVICES: ",".join(map(str, placement.devices))}


def prepare_logs(config: Config, role: str, ranks: int, restarts: int) -> list[Path]:
    """Return the logs of the ranks of a role that is about to start.

    The logs exist even if the ranks never start.
    """
    logs = [prepare_log(config, role, rank, restarts) for rank in range(ranks)]
    for log in logs:
        log.touch()
    return logs
