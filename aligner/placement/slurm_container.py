"""The containers of a Slurm job's roles: their images and mounts."""

from pathlib import Path

from aligner.paths import get_cache_directory, get_run_paths
from aligner.placement.roles import get_role
from aligner.schema import Config, SlurmRoleConfig


def get_slurm_settings(config: Config, group: str) -> SlurmRoleConfig:
    """Return the Slurm settings of the role of a server group."""
    settings: SlurmRoleConfig = getattr(config.cluster.slurm.roles, get_role(group))
    return settings


def list_container_mounts(config: Config) -> list[str]:
    """Return the mounts of a role's container.

    These are the run directory and the cache, at the same paths as outside, and the configured
    mounts. Pyxis mounts the home directory itself.
    """
    slurm = config.cluster.slurm
    paths = [get_run_paths(config).root, get_cache_directory()]
    if uses_oci_bundles(config) and slurm.mount_home:
        paths.append(Path.home())
    return [*(f"{path}:{path}" for path in paths), *slurm.mounts]


def uses_oci_bundles(config: Config) -> bool:
    """Return whether `srun --container` starts the containers, not the plugin Pyxis."""
    return config.cluster.slurm.container_runtime == "oci"


def get_container_image(config: Config, group: str) -> str | None:
    """Return the container image of a role or server group; None without a container."""
    return get_slurm_settings(config, group).image or config.cluster.slurm.image
