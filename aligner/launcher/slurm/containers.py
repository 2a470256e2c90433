"""The containers of job steps: flags of Pyxis, and OCI bundles for `srun --container`."""

import json
import re
import shlex
import signal
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
    config: Config, role: str, image: str, ranks: int, placement: RolePlacement, name: str
) -> list[str]:
    """Return shell lines that set up the process of a rank in the container of an OCI bundle.

    Slurm replaces the command of the bundle, and starts it in the bundle's working directory. Which
    of the job and the image determines the value of a variable depends on the release of Slurm.

    Args:
        config: The run's configuration.
        role: Role or server group.
        image: The bundle of the role's image.
        ranks: Number of ranks.
        placement: Placement of the role in the job.
        name: Name of the step.
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
    # Send the signals of the supervisor to the rank, whose process replaces this shell.
    file = shlex.quote(str(_get_signal_file(config, name)))
    lines.append(
        "{ (last=0; while kill -0 $$ && read -r count number < "
        + file
        + '; do if [ "$count" != $last ]; then last=$count; kill -$number $$; fi; sleep 1; done)'
        " < /dev/null > /dev/null 2>&1 & }"
    )
    return lines


def _list_rank_variables(config: Config, role: str, placement: RolePlacement) -> set[str]:
    """Return the environment variables of a rank that an image must not replace."""
    return {*library_environment(threads=1), *configured_environment(config, role, placement)}


def _get_signal_file(config: Config, name: str) -> Path:
    """Return the file with the number of signals that a step has received, and the last signal."""
    return get_run_paths(config).bundles / f"{name}.signal"


def send_to_bundle_step(config: Config, name: str, number: signal.Signals) -> None:
    """Send a signal to the ranks of a step in containers, within a second.

    Slurm starts the runtime of a container in a shell, and sends signals to all processes of a
    step. The signal would end this shell, and with it the step.
    """
    file = _get_signal_file(config, name)
    count = int(file.read_text().split()[0])
    # The file is not replaced: network file systems notice new content when a file is opened.
    file.write_text(f"{count + 1} {number.value}\n")


def has_bundle(config: Config, role: str) -> bool:
    """Return whether a role or server group runs in the containers of an OCI bundle."""
    return uses_oci_bundles(config) and get_container_image(config, role) is not None


def write_bundle(config: Config, role: str, placement: RolePlacement, name: str) -> None:
    """Write the OCI bundle of a role into the run directory.

    Args:
        config: The run's configuration.
        role: Role or server group, which has a bundle.
        placement: Placement of the role in the job.
        name: Name of the step that is about to start.

    Raises:
        AlignerError: Slurm did not answer.
        ConfigError: The image is not a bundle.
    """
    image = get_container_image(config, role)
    assert image is not None
    bundle = get_run_paths(config).bundle(get_role(role))
    content = build_bundle_config(
        Path(image),
        list_container_mounts(config),
        _list_rank_variables(config, role, placement),
        does_slurm_set_root=not has_container_tasks(),
    )
    (bundle / ROOT).mkdir(parents=True, exist_ok=True)
    write_file(bundle / CONFIG, json.dumps(content, indent=2))
    _get_signal_file(config, name).write_text("0 0\n")
