"""Checks of `cluster.kubernetes` and `cluster.skypilot`: names, volumes, and paths on volumes."""

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.paths import get_cache_directory, get_run_paths
from aligner.schema import Config
from aligner.schema.environment_text import with_references
from aligner.schema.references import find_read_paths

# Names of Kubernetes objects (RFC 1123), of labels and of environment variables.
_OBJECT_NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_LABEL_NAME = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
# An interpolation without a default value.
_REQUIRED_VARIABLE = r"\$\{oc\.env:(\w+)\}"
_SECRET_KEY = r"[-._a-zA-Z0-9]+"
_VOLUME = rf"{_OBJECT_NAME}:/[^:]*(:ro)?"
_INFRA = r"[\w*-]+(/[^/\s]+){0,2}"


def find_kubernetes_problems(config: Config) -> Iterator[str]:
    """Yield a line for each problem of `cluster.kubernetes` that is known without the cluster."""
    kubernetes = config.cluster.kubernetes
    key = "cluster.kubernetes"
    role_images = [role.image for role in vars(kubernetes.roles).values()]
    if kubernetes.image is None and not all(role_images):
        yield f"{key}.image=null: must be a container image in which aligner is installed"
    memory_gib = kubernetes.memory_gib
    if memory_gib is not None and memory_gib <= kubernetes.shared_memory_gib:
        yield (
            f"{key}.memory_gib={memory_gib:g}: must be above"
            f" {key}.shared_memory_gib={kubernetes.shared_memory_gib:g}, because the files in"
            " /dev/shm count towards the memory of the pod"
        )
    names = {
        "namespace": kubernetes.namespace,
        "queue": kubernetes.queue,
        "priority_class": kubernetes.priority_class,
        "service_account": kubernetes.service_account,
    }
    names |= {
        f"image_pull_secrets[{index}]": name
        for index, name in enumerate(kubernetes.image_pull_secrets)
    }
    for name, value in names.items():
        if value is not None and not re.fullmatch(_OBJECT_NAME, value):
            yield (
                f"{key}.{name}={value}: must be the name of a Kubernetes object: lowercase letters,"
                " digits, `-` and `.`"
            )
    yield from _find_label_problems(f"{key}.labels", kubernetes.labels)
    yield from _find_label_problems(f"{key}.node_selector", kubernetes.node_selector)
    for toleration in kubernetes.tolerations:
        if not isinstance(toleration, Mapping):
            yield (
                f"{key}.tolerations: {toleration}: must be a mapping, such as"
                " {key: nvidia.com/gpu, operator: Exists}"
            )
    yield from _find_secret_problems(kubernetes.secrets)
    yield from _find_variable_problems(config, f"{key}.secrets", kubernetes.secrets)

    paths = []
    for volume in kubernetes.volumes:
        if re.fullmatch(_VOLUME, volume):
            paths.append(volume.split(":")[1])
        else:
            yield (
                f"{key}.volumes: {volume}: must be CLAIM:PATH or CLAIM:PATH:ro with an absolute"
                " PATH"
            )
    yield from _find_volume_problems(config, f"{key}.volumes", "CLAIM:PATH", paths)


def find_skypilot_problems(config: Config) -> Iterator[str]:
    """Yield a line for each problem of `cluster.skypilot` that is known without SkyPilot."""
    skypilot = config.cluster.skypilot
    key = "cluster.skypilot"
    if skypilot.infra is not None and not re.fullmatch(_INFRA, skypilot.infra):
        yield f"{key}.infra={skypilot.infra}: must be CLOUD[/REGION[/ZONE]], such as aws/us-east-1"
    if skypilot.accelerator is not None and not re.fullmatch(r"[\w-]+", skypilot.accelerator):
        yield (
            f"{key}.accelerator={skypilot.accelerator}: must be the type of a GPU without a number,"
            " such as H100; the number per node is cluster.devices_per_node at most"
        )
    for name, pattern in (("cpus", r"\d+(\.\d+)?\+?"), ("memory_gib", r"\d+(\.\d+)?[+x]?")):
        value = getattr(skypilot, name)
        if value is not None and not re.fullmatch(pattern, value):
            yield f"{key}.{name}={value}: must be a number, or a number and `+`, such as 64+"
    for variable in skypilot.secrets:
        if not re.fullmatch(_VARIABLE, variable):
            yield f"{key}.secrets: {variable}: must be the name of an environment variable"
    yield from _find_variable_problems(config, f"{key}.secrets", skypilot.secrets)
    paths = [str(path) for path in skypilot.volumes]
    for path in paths:
        if not path.startswith("/"):
            yield f"{key}.volumes: {path}: must be an absolute path"
    yield from _find_volume_problems(config, f"{key}.volumes", "PATH: VOLUME", paths)


def _find_label_problems(key: str, labels: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each name or value that is not valid for a label."""
    for name, value in labels.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if not re.fullmatch(_LABEL_NAME, name) or not re.fullmatch(_LABEL_VALUE, text):
            yield (
                f"{key}: {name}: {text}: must be a valid label: at most 63 letters, digits, `-`,"
                " `_` and `.`"
            )


def _find_secret_problems(secrets: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each entry that does not refer to a key of a Secret."""
    for variable, reference in secrets.items():
        if not re.fullmatch(_VARIABLE, variable):
            yield (
                f"cluster.kubernetes.secrets: {variable}: must be the name of an environment"
                " variable"
            )
        # The message does not contain the text, which may be the secret itself.
        if not re.fullmatch(f"{_OBJECT_NAME}/{_SECRET_KEY}", str(reference)):
            yield (
                f"cluster.kubernetes.secrets.{variable}: must be SECRET/KEY, the name of a"
                " Kubernetes Secret and of a key in it; create it with `kubectl create secret"
                " generic SECRET --from-literal=KEY=…`"
            )


def _find_variable_problems(config: Config, key: str, available: Collection[str]) -> Iterator[str]:
    """Yield a line for each environment variable of the configuration that the nodes do not have.

    Args:
        config: The run's configuration.
        key: Key with the environment variables of the nodes.
        available: Names of these variables.
    """
    text = repr(with_references(dataclasses.asdict(config)))
    for variable in sorted({*re.findall(_REQUIRED_VARIABLE, text)} - {*available}):
        yield (
            f"{key}: lacks {variable}, which the configuration reads with ${{oc.env:{variable}}};"
            " the nodes resolve it when the run starts, so they need the variable"
        )


def _find_volume_problems(
    config: Config, key: str, form: str, volumes: Sequence[str]
) -> Iterator[str]:
    """Yield paths of the run that are not on a volume, so that the nodes would not see them.

    Args:
        config: The run's configuration.
        key: Key with the volumes.
        form: Form of a volume in the key.
        volumes: Paths at which the nodes mount the volumes.
    """
    paths = {
        "run.dir": str(get_run_paths(config).root),
        "ALIGNER_CACHE": str(get_cache_directory()),
    }
    paths |= {name: path for name, path in find_read_paths(config).items() if Path(path).exists()}
    for name, path in paths.items():
        if not any(Path(path).is_relative_to(volume) for volume in volumes):
            yield (
                f"{name}={path}: is not on a volume of the job; add the volume to {key}, as {form},"
                f" and set {name} to an absolute path on it"
            )
