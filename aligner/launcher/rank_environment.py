"""What each rank is started with, its command and its environment, and what it takes from that when
it starts."""

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from aligner.environment_variables import OPENMP_WAITS
from aligner.errors import AlignerError
from aligner.launcher.processes import end_with_launcher
from aligner.launcher.rank_heartbeat import IS_TASK
from aligner.placement.addresses import WORLD_SECRET

Command = Callable[[str, Path], tuple[str, ...]]
"""From a role, or a server group, and the run's config file to the command of its ranks."""
DEVICES = "ALIGNER_DEVICES"
"""Which of the devices that Slurm gives a step are its role's, by their places; all of them where
it is not set."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ALLOCATOR = (
    f"glibc.malloc.mmap_threshold={4 << 30}",
    f"glibc.malloc.trim_threshold={16 << 30}",
    "glibc.malloc.hugetlb=1",
)
"""Large temporary tensors come from the heap and stay there, in pages of 2 MiB where the machine
has them: given back and mapped anew for every micro-batch, their pages are zeroed by the kernel
each time."""


def role_command(
    role: str, config_file: Path, program: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """The command of a role's or a server group's ranks; `prepare` is a role too. `program` is this
    one if not given."""
    actions = {"prepare": ("prepare",), "trainer": ("train",)}
    action = actions.get(role, ("serve", f"role={role}"))
    return (*(program or (sys.executable, "-m", "aligner")), *action, "--config", str(config_file))


def world_environment(
    ranks: int, ranks_per_node: int, master: str, master_port: int, threads: int
) -> dict[str, str]:
    """What all ranks of a role have in common."""
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(master_port),
        WORLD_SECRET: secrets.token_hex(16),
        **library_environment(threads),
    }


def library_environment(threads: int) -> dict[str, str]:
    """What libraries read when they are loaded or imported, so that it must be there by then."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        **OPENMP_WAITS,
        # The few kernels that torch.compile makes on GPUs are not worth a pool of processes to each
        # rank.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # A server that ends is news to who watches it; gRPC would also write a line of its own into
        # its clients' logs.
        "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "ERROR"),
        "GLIBC_TUNABLES": ":".join(_ALLOCATOR),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def adopt_environment() -> None:
    """Tie a rank to its launcher's life; a task of a Slurm job's step takes its rank and its role's
    devices from Slurm.

    Raises AlignerError where the step has not got the devices that are its role's.
    """
    end_with_launcher()
    if not os.environ.get(IS_TASK):
        return
    os.environ["RANK"], os.environ["LOCAL_RANK"] = (
        os.environ["SLURM_PROCID"],
        os.environ["SLURM_LOCALID"],
    )
    if chosen := os.environ.pop(DEVICES, ""):
        # Chosen here: what srun is started with Slurm replaces by all that the job has on the node.
        if (given := os.environ.get(_VISIBLE)) is not None:  # Slurm counts devices here
            names, places = given.split(","), [int(place) for place in chosen.split(",")]
            if max(places) >= len(names):
                raise AlignerError(
                    f"cluster.slurm.roles.ROLE.devices: this role uses devices {chosen} of its"
                    f" node, but Slurm gave its job step only {_VISIBLE}={given}; correct"
                    " cluster.devices_per_node or cluster.slurm.roles.ROLE.devices"
                )
            chosen = ",".join(names[place] for place in places)
        os.environ[_VISIBLE] = chosen
