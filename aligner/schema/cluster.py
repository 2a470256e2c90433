"""Keys of the placement of roles on this machine or on a cluster: section `cluster`."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.critic import HAS_CRITIC
from aligner.schema.job_roles import NodeRoleConfig
from aligner.schema.kubernetes import KubernetesConfig
from aligner.schema.options import option, section
from aligner.schema.reward import HAS_REWARD_SERVER
from aligner.schema.skypilot import SkyPilotConfig
from aligner.schema.teacher import HAS_TEACHER


@dataclass
class SlurmRoleConfig(NodeRoleConfig):
    """Placement of this role in the Slurm job. Null or empty values default to the values of
    `cluster.slurm`."""

    partition: str | None = option(None, "Slurm partition of the role's nodes.")
    constraint: str | None = option(None, "Required node features (`sbatch --constraint`).")
    image: str | None = option(None, "Container image or OCI bundle of the role.")
    sbatch: list[str] = option(
        [], "Additional sbatch flags of the role's job component, such as `--exclusive`."
    )
    srun: list[str] = option([], "Additional srun flags of the role.")


@dataclass
class SlurmRolesConfig:
    """Placement of each role, such as `cluster.slurm.roles.critic.nodes=2`."""

    trainer: SlurmRoleConfig = section(SlurmRoleConfig)
    generator: SlurmRoleConfig = section(
        SlurmRoleConfig, read_if="cluster.kind=slurm and engine.placement=server"
    )
    critic: SlurmRoleConfig = section(SlurmRoleConfig, read_if=("cluster.kind=slurm", HAS_CRITIC))
    reward: SlurmRoleConfig = section(
        SlurmRoleConfig, read_if=("cluster.kind=slurm", HAS_REWARD_SERVER)
    )
    teacher: SlurmRoleConfig = section(SlurmRoleConfig, read_if=("cluster.kind=slurm", HAS_TEACHER))


@dataclass
class SlurmConfig:
    """Slurm job."""

    account: str | None = option(None, "Slurm account of the job (`sbatch --account`).")
    partition: str | None = option(None, "Slurm partition of the job (`sbatch --partition`).")
    qos: str | None = option(None, "Quality of service (`sbatch --qos`).")
    reservation: str | None = option(None, "Slurm reservation (`sbatch --reservation`).")
    constraint: str | None = option(None, "Required node features (`sbatch --constraint`).")
    time: str | None = option(
        None, "Time limit (`sbatch --time`): minutes, `HH:MM:SS` or `D-HH:MM:SS`."
    )
    heterogeneous: bool = option(
        True,
        "Whether the job is heterogeneous: one component per role, with separate nodes,"
        " partition and flags for each component. False means a single component, for clusters"
        " without heterogeneous jobs.",
    )
    gpus: str = option(
        "gpus-per-node",
        "Slurm flag that requests devices. `gpus-per-node`: `--gpus-per-node=N`; `gres`:"
        " `--gres=gpu:N`; `none`: no flag, for CPUs or whole nodes.",
        choices=("gpus-per-node", "gres", "none"),
    )
    image: str | None = option(
        None,
        "Container image: for Pyxis a registry name or the path of a `.sqsh` file, for"
        " `container_runtime=oci` the directory of an OCI bundle. Null means no container.",
    )
    container_runtime: str = option(
        "pyxis",
        "How Slurm starts containers. `pyxis`: the flags of the plugin Pyxis; `oci`:"
        " `srun --container`, with the OCI runtime of the cluster's `oci.conf`.",
        choices=("pyxis", "oci"),
    )
    mounts: list[str] = option(
        [],
        "Container mounts as `SOURCE:TARGET[:FLAGS]`; the run directory and the cache are always"
        " mounted.",
    )
    workdir: str | None = option(
        None, "Working directory in the container; null means the run directory."
    )
    mount_home: bool = option(
        False, "Whether the user's home directory is mounted in the container."
    )
    setup: list[str] = option([], "Shell lines that run first in the job, such as `module load`.")
    environment: dict[str, Any] = option({}, "Environment variables of every role.")
    sbatch: list[str] = option(
        [], "Additional sbatch flags, such as `--exclusive` or `--comment=text`."
    )
    srun: list[str] = option([], "Additional srun flags of every role, such as `--mpi=none`.")
    grace_s: int = option(
        300,
        "Number of seconds before the time limit at which Slurm signals the run to save a"
        " checkpoint and stop. Must be longer than the duration of a step plus a checkpoint.",
        minimum=1,
    )
    requeue: bool = option(
        True,
        "Whether the job is requeued after it stops because of the time limit or a preemption."
        " The run resumes when the job starts again.",
    )
    roles: SlurmRolesConfig = section(SlurmRolesConfig)


@dataclass
class LocalDevicesConfig:
    """GPUs of this machine for the ranks of each role, such as `0-3`, or `0-1,6` in quotes;
    roles may share GPUs."""

    trainer: str | None = option(None, "GPUs of the trainer; null means the first free GPUs.")
    generator: str | None = option(
        None,
        "GPUs of the generator; null means the next free GPUs.",
        read_if="engine.placement=server",
    )
    critic: str | None = option(
        None, "GPUs of the critic; null means the next free GPUs.", read_if=HAS_CRITIC
    )
    reward: str | None = option(
        None,
        "GPUs of a reward model, assigned to its replicas in order; null means the next free GPUs.",
        read_if=HAS_REWARD_SERVER,
    )
    teacher: str | None = option(
        None,
        "GPUs of the teacher, assigned to its replicas in order; null means the next free GPUs.",
        read_if=HAS_TEACHER,
    )


@dataclass
class ClusterConfig:
    """Machines, devices and process timeouts of the roles."""

    kind: str = option(
        "local",
        "Where the roles run. `local`: on this machine; `slurm`: in a Slurm job; `kubernetes`: in"
        " the pods of a JobSet; `skypilot`: on the nodes of a SkyPilot task.",
        choices=("local", "slurm", "kubernetes", "skypilot"),
    )
    devices_per_node: int = option(
        8,
        "Number of GPUs per node, or number of ranks per node without GPUs.",
        minimum=1,
        read_if=".kind!=local or .device_memory_gib!=null",
    )
    device_memory_gib: float | None = option(
        None,
        "Memory of one device in GiB. A configuration with a higher memory estimate is an"
        " error. Null means that the estimate is only printed.",
        minimum=1,
    )
    devices: LocalDevicesConfig = section(LocalDevicesConfig, read_if="cluster.kind=local")
    threads_per_rank: int | None = option(
        None,
        "Number of OpenMP threads per rank. Null means 1 on GPUs (unless"
        " `*.optimizer.offload_fraction` is above 0), 1 with `engine.exact=true`, and otherwise"
        " the number of cores divided by the number of ranks.",
        minimum=1,
    )
    deterministic: bool = option(
        False,
        "Whether GPUs use deterministic reductions (kernels, cuBLAS, NCCL), which are slower."
        " Has no effect on CPUs, where reductions are always deterministic.",
    )
    stop_timeout_s: float = option(
        10.0,
        "Maximum time in seconds for a role to stop. A role that is still running after this"
        " time is killed.",
        minimum=1,
    )
    heartbeat_timeout_s: float = option(
        300.0,
        "Heartbeat timeout in seconds, from the start of the process. A trainer rank without a"
        " heartbeat for this time is killed and handled like a crashed rank (see"
        " `run.max_restarts`). Also applies to the process that prepares the model and checks the"
        " data.",
        minimum=1,
    )
    collective_timeout_s: float = option(
        600.0,
        "Timeout of a collective operation in seconds. After a timeout, the operation fails with"
        " an error that names the missing rank, and the role is restarted (see"
        " `run.max_restarts` and `server.max_restarts`).",
        minimum=1,
    )
    slurm: SlurmConfig = section(SlurmConfig, read_if="cluster.kind=slurm")
    kubernetes: KubernetesConfig = section(KubernetesConfig, read_if="cluster.kind=kubernetes")
    skypilot: SkyPilotConfig = section(SkyPilotConfig, read_if="cluster.kind=skypilot")

    @property
    def job(self) -> SlurmConfig | KubernetesConfig | SkyPilotConfig:
        """Settings of the job of a run that does not run on this machine."""
        sections: dict[str, SlurmConfig | KubernetesConfig | SkyPilotConfig] = {
            "slurm": self.slurm,
            "kubernetes": self.kubernetes,
            "skypilot": self.skypilot,
        }
        return sections[self.kind]

    @property
    def is_requeued(self) -> bool:
        """Whether the cluster starts the run again after a preemption."""
        return self.kind != "local" and self.job.requeue
