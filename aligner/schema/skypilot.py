"""Keys of a run as a SkyPilot task: section `cluster.skypilot`."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.critic import HAS_CRITIC
from aligner.schema.job_roles import NodeRoleConfig
from aligner.schema.options import option, section
from aligner.schema.reward import HAS_REWARD_SERVER
from aligner.schema.teacher import HAS_TEACHER

_IS_SKYPILOT = "cluster.kind=skypilot"


@dataclass
class SkyPilotRolesConfig:
    """Nodes of each role, such as `cluster.skypilot.roles.reward.shares_nodes_with=trainer`."""

    trainer: NodeRoleConfig = section(NodeRoleConfig)
    generator: NodeRoleConfig = section(
        NodeRoleConfig, read_if=f"{_IS_SKYPILOT} and engine.placement=server"
    )
    critic: NodeRoleConfig = section(NodeRoleConfig, read_if=(_IS_SKYPILOT, HAS_CRITIC))
    reward: NodeRoleConfig = section(NodeRoleConfig, read_if=(_IS_SKYPILOT, HAS_REWARD_SERVER))
    teacher: NodeRoleConfig = section(NodeRoleConfig, read_if=(_IS_SKYPILOT, HAS_TEACHER))


@dataclass
class SkyPilotConfig:
    """SkyPilot task of a run. All nodes of the task have the same resources."""

    infra: str | None = option(
        None,
        "Infrastructure as `CLOUD[/REGION[/ZONE]]`, such as `aws/us-east-1` or `kubernetes`; null"
        " means that SkyPilot chooses it.",
    )
    accelerator: str | None = option(
        None,
        "Type of the GPUs, such as `H100`; the number per node follows from the placement of the"
        " roles. Null means nodes without GPUs.",
    )
    image: str | None = option(
        None, "Image of the nodes (`image_id`), such as `docker:REGISTRY/NAME:TAG`."
    )
    cpus: str | None = option(None, "CPUs of each node, such as `8` or `8+`.")
    memory_gib: str | None = option(None, "Memory of each node in GiB, such as `64` or `64+`.")
    use_spot: bool = option(False, "Whether the nodes are spot instances.")
    volumes: dict[str, Any] = option(
        {},
        "SkyPilot volumes as `PATH: VOLUME`. The run directory, the cache, the models and the data"
        " must be on a volume that all nodes share.",
    )
    secrets: list[str] = option(
        [],
        "Names of environment variables with secrets. SkyPilot reads their values from the"
        " environment of `aligner launch`; the task file contains only the names.",
    )
    environment: dict[str, Any] = option(
        {},
        "Environment variables of every role. Their values are stored in the run directory and not"
        " in the task file.",
    )
    setup: list[str] = option([], "Shell lines that run once on each node, before the run starts.")
    port: int = option(
        29400,
        "Port on the first node at which the supervisor accepts the connections of the other"
        " nodes.",
        minimum=1024,
        maximum=65535,
    )
    requeue: bool = option(
        True,
        "Whether SkyPilot starts the task again after a preemption. The run resumes from its last"
        " checkpoint.",
    )
    roles: SkyPilotRolesConfig = section(SkyPilotRolesConfig)
