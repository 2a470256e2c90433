"""OCI bundles with which `srun --container` starts the ranks of a role.

`srun --container` has no flags for mounts: mounts are part of a bundle's `config.json`. aligner
therefore writes a bundle for each role, which uses the file system of the image's bundle and adds
the mounts of the run.

As with Pyxis, a container has the processes, network and shared memory of its node: ranks of one
node communicate through shared memory, and servers through the node's addresses.

Source: https://github.com/opencontainers/runtime-spec/blob/main/config.md
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError
from aligner.file_limits import read_json_object

CONFIG = "config.json"
"""Name of the file of a bundle that describes the container."""
ROOT = "rootfs"
"""Name of the directory of a bundle with the container's files. Slurm before 23.02 always uses this
name."""

# Namespaces that a container keeps; it shares all others with its node.
_PRIVATE_NAMESPACES = ("mount", "user")
# Mounts of these kinds need a namespace that the container does not have.
_REPLACED_TYPES = ("proc", "sysfs", "cgroup", "cgroup2", "mqueue")
_SHARED_MEMORY = "/dev/shm"
# Directories and files of the node in every container. Names of nodes are resolved as outside.
_NODE_MOUNTS = (
    "/proc",
    "/sys:/sys:ro",
    f"{_SHARED_MEMORY}:{_SHARED_MEMORY}",
    "/tmp",
    "/etc/hosts:/etc/hosts:ro",
    "/etc/resolv.conf:/etc/resolv.conf:ro",
)


def read_bundle(bundle: Path) -> dict[str, Any]:
    """Return the configuration of an OCI bundle.

    Raises:
        ConfigError: The directory is not a bundle.
    """
    return read_json_object(bundle / CONFIG)


def get_root(bundle: Path, bundle_config: Mapping[str, Any]) -> Path:
    """Return the directory with the files of a bundle's container."""
    path: str = bundle_config.get("root", {}).get("path", ROOT)
    return (bundle / path).absolute()


def get_image_environment(bundle_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that an image sets."""
    variables: list[str] = bundle_config.get("process", {}).get("env") or []
    return dict(variable.partition("=")[::2] for variable in variables)


def build_bundle_config(
    bundle: Path,
    mounts: Collection[str],
    rank_variables: Collection[str],
    *,
    does_slurm_set_root: bool,
) -> dict[str, Any]:
    """Return the configuration of a role's bundle.

    Args:
        bundle: The bundle of the image.
        mounts: Additional mounts, as `SOURCE:TARGET[:FLAGS]`.
        rank_variables: Environment variables that aligner sets for ranks, and that the image must
            not replace.
        does_slurm_set_root: Whether Slurm replaces the path of the root directory by `ROOT`, as
            releases before 23.02 do. The image's files are then mounted on the root directory;
            runc supports this, crun does not.

    Raises:
        ConfigError: The bundle of the image is not a bundle.
    """
    image = read_bundle(bundle)
    root = get_root(bundle, image)
    process = image.get("process", {})
    linux = image.get("linux", {})
    environment = [
        f"{name}={value}"
        for name, value in get_image_environment(image).items()
        if name not in rank_variables
    ]
    root_mounts = [_bind(f"{root}:/")] if does_slurm_set_root else []
    return {
        # Host names and kernel parameters belong to namespaces that the container does not have.
        **{key: value for key, value in image.items() if key not in ("hostname", "domainname")},
        "root": {**image.get("root", {}), "path": ROOT if does_slurm_set_root else str(root)},
        "process": {
            # The resource limits are those of the job step.
            **{key: value for key, value in process.items() if key != "rlimits"},
            "env": environment,
            "user": _find_user(linux),
        },
        "mounts": [
            *root_mounts,
            *_select_mounts(image.get("mounts", [])),
            *(_bind(mount) for mount in mounts),
        ],
        "linux": {
            **{key: value for key, value in linux.items() if key != "sysctl"},
            "namespaces": [
                namespace
                for namespace in linux.get("namespaces", [])
                if namespace["type"] in _PRIVATE_NAMESPACES
            ],
        },
    }


def _select_mounts(image_mounts: Collection[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the mounts of a bundle that the container can have, and those of its node.

    A mount must come after the mounts of the directories above it.
    """
    kept = [
        mount
        for mount in image_mounts
        if mount.get("type") not in _REPLACED_TYPES and mount["destination"] != _SHARED_MEMORY
    ]
    destinations = {mount["destination"] for mount in kept}
    node_mounts = [
        mount
        for mount in map(_bind, _NODE_MOUNTS)
        if mount["destination"] not in destinations and Path(mount["source"]).exists()
    ]
    return sorted([*node_mounts, *kept], key=lambda mount: mount["destination"].count("/"))


def _bind(mount: str) -> dict[str, Any]:
    """Return the entry of a mount, from `PATH` or `SOURCE:TARGET[:FLAGS]`."""
    source, _, rest = mount.partition(":")
    target, _, flags = rest.partition(":")
    # Flags have the form of Pyxis: `ro+rprivate`.
    options = [flag for flag in flags.split("+") if flag]
    return {
        "destination": target or source,
        "source": source,
        "type": "none",
        "options": ["rbind", "rprivate", *options],
    }


def _find_user(linux: Mapping[str, Any]) -> dict[str, int]:
    """Return the user in the container who is the job's user outside.

    Without a user namespace, the ids are equal.
    """
    has_namespace = any(entry["type"] == "user" for entry in linux.get("namespaces", []))
    if not has_namespace:
        return {"uid": os.getuid(), "gid": os.getgid()}
    return {
        "uid": _map_id(os.getuid(), linux.get("uidMappings", [])),
        "gid": _map_id(os.getgid(), linux.get("gidMappings", [])),
    }


def _map_id(outside: int, mappings: Collection[Mapping[str, int]]) -> int:
    """Return the id in the container of a user or group of the node.

    Raises:
        ConfigError: The container has no such id.
    """
    for mapping in mappings:
        index = outside - mapping["hostID"]
        if 0 <= index < mapping["size"]:
            return mapping["containerID"] + index
    raise ConfigError(
        f"cluster.slurm.image: the id mappings of the bundle's {CONFIG} do not contain id {outside}"
        " of this user; create the bundle as this user, with `umoci unpack --rootless` or"
        " `runc spec --rootless`"
    )
