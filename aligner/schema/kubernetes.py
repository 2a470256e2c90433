"""Keys of a run on Kubernetes: section `cluster.kubernetes`."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.critic import HAS_CRITIC
from aligner.schema.job_roles import NodeRoleConfig
from aligner.schema.options import option, section
from aligner.schema.reward import HAS_REWARD_SERVER
from aligner.schema.teacher import HAS_TEACHER

_IS_KUBERNETES = "cluster.kind=kubernetes"


@dataclass
class KubernetesRoleConfig(NodeRoleConfig):
    """Pods of this role. Null or empty values default to the values of `cluster.kubernetes`."""

    image: str | None = option(None, "Container image of the role's pods.")
    node_selector: dict[str, Any] = option(
        {}, "Node labels of the role, in addition to `cluster.kubernetes.node_selector`."
    )


@dataclass
class KubernetesRolesConfig:
    """Pods of each role, such as `cluster.kubernetes.roles.critic.nodes=2`."""

    trainer: KubernetesRoleConfig = section(KubernetesRoleConfig)
    generator: KubernetesRoleConfig = section(
        KubernetesRoleConfig, read_if=f"{_IS_KUBERNETES} and engine.placement=server"
    )
    critic: KubernetesRoleConfig = section(
        KubernetesRoleConfig, read_if=(_IS_KUBERNETES, HAS_CRITIC)
    )
    reward: KubernetesRoleConfig = section(
        KubernetesRoleConfig, read_if=(_IS_KUBERNETES, HAS_REWARD_SERVER)
    )
    teacher: KubernetesRoleConfig = section(
        KubernetesRoleConfig, read_if=(_IS_KUBERNETES, HAS_TEACHER)
    )


@dataclass
class KubernetesConfig:
    """JobSet of a run on Kubernetes. Each node of a role is one pod."""

    image: str | None = option(
        None, "Container image of the pods, in which `aligner` is installed. Required."
    )
    volumes: list[str] = option(
        [],
        "PersistentVolumeClaims as `CLAIM:PATH` or `CLAIM:PATH:ro`. The run directory, the cache,"
        " the models and the data must be on these volumes. The machine that launches the run must"
        " have them at the same paths.",
    )
    namespace: str | None = option(
        None, "Namespace of the JobSet; null means the current namespace of kubectl."
    )
    context: str | None = option(
        None, "Context of the kubeconfig file; null means the current context of kubectl."
    )
    gpu_resource: str | None = option(
        "nvidia.com/gpu",
        "Extended resource that requests GPUs. Null means pods without GPUs, for runs on CPUs.",
    )
    cpus: float | None = option(
        None, "CPUs that each pod requests; null means no request.", above=0
    )
    memory_gib: float | None = option(
        None,
        "Memory in GiB that each pod requests, which is also its limit. Must include"
        " `shared_memory_gib`. Null means neither a request nor a limit.",
        above=0,
    )
    shared_memory_gib: float = option(
        16.0,
        "Size in GiB of `/dev/shm` in each pod: a memory-backed emptyDir, which counts towards the"
        " pod's memory limit.",
        above=0,
    )
    resources: dict[str, Any] = option(
        {}, "Additional resources of each pod that has GPUs, such as `{rdma/ib: 1}`."
    )
    queue: str | None = option(
        None,
        "Name of the Kueue LocalQueue (label `kueue.x-k8s.io/queue-name`); null means that the"
        " JobSet is not queued by Kueue.",
    )
    priority_class: str | None = option(None, "PriorityClass of the pods.")
    node_selector: dict[str, Any] = option({}, "Labels that the nodes of the pods must have.")
    tolerations: list[Any] = option(
        [],
        "Tolerations of the pods, as in a pod specification, such as"
        " `[{key: nvidia.com/gpu, operator: Exists}]`.",
    )
    service_account: str | None = option(
        None,
        "ServiceAccount of the pods. Null means the default account, without its API token in the"
        " pods.",
    )
    image_pull_secrets: list[str] = option(
        [], "Names of the Secrets with the credentials of the image registry."
    )
    user: int | None = option(
        None,
        "User id and group id of the processes in the pods, and group of the volumes; null means"
        " the user of the image.",
        minimum=0,
    )
    labels: dict[str, Any] = option({}, "Additional labels of the JobSet and its pods.")
    annotations: dict[str, Any] = option({}, "Additional annotations of the JobSet and its pods.")
    secrets: dict[str, Any] = option(
        {},
        "Environment variables from Kubernetes Secrets, as `VARIABLE: SECRET/KEY`, such as"
        " `{WANDB_API_KEY: wandb/api-key}`. The JobSet refers to the Secrets and never contains"
        " their values.",
    )
    environment: dict[str, Any] = option(
        {},
        "Environment variables of every role. Their values are stored in the run directory and not"
        " in the JobSet.",
    )
    workdir: str | None = option(
        None, "Working directory in the pods; null means the run directory."
    )
    setup: list[str] = option([], "Shell lines that run first in each pod.")
    port: int = option(
        29400,
        "Port on the first pod of the trainer at which the supervisor accepts the connections of"
        " the other pods.",
        minimum=1024,
        maximum=65535,
    )
    grace_s: int = option(
        300,
        "Seconds between SIGTERM and SIGKILL when a pod is preempted, evicted or deleted"
        " (`terminationGracePeriodSeconds`), in which the run saves a checkpoint. Must be longer"
        " than the duration of a step plus a checkpoint.",
        minimum=1,
    )
    requeue: bool = option(
        True,
        "Whether the JobSet is restarted after a preemption, an eviction or a lost pod. The run"
        " resumes from its last checkpoint.",
    )
    max_restarts: int = option(
        10,
        "Maximum number of restarts of the JobSet because pods were killed, for example for lack of"
        " memory. Restarts after disruptions and stop requests are not counted.",
        minimum=0,
        read_if="cluster.kubernetes.requeue=true",
    )
    roles: KubernetesRolesConfig = section(KubernetesRolesConfig)
