"""The containers of job steps: flags of Pyxis, and OCI bundles for `srun --container`."""

import json
import re
import shlex
from pathlib import Path

from aligner.files import write_file
from aligner.launcher.job_ranks import configured_environment
from aligner.launcher.rank_environment import library_environment
from aligner.launcher.slurm.slurm_commands import has_container_tasks
from aligner.paths import get_run_paths
from aligner.placement.job_layout import RolePlacement
from aligner.placement.oci_bundle import (
    CONFIG,
    ROOT,
    build_bundle_config,
    get_image_environment,
    read_bundle,
)
from aligner.placement.roles import get_role
from aligner.placement.slurm_container import (
    get_container_image,
    list_container_mounts,
    uses_oci_bundles,
)
from aligner.schema import Config

# Names of environment variables that a shell can set.
_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def list_pyxis_flags(config: Config, image: str) -> list[str]:
    """Return the flags of `srun` with which the plugin Pyxis starts an image."""
    slurm = config.cluster.slurm
    return [
        f"--container-image={image}",
        f"--container-mounts={','.join(list_container_mounts(config))}",
        f"--container-workdir={slurm.workdir or get_run_paths(config).root}",
        "--container-mount-home" if slurm.mount_home else "--no-container-mount-home",
    ]


def list_bundle_shell_lines(
    config: Config, role: str, image: str, ranks: int, placement: RolePlacement
) -> list[str]:
    """Return shell lines that set up the process of a rank in the container of an OCI bundle.

    Slurm replaces the command of the bundle, and starts it in the bundle's working directory. Which
    of the job and the image determines the value of a variable depends on the release of Slurm.
    """
    variables = get_image_environment(read_bundle(Path(image)))
    ranks_variables = _list_rank_variables(config, role, placement)
    assignments = [
        shlex.quote(f"{name}={value}")
        for name, value in variables.items()
        if name not in ranks_variables and _SHELL_NAME.fullmatch(name)
    ]
    lines = []
    if assignments:
        lines.append(f"export {' '.join(assignments)}")
    if ranks == 1:
        # Slurm before 23.02 does not pass these variables to containers.
        lines.append("export SLURM_PROCID=0 SLURM_LOCALID=0")
    workdir = config.cluster.slurm.workdir or str(get_run_paths(config).root)
    lines.append(f"cd {shlex.quote(workdir)} || exit")
    return lines


def _list_rank_variables(config: Config, role: str, placement: RolePlacement) -> set[str]:
    """Return the environment variables of a rank that an image must not replace."""
    return {*library_environment(threads=1), *configured_environment(config, role, placement)}


def write_bundle(config: Config, role: str, placement: RolePlacement) -> None:
    """Write the OCI bundle of a role into the run directory, if the role has one.

    Raises:
        AlignerError: Slurm did not answer.
        ConfigError: The image is not a bundle.
    """
    image = get_container_image(config, role)
    if image is None or not uses_oci_bundles(config):
        return
    bundle = get_run_paths(config).bundle(get_role(role))
    content = build_bundle_config(
        Path(image),
        list_container_mounts(config),
        _list_rank_variables(config, role, placement),
        does_slurm_set_root=not has_container_tasks(),
    )
    (bundle / ROOT).mkdir(parents=True, exist_ok=True)
    write_file(bundle / CONFIG, json.dumps(content, indent=2))
