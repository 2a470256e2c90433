"""Where the roles run: this machine, or nodes of a Slurm cluster."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.critic import TRAINED
from aligner.schema.options import option, section
from aligner.schema.reward import OWN_SERVER
from aligner.schema.teacher import HAS_TEACHER


@dataclass
class SlurmRoleConfig:
    """Where one role runs in the Slurm job; what is null or empty here is as for all roles
    (cluster.slurm)."""

    nodes: int | None = option(
        None,
        "nodes of its own; as many as its ranks need at cluster.devices_per_node a node when null",
        minimum=1,
    )
    beside: str | None = option(
        None,
        "role on whose nodes it runs, on devices of its own",
        choices=("trainer", "generator", "critic", "reward", "teacher"),
    )
    devices: str | None = option(
        None,
        "devices of a node that its ranks use, such as 0-3, or 0-1,6 in quotes: for roles that"
        " share nodes; all if null",
    )
    partition: str | None = option(None, "partition of its nodes")
    constraint: str | None = option(
        None, "features that its nodes must have, as sbatch --constraint"
    )
    image: str | None = option(None, "container image")
    environment: dict[str, Any] = option({}, "environment variables, beside those of all roles")
    sbatch: list[str] = option([], "further sbatch flags of its component, such as --exclusive")
    srun: list[str] = option([], "further srun flags")


@dataclass
class SlurmRolesConfig:
    """The roles' own places (`cluster.slurm.roles.critic.nodes=2`)."""

    trainer: SlurmRoleConfig = section(SlurmRoleConfig)
    generator: SlurmRoleConfig = section(
        SlurmRoleConfig, read="cluster.kind=slurm and engine.placement=server"
    )
    critic: SlurmRoleConfig = section(SlurmRoleConfig, read=("cluster.kind=slurm", TRAINED))
    reward: SlurmRoleConfig = section(SlurmRoleConfig, read=("cluster.kind=slurm", OWN_SERVER))
    teacher: SlurmRoleConfig = section(SlurmRoleConfig, read=("cluster.kind=slurm", HAS_TEACHER))


@dataclass
class SlurmConfig:
    """The Slurm job (cluster.kind=slurm)."""

    account: str | None = option(None, "account that is charged, as sbatch --account")
    partition: str | None = option(None, "partition, as sbatch --partition")
    qos: str | None = option(None, "quality of service, as sbatch --qos")
    reservation: str | None = option(None, "reservation, as sbatch --reservation")
    constraint: str | None = option(None, "features that nodes must have, as sbatch --constraint")
    time: str | None = option(None, "time limit, as sbatch --time: minutes, HH:MM:SS or D-HH:MM:SS")
    heterogeneous: bool = option(
        True,
        "a component a role, each with nodes, partition and flags of its own; false: one component"
        " for clusters without",
    )
    gpus: str = option(
        "gpus-per-node",
        "how devices are asked for: --gpus-per-node=N, --gres=gpu:N, or not at all (none: CPUs, or"
        " whole nodes alone)",
        choices=("gpus-per-node", "gres", "none"),
    )
    image: str | None = option(
        None,
        "container image, as Pyxis takes it: a registry's name or the path of a .sqsh file; no"
        " container when null",
    )
    mounts: list[str] = option(
        [],
        "SOURCE:TARGET[:FLAGS] seen in the container; the run directory and the cache always are",
    )
    workdir: str | None = option(
        None, "working directory in the container; the run directory when null"
    )
    mount_home: bool = option(False, "see the user's home directory in the container")
    setup: list[str] = option([], "shell lines that run first in the job, such as module load")
    environment: dict[str, Any] = option({}, "environment variables of every role")
    sbatch: list[str] = option([], "further sbatch flags, such as --exclusive or --comment=text")
    srun: list[str] = option([], "further srun flags of every role, such as --mpi=none")
    grace_s: int = option(
        300,
        "so long before the time limit, or the end that a preemption sets, the run takes a"
        " checkpoint and stops",
        minimum=1,
    )
    requeue: bool = option(
        True, "a run that stopped so is queued again, and resumes when it starts"
    )
    roles: SlurmRolesConfig = section(SlurmRolesConfig)


@dataclass
class LocalDevicesConfig:
    """GPUs of this machine for each role's ranks, where it has some: 0-3, or 0-1,6 in quotes. Roles
    may name the same ones."""

    trainer: str | None = option(None, "the trainer's; the first free ones when null")
    generator: str | None = option(
        None, "the generator's; the next free ones when null", read="engine.placement=server"
    )
    critic: str | None = option(None, "the critic's; the next free ones when null", read=TRAINED)
    reward: str | None = option(
        None,
        "of a reward model, for its replicas in turn; the next free ones when null",
        read=OWN_SERVER,
    )
    teacher: str | None = option(
        None,
        "the teacher's, for its replicas in turn; the next free ones when null",
        read=HAS_TEACHER,
    )


@dataclass
class ClusterConfig:
    """Where the roles run."""

    kind: str = option(
        "local", "local: on this machine; slurm: as a Slurm job", choices=("local", "slurm")
    )
    devices_per_node: int = option(
        8,
        "GPUs of a node, or ranks a node takes where there are none",
        minimum=1,
        read=".kind=slurm or .device_memory_gib!=null",
    )
    device_memory_gib: float | None = option(
        None, "memory of a device: what does not fit is refused; only told when null", minimum=1
    )
    devices: LocalDevicesConfig = section(LocalDevicesConfig, read="cluster.kind=local")
    threads_per_rank: int | None = option(
        None,
        "OpenMP threads a rank; null: one on GPUs, unless *.optimizer.offload_fraction is above 0;"
        " else cores over ranks",
        minimum=1,
    )
    deterministic: bool = option(
        False,
        "GPUs sum in one order, more slowly: kernels, cuBLAS, NCCL; on CPUs nothing changes, sums"
        " have one there",
    )
    stop_timeout_s: float = option(
        10.0, "a role that has not ended by itself by then is killed", minimum=1
    )
    heartbeat_timeout_s: float = option(
        300.0,
        "a trainer rank that shows no life for so long, as one that is stopped, is killed: the run"
        " fails",
        minimum=1,
    )
    collective_timeout_s: float = option(
        600.0,
        "a collective that takes longer fails, and the run with the missing rank's name",
        minimum=1,
    )
    slurm: SlurmConfig = section(SlurmConfig, read="cluster.kind=slurm")
