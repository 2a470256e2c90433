"""The JobSet of a run: one replicated job per component of the layout, with one pod per node.

All pods run `aligner supervise` (`aligner.launcher.nodes`). The first pod of the trainer supervises
the run and restarts failed ranks in all pods. Kubernetes restarts only the whole JobSet, when a pod
is lost or the run was stopped with a checkpoint. The API is described at
https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/.
"""

import hashlib
import re
import shlex
from collections.abc import Mapping
from typing import Any

from aligner.errors import FAILED, REFUSED, RESUMABLE
from aligner.launcher.job_yaml import format_job
from aligner.launcher.nodes.node_list import FIRST_NODE, NODE_INDEX, NODE_STATE, NODES
from aligner.paths import get_cache_directory, get_run_paths
from aligner.placement.job_layout import Component, JobLayout, compute_job_layout
from aligner.schema import Config, KubernetesRoleConfig

API_VERSION = "jobset.x-k8s.io/v1alpha2"
RUN_DIRECTORY = "aligner/run-directory"
"""Annotation of a JobSet with the run directory."""
# Prefix of the labels with which JobSet marks its pods.
JOB_SET_LABELS = "jobset.sigs.k8s.io"
CONTAINER = "aligner"
"""Name of the container of each pod."""
# Maximum length of the JobSet's name. The names of pods are labels of at most 63 characters: the
# name, `-generator-0-`, the index of the pod, and a hyphen with 5 characters.
_MAX_NAME = 40
_HASH_DIGITS = 6
# Directory of the files that the probes read.
_STATE_DIRECTORY = "/tmp/aligner-node"
# Seconds without an update of its file `live` after which the agent of a node counts as dead.
_LIVE_TIMEOUT_S = 120
_PROBE_PERIOD_S = 10
# Messages of the Job controller about a pod failure policy, as regular expressions: whether a pod
# was disrupted, such as preempted or evicted, or the exit code of its container.
_DISRUPTED = r"has condition DisruptionTarget "
_EXITED = r"failed with exit code {} "


def render_job_set(config: Config) -> str:
    """Return the JobSet of a run as YAML.

    Raises:
        ConfigError: A role cannot be placed on the nodes.
    """
    header = (
        f"# aligner: run {config.run.name}, experiment {config.run.experiment}."
        f" Requires JobSet 0.10 or newer.\n"
    )
    return header + format_job(build_job_set(config))


def get_job_set_name(config: Config) -> str:
    """Return the name of a run's JobSet: the run's name, as a DNS label.

    A name with other characters, or a long name, gets a suffix that depends on the whole name.
    """
    name = str(config.run.name)
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not label[:1].isalpha():
        label = f"run-{label}".strip("-")
    if label == name and len(label) <= _MAX_NAME:
        return label
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{label[: _MAX_NAME - _HASH_DIGITS - 1].rstrip('-')}-{digest}"


def build_job_set(config: Config) -> dict[str, Any]:
    """Return the JobSet of a run.

    Raises:
        ConfigError: A role cannot be placed on the nodes.
    """
    kubernetes = config.cluster.kubernetes
    layout = compute_job_layout(config)
    name = get_job_set_name(config)
    labels = {
        "app.kubernetes.io/name": "aligner",
        "app.kubernetes.io/instance": name,
        **_as_text(kubernetes.labels),
    }
    queue_label = (
        {} if kubernetes.queue is None else {"kueue.x-k8s.io/queue-name": kubernetes.queue}
    )
    annotations = {
        RUN_DIRECTORY: str(get_run_paths(config).root),
        **_as_text(kubernetes.annotations),
    }
    metadata = {
        "name": name,
        **_without_null(namespace=kubernetes.namespace),
        "labels": labels | queue_label,
        "annotations": annotations,
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            # The pods find each other by their names in a headless service, also before the
            # servers in them are ready.
            "network": {
                "enableDNSHostnames": True,
                "subdomain": name,
                "publishNotReadyAddresses": True,
            },
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["trainer"]},
            "failurePolicy": _build_failure_policy(config),
            "replicatedJobs": [
                _build_replicated_job(config, layout, index, name, labels)
                for index in range(len(layout.components))
            ],
        },
    }


def _build_failure_policy(config: Config) -> dict[str, Any]:
    """Return the reaction of the JobSet to the failure of a job.

    The reasons and messages of failed jobs follow from `_build_pod_failure_policy`.
    """
    if not config.cluster.kubernetes.requeue:
        return {"maxRestarts": 0, "rules": [{"name": "never_restart", "action": "FailJobSet"}]}
    rules = {
        # The run was preempted, or stopped with a checkpoint: continue without a limit.
        "interrupted": (
            "RestartJobSetAndIgnoreMaxRestarts",
            [_DISRUPTED, _EXITED.format(RESUMABLE)],
        ),
        # The supervisor has reported an error that would occur again.
        "failed": ("FailJobSet", [_EXITED.format(FAILED), _EXITED.format(REFUSED)]),
    }
    return {
        # Other failures, such as a container that was killed for lack of memory.
        "maxRestarts": config.cluster.kubernetes.max_restarts,
        # A new supervisor must not start while ranks of the earlier attempt still run.
        "restartStrategy": "BlockingRecreate",
        "rules": [
            {
                "name": name,
                "action": action,
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": patterns,
            }
            for name, (action, patterns) in rules.items()
        ],
    }


def _build_pod_failure_policy() -> dict[str, Any]:
    """Return the policy with which a Job fails as soon as one of its pods fails, for a reason that
    `_build_failure_policy` distinguishes."""
    codes = [FAILED, REFUSED, RESUMABLE]
    return {
        "rules": [
            {
                "action": "FailJob",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": codes},
            },
        ]
    }


def _build_replicated_job(
    config: Config, layout: JobLayout, index: int, name: str, labels: Mapping[str, str]
) -> dict[str, Any]:
    """Return the replicated job of a component: one Job with one pod per node.

    Args:
        config: The run's configuration.
        layout: Placement of the roles.
        index: Index of the component.
        name: Name of the JobSet.
        labels: Labels of the JobSet.
    """
    component = layout.components[index]
    pod_labels = {**labels, "app.kubernetes.io/component": component.role}
    pod_metadata = {
        "labels": pod_labels,
        **_without_empty(annotations=_as_text(config.cluster.kubernetes.annotations)),
    }
    return {
        "name": component.role,
        "replicas": 1,
        "template": {
            "metadata": {"labels": pod_labels},
            "spec": {
                "completionMode": "Indexed",
                "completions": component.nodes,
                "parallelism": component.nodes,
                # The supervisor restarts ranks. A lost pod ends the whole job.
                "backoffLimit": 0,
                "podFailurePolicy": _build_pod_failure_policy(),
                "template": {
                    "metadata": pod_metadata,
                    "spec": _build_pod(config, layout, index, name),
                },
            },
        },
    }


def _build_pod(config: Config, layout: JobLayout, index: int, name: str) -> dict[str, Any]:
    """Return the specification of the pods of a component. See `_build_replicated_job`."""
    kubernetes = config.cluster.kubernetes
    component = layout.components[index]
    role: KubernetesRoleConfig = getattr(kubernetes.roles, component.role)
    volumes: list[dict[str, Any]] = [
        {
            "name": "shared-memory",
            "emptyDir": {"medium": "Memory", "sizeLimit": _gib(kubernetes.shared_memory_gib)},
        }
    ]
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    for number, (claim, path, is_read_only) in enumerate(parse_volumes(config)):
        read_only = {"readOnly": True} if is_read_only else {}
        volumes.append(
            {
                "name": f"volume-{number}",
                "persistentVolumeClaim": {"claimName": claim, **read_only},
            }
        )
        mounts.append({"name": f"volume-{number}", "mountPath": path, **read_only})

    container = {
        "name": CONTAINER,
        "image": role.image or kubernetes.image,
        "command": _build_command(config),
        "workingDir": kubernetes.workdir or str(get_run_paths(config).root),
        "env": _build_environment(config, layout, index, name),
        **({} if index else {"ports": [{"name": "supervisor", "containerPort": kubernetes.port}]}),
        "resources": _build_resources(config, component),
        "volumeMounts": mounts,
        **_build_probes(config),
    }
    user = kubernetes.user
    security = {} if user is None else {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    account: dict[str, Any] = (
        # Code of environments and rewards in the pods gets no access to the cluster.
        {"automountServiceAccountToken": False}
        if kubernetes.service_account is None
        else {"serviceAccountName": kubernetes.service_account}
    )
    secrets = [{"name": secret} for secret in kubernetes.image_pull_secrets]
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": kubernetes.grace_s,
        "enableServiceLinks": False,
        **account,
        **_without_empty(
            priorityClassName=kubernetes.priority_class,
            nodeSelector=_as_text({**kubernetes.node_selector, **role.node_selector}),
            tolerations=kubernetes.tolerations,
            imagePullSecrets=secrets,
            securityContext=security,
        ),
        "containers": [container],
        "volumes": volumes,
    }


def parse_volumes(config: Config) -> list[tuple[str, str, bool]]:
    """Return the claim, the path and whether it is read-only, of each configured volume."""
    volumes = []
    for text in config.cluster.kubernetes.volumes:
        claim, _, rest = text.partition(":")
        path, _, mode = rest.partition(":")
        volumes.append((claim, path, mode == "ro"))
    return volumes


def _build_command(config: Config) -> list[str]:
    """Return the command of a pod, which runs the shell lines of the configuration first."""
    supervise = ["aligner", "supervise", str(get_run_paths(config).root)]
    setup = config.cluster.kubernetes.setup
    if not setup:
        return supervise
    # `exec` replaces the shell, so that the supervisor receives the signals to the container.
    return ["sh", "-ec", "\n".join([*setup, f"exec {shlex.join(supervise)}"])]


def _build_environment(
    config: Config, layout: JobLayout, index: int, name: str
) -> list[dict[str, Any]]:
    """Return the environment variables of the pods of a component.

    The supervisor sets the variables of ranks when it starts them, so that configured values, which
    may be secret, are not stored in the cluster.
    """
    # JobSet gives pods the host names JOBSET-REPLICATEDJOB-JOB-POD.SUBDOMAIN.
    nodes = [
        f"{name}-{component.role}-0-{node}.{name}"
        for component in layout.components
        for node in range(component.nodes)
    ]
    index_field = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    secrets = []
    for variable, reference in config.cluster.kubernetes.secrets.items():
        secret, _, key = str(reference).partition("/")
        secrets.append(
            {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        )
    return [
        {"name": NODES, "value": ",".join(nodes)},
        {"name": FIRST_NODE, "value": str(layout.get_first_node(index))},
        {"name": NODE_INDEX, "valueFrom": {"fieldRef": {"fieldPath": index_field}}},
        {"name": NODE_STATE, "value": _STATE_DIRECTORY},
        # Use one cache directory in all pods.
        {"name": "ALIGNER_CACHE", "value": str(get_cache_directory().absolute())},
        *secrets,
    ]


def _build_resources(config: Config, component: Component) -> dict[str, Any]:
    """Return the resources of each pod of a component."""
    kubernetes = config.cluster.kubernetes
    requests: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    if kubernetes.cpus is not None:
        # No limit: throttled ranks would delay all others.
        requests["cpu"] = f"{kubernetes.cpus:g}"
    if kubernetes.memory_gib is not None:
        requests["memory"] = limits["memory"] = _gib(kubernetes.memory_gib)
    if component.devices_per_node and kubernetes.gpu_resource is not None:
        extended = {kubernetes.gpu_resource: component.devices_per_node, **kubernetes.resources}
        # Extended resources require a limit equal to the request.
        requests |= _as_text(extended)
        limits |= _as_text(extended)
    return _without_empty(requests=requests, limits=limits)


def _build_probes(config: Config) -> dict[str, Any]:
    """Return the probes of a pod.

    They read the files of the node's agent, which asks the health endpoints of the servers in the
    pod. A server that is not healthy makes the pod not ready. Only an agent that hangs lets
    Kubernetes kill the pod, because the supervisor itself restarts failed ranks.
    """
    live = ["sh", "-c", _is_newer(f"{_STATE_DIRECTORY}/live", _LIVE_TIMEOUT_S)]
    ready = ["sh", "-c", _is_newer(f"{_STATE_DIRECTORY}/ready", _LIVE_TIMEOUT_S)]
    start_s = int(config.server.start_timeout_s)
    return {
        # The setup commands and the imports may take long.
        "startupProbe": {
            "exec": {"command": live},
            "periodSeconds": _PROBE_PERIOD_S,
            "failureThreshold": max(1, -(-start_s // _PROBE_PERIOD_S)),
        },
        "livenessProbe": {
            "exec": {"command": live},
            "periodSeconds": 3 * _PROBE_PERIOD_S,
            "timeoutSeconds": _PROBE_PERIOD_S,
            "failureThreshold": 3,
        },
        "readinessProbe": {
            "exec": {"command": ready},
            "periodSeconds": _PROBE_PERIOD_S,
            "timeoutSeconds": _PROBE_PERIOD_S,
        },
    }


def _is_newer(file: str, seconds: int) -> str:
    """Return a shell command that succeeds if a file was updated in the last seconds."""
    return f"test $(($(date +%s) - $(stat -c %Y {file}))) -lt {seconds}"


def _gib(amount: float) -> str:
    """Return an amount of memory as a quantity of Kubernetes."""
    # A quantity must not have more than three decimals.
    return f"{amount:g}Gi" if amount == int(amount) else f"{round(amount * 1024)}Mi"


def _as_text(values: Mapping[str, Any]) -> dict[str, str]:
    """Return a mapping with its values as text, which labels and annotations require."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in values.items()
    }


def _without_null(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _without_empty(**values: Any) -> dict[str, Any]:
    """Return the values that are neither None nor empty."""
    return {name: value for name, value in values.items() if value}
