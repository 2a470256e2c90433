"""What each rank is started with, its command and its environment, and what it takes from that when
it starts."""

import contextlib
import http.client
import os
import random
import secrets
import socket
import sys
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from aligner.errors import AlignerError
from aligner.launcher.processes import end_with_launcher
from aligner.launcher.rank_heartbeat import IS_TASK
from aligner.paths import OPENMP_WAITS
from aligner.placement.addresses import (
    LOOPBACK,
    WORLD_SECRET,
    Endpoint,
    client_address,
    explicit_ports,
    group_ports,
    interface_address,
    port_is_free,
)
from aligner.placement.roles import server_ranks
from aligner.placement.tls import tls_files
from aligner.schema import Config

PORTS = range(20000, 32000)
"""Below those that the kernel gives to outgoing connections: such a one would often be gone before
a server has started."""
SERVED_MODELS = {
    "generator": "generate",
    "critic": "critic_infer",
    "reward": "reward_model",
    "teacher": "teacher_logprobs",
}
"""By role, the Triton model that must be ready for a server to be healthy."""


class FreePorts(contextlib.ExitStack):
    """Iterator over distinct ports, those of `candidates` that are free on all of `addresses`, in
    random order.

    A port is claimed until its server listens, by an abstract Unix socket that bears its number: no
    other FreePorts in this network namespace gives it. Claims end with `close`, the `with` block or
    the process, however it ends.
    """

    def __init__(
        self, addresses: Iterable[str] = (LOOPBACK,), candidates: Collection[int] = PORTS
    ) -> None:
        super().__init__()
        self._addresses = frozenset(addresses)
        self._candidates = list(candidates)
        random.SystemRandom().shuffle(self._candidates)

    def __iter__(self) -> "FreePorts":
        return self

    def __next__(self) -> int:
        """The next port. Raises AlignerError when there is none, and OSError for an address that
        this machine lacks."""
        while self._candidates:
            port = self._candidates.pop()
            if self._claim(port) and all(
                port_is_free(address, port) for address in self._addresses
            ):
                return port
        raise AlignerError(f"no free port left on {' and '.join(sorted(self._addresses))}")

    def _claim(self, port: int) -> bool:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0aligner-port-{port}")
        except OSError:
            claim.close()
            return False
        self.enter_context(claim)
        return True


def free_ports(config: Config, candidates: Iterable[int] = PORTS) -> FreePorts:
    """Ports that are free where the servers listen and, for process groups, on loopback; none that
    is configured."""
    addresses = {interface_address(config.server.interface), LOOPBACK}
    return FreePorts(addresses, set(candidates).difference(explicit_ports(config).values()))


def local_hosts(config: Config) -> dict[str, str]:
    """Where each server group is reached when all run on this machine."""
    return dict.fromkeys(server_ranks(config), client_address(config))


def pick_endpoints(
    config: Config, hosts: Mapping[str, str], ports: Iterator[int]
) -> dict[str, Endpoint]:
    """Where each server group listens, on its host: the configured ports, free ones for those left
    at 0."""
    return {
        group: Endpoint(
            hosts[group],
            *(port or next(ports) for port in (wanted.http, wanted.grpc, wanted.metrics)),
        )
        for group, wanted in group_ports(config).items()
    }


def is_healthy(config: Config, group: str, endpoint: Endpoint, timeout_s: float = 0.3) -> bool:
    """Whether the Triton server there, and the model that the group serves, answer that they are
    ready."""
    role = group.partition(".")[0]
    tls = tls_files(config)
    # a server is never behind a proxy
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    try:
        if tls is not None:
            handlers.append(urllib.request.HTTPSHandler(context=tls.client_context()))
        opener = urllib.request.build_opener(*handlers)
        for path in ("health/ready", f"models/{SERVED_MODELS[role]}/ready"):
            url = (
                f"{'http' if tls is None else 'https'}://{endpoint.host}:{endpoint.http}/v2/{path}"
            )
            with opener.open(url, timeout=timeout_s) as answer:
                if answer.status != 200:
                    return False
    except (http.client.HTTPException, OSError):
        return False
    return True


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
