"""Checks of the section `cluster`: the devices of this machine, or the job on a cluster.

The checks compare the job with the roles, its mounts, and the machine that submits it.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from aligner.checks.pod_jobs import find_kubernetes_problems, find_skypilot_problems
from aligner.errors import ConfigError
from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.paths import get_cache_directory
from aligner.placement.job_layout import (
    JobLayout,
    compute_job_layout,
    get_node_settings,
    get_role_key,
)
from aligner.placement.local_devices import assign_local_devices
from aligner.placement.oci_bundle import CONFIG, get_root, read_bundle
from aligner.placement.roles import has_generator, uses_gpus
from aligner.placement.slurm_container import (
    get_slurm_settings,
    list_container_mounts,
    uses_oci_bundles,
)
from aligner.schema import Config
from aligner.schema.references import find_read_paths

# Time limits that `sbatch --time` accepts.
_TIME_LIMIT = r"\d+(:\d{1,2}(:\d{1,2})?)?|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED|INFINITE"
# Variables of a job that Pyxis does not pass to enroot (`enroot_deny_env` in pyxis_slurmstepd.c of
# Pyxis 0.11 to 0.24).
_DISCARDED_BY_PYXIS = {
    "ENROOT_LIBRARY_PATH",
    "ENROOT_SYSCONF_PATH",
    "ENROOT_RUNTIME_PATH",
    "ENROOT_CACHE_PATH",
    "ENROOT_DATA_PATH",
    "ENROOT_TEMP_PATH",
}
_REGISTRY_IMAGE = r"[\w.-]+(:\d+)?[#/]?[\w./@:-]*"


def find_problems(
    config: Config, model: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield a line for each problem of the placement of roles on this machine or on a cluster.

    Only problems that are visible on the machine that submits the job are reported.
    """
    kind = config.cluster.kind
    if kind == "local":
        try:
            assign_local_devices(config)
        except ConfigError as error:
            yield str(error)
        return
    try:
        yield from _find_replica_problems(config, compute_job_layout(config))
    except ConfigError as error:
        yield str(error)
    # Runs that do not train a model resume after their last step, without checkpoints.
    if config.cluster.is_requeued and config.algorithm.trains_model:
        yield from _find_requeue_problems(config)
    if config.server.interface != "0.0.0.0":
        yield (
            f"server.interface={config.server.interface}: must be 0.0.0.0 with cluster={kind},"
            " because clients connect to each server at the address of its node"
        )
    if kind == "slurm":
        yield from _find_slurm_problems(config)
    elif kind == "kubernetes":
        yield from find_kubernetes_problems(config)
    else:
        yield from find_skypilot_problems(config)


def _find_slurm_problems(config: Config) -> Iterator[str]:
    """Yield problems of the time limit, the images and the mounts of a Slurm job."""
    slurm = config.cluster.slurm
    if slurm.time is not None:
        yield from _find_time_problems(slurm.time, slurm.grace_s)
    # Roles without an image of their own run in the image of the job.
    images = {"cluster.slurm.image": slurm.image}
    images |= {
        f"cluster.slurm.roles.{role}.image": get_slurm_settings(config, role).image
        for role in vars(slurm.roles)
    }
    find_image_problems = (
        _find_bundle_problems if uses_oci_bundles(config) else _find_image_problems
    )
    for key, image in images.items():
        if image is not None:
            yield from find_image_problems(key, image)
    if uses_oci_bundles(config) and not any(images.values()):
        yield (
            "cluster.slurm.container_runtime=oci: has no effect without a container; set"
            " cluster.slurm.image to the directory of an OCI bundle"
        )
    if not uses_oci_bundles(config) and any(images.values()):
        yield from _find_discarded_variables(config)
    yield from _find_path_problems(config, has_image=any(images.values()))
    if any(images.values()):
        yield from _find_mount_problems(config)


def _find_path_problems(config: Config, has_image: bool) -> Iterator[str]:
    """Yield paths with characters that Slurm or a container does not support."""
    if config.run.dir is not None and "\\" in config.run.dir:
        yield (
            f"run.dir={config.run.dir}: must not contain a backslash with cluster=slurm, because"
            " Slurm would not replace the job and task numbers in the names of log files; choose"
            " another directory"
        )
    paths_in_container = {
        "run.dir": config.run.dir or "",
        "ALIGNER_CACHE": str(get_cache_directory()),
    }
    for key, path in paths_in_container.items():
        if has_image and re.search("[:,]", path):
            yield (
                f"{key}={path}: must not contain a colon or a comma with cluster.slurm.image,"
                " because they separate the parts of a mount; choose another directory"
            )


def _find_time_problems(time: str, grace_s: int) -> Iterator[str]:
    """Yield problems of the time limit of the job."""
    if not re.fullmatch(_TIME_LIMIT, time):
        yield (
            f"cluster.slurm.time={time}: must be minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM,"
            " D-HH:MM:SS or UNLIMITED"
        )
    elif _parse_time_limit(time) <= grace_s:
        yield (
            f"cluster.slurm.time={time}: must be longer than cluster.slurm.grace_s={grace_s} s,"
            " because Slurm sends the stop signal cluster.slurm.grace_s seconds before the time"
            " limit"
        )


def _find_requeue_problems(config: Config) -> Iterator[str]:
    """Yield a problem if a requeued job would have no checkpoint from which to resume."""
    every = config.checkpoint.every
    minutes = config.checkpoint.every_minutes
    steps = config.run.steps
    # A checkpoint after the last step comes too late for a requeued job.
    if not minutes and not 0 < every < steps:
        yield (
            f"cluster.{config.cluster.kind}.requeue=true: with checkpoint.every={every} and"
            " checkpoint.every_minutes=0 the run writes its first checkpoint after the last step"
            f" (run.steps={steps}), so a requeued job would restart from the beginning; set"
            " checkpoint.every_minutes=MINUTES, checkpoint.every=STEPS or"
            f" cluster.{config.cluster.kind}.requeue=false"
        )


def _parse_time_limit(time: str) -> float:
    """Return the seconds of a time limit that matches `_TIME_LIMIT`; infinity without a limit."""
    if not time[0].isdigit():
        return math.inf
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    # Without days, one number is minutes, and two numbers are minutes and seconds. With days, the
    # first number is hours.
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(
        part * unit for part, unit in zip(parts, units, strict=False)
    )


def _find_replica_problems(config: Config, layout: JobLayout) -> Iterator[str]:
    """Yield a problem if a replica of an external engine cannot run on its nodes.

    TensorRT-LLM starts all workers of a replica on the node of the replica's first rank. A replica
    of vLLM may also use several nodes, all of whose ranks belong to the replica.
    """
    engine = config.engine
    if engine.kind == "embedded" or not config.algorithm.generates_samples:
        return
    role = "generator" if has_generator(config) else "trainer"
    placement = layout.placements[role]
    settings = get_node_settings(config, role)
    parallel = engine.parallel
    node_ranks = placement.ranks_per_node
    if placement.nodes == 1 or node_ranks % parallel.replica_ranks == 0:
        return
    if engine.kind == "vllm" and parallel.replica_ranks % node_ranks == 0:
        if node_ranks > 1 and not uses_gpus(config):
            yield (
                f"engine.parallel: a replica of engine.kind=vllm has {parallel.replica_ranks}"
                f" ranks, and the {role} has {node_ranks} ranks on each of {placement.nodes} nodes;"
                " on CPUs, vLLM 0.32 supports a replica on several nodes only with one rank on each"
            )
        return
    # The message names the key that determines the number of ranks per node.
    key = (
        "cluster.devices_per_node"
        if settings.devices is None
        else f"{get_role_key(config, role)}.devices"
    )
    key = key if settings.nodes is None else f"{get_role_key(config, role)}.nodes"
    if engine.kind == "vllm":
        yield (
            f"engine.parallel: a replica of engine.kind=vllm has {parallel.replica_ranks} ranks"
            f" (tensor={parallel.tensor} x pipeline={parallel.pipeline}), which must divide the"
            f" {role}'s {node_ranks} ranks on a node ({key}), or be a multiple of them"
        )
        return
    yield (
        f"engine.parallel.tensor={parallel.tensor}: a replica of engine.kind={engine.kind} must fit"
        f" on one node, but the {role} has {node_ranks} ranks on each of {placement.nodes} nodes"
        f" ({key}); set more ranks per node, or set engine.parallel.tensor to a divisor of"
        f" {node_ranks}"
    )


def _find_image_problems(key: str, image: str) -> Iterator[str]:
    """Yield problems of a container image, which is a file or a name in a registry."""
    is_file = image.startswith(("/", ".")) or image.endswith((".sqsh", ".squashfs"))
    if is_file and not Path(image).is_file():
        yield (
            f"{key}={image}: no such file; create it with `enroot import`, or set the name of an"
            " image in a registry"
        )
    elif not is_file and not re.fullmatch(_REGISTRY_IMAGE, image.removeprefix("docker://")):
        yield f"{key}={image}: must be a file or the name of an image, such as REGISTRY#NAME:TAG"


def _find_bundle_problems(key: str, image: str) -> Iterator[str]:
    """Yield problems of an image that must be the directory of an OCI bundle."""
    bundle = Path(image)
    hint = "create it with `umoci unpack`, or set cluster.slurm.container_runtime=pyxis"
    if not bundle.is_absolute() or not (bundle / CONFIG).is_file():
        yield (
            f"{key}={image}: must be the absolute path of an OCI bundle, a directory with"
            f" {CONFIG}; {hint}"
        )
        return
    try:
        root = get_root(bundle, read_bundle(bundle))
    except ConfigError as error:
        yield f"{key}: {error}; {hint}"
        return
    if not root.is_dir():
        yield f"{key}={image}: its files are missing, {root} is not a directory; {hint}"


def _find_discarded_variables(config: Config) -> Iterator[str]:
    """Yield environment variables of enroot that Pyxis does not pass on."""
    slurm = config.cluster.slurm
    sections = {"cluster.slurm.environment": slurm.environment}
    sections |= {
        f"cluster.slurm.roles.{role}.environment": get_slurm_settings(config, role).environment
        for role in vars(slurm.roles)
    }
    for key, environment in sections.items():
        for name in _DISCARDED_BY_PYXIS & environment.keys():
            yield (
                f"{key}.{name}: has no effect, because Pyxis discards this variable; an"
                " administrator sets it in enroot.conf on the nodes"
            )


def _find_mount_problems(config: Config) -> Iterator[str]:
    """Yield invalid mounts, and files in the configuration that the container would not see."""
    # A mount has the form SOURCE:TARGET[:FLAGS].
    visible_directories = []
    for mount in list_container_mounts(config):
        source, _, target = mount.partition(":")
        target = target.partition(":")[0]
        if not target or not target.startswith("/"):
            yield (
                "cluster.slurm.mounts: expected SOURCE:TARGET[:FLAGS] with an absolute TARGET,"
                f" got {mount}"
            )
        elif mount in config.cluster.slurm.mounts and not Path(source).exists():
            yield f"cluster.slurm.mounts: {mount}: {source} does not exist"
        visible_directories.append(target)
    if config.cluster.slurm.mount_home:
        visible_directories.append(str(Path.home()))
    for key, path in find_read_paths(config).items():
        if Path(path).exists() and not any(
            Path(path).is_relative_to(directory) for directory in visible_directories if directory
        ):
            yield (
                f"{key}={path}: is not visible in the container; add a mount to"
                f" cluster.slurm.mounts, and set {key} to an absolute path inside the target of"
                " the mount"
            )
