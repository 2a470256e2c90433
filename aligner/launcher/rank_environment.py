"""The command, the environment variables and the ports with which each rank is started.

The module also contains `adopt_environment`, which a rank calls when it starts, and the health
check of servers.
"""

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

from aligner.errors import AlignerError, ConfigError
from aligner.launcher.processes import terminate_with_launcher
from aligner.launcher.rank_heartbeat import IS_TASK
from aligner.paths import OPENMP_ENVIRONMENT, get_run_paths
from aligner.placement.addresses import (
    LOOPBACK,
    WORLD_SECRET,
    Endpoint,
    get_client_address,
    get_configured_ports,
    get_group_ports,
    get_interface_address,
    is_port_free,
)
from aligner.placement.roles import count_server_ranks
from aligner.placement.tls import get_tls_files
from aligner.schema import Config
from aligner.triton_cleanup import find_health_socket
from aligner.version import __version__

# Ports below the kernel's range for outgoing connections. An outgoing connection could occupy a
# port of the kernel's range before a server listens on the port.
PORTS = range(20000, 32000)
SERVED_MODELS = {
    "generator": "generate",
    "critic": "critic_infer",
    "reward": "reward_model",
    "teacher": "teacher_logprobs",
}
"""Name of the Triton model of each role. A server is healthy only if this model is ready."""


class FreePorts(contextlib.ExitStack):
    """Iterator over distinct free ports, in random order.

    A port must be free on all addresses. It stays reserved until its server listens: an abstract
    Unix socket with the port's number excludes all other `FreePorts` objects in this network
    namespace. Reservations end with `close`, with the `with` block, or with the process.

    Example:
        ```
        with FreePorts() as ports:
            endpoint = Endpoint("127.0.0.1", next(ports), next(ports), next(ports))
        ```
    """

    def __init__(
        self, addresses: Iterable[str] = (LOOPBACK,), candidates: Collection[int] = PORTS
    ) -> None:
        """Create an iterator without any reservation.

        Args:
            addresses: Addresses on which the ports must be free.
            candidates: Ports to try.
        """
        super().__init__()
        self._addresses = frozenset(addresses)
        self._candidates = list(candidates)
        random.SystemRandom().shuffle(self._candidates)

    def __iter__(self) -> "FreePorts":
        return self

    def __next__(self) -> int:
        """Reserve and return the next port.

        Raises:
            AlignerError: No candidate is free.
            OSError: This machine lacks one of the addresses.
        """
        while self._candidates:
            port = self._candidates.pop()
            if self._claim(port) and all(
                is_port_free(address, port) for address in self._addresses
            ):
                return port
        raise AlignerError(f"no free port left on {' and '.join(sorted(self._addresses))}")

    def _claim(self, port: int) -> bool:
        """Return whether this object could reserve the port by binding its Unix socket."""
        claim = socket.socket(socket.AF_UNIX)
        # The leading null byte makes the name abstract: the kernel removes the name with the
        # socket.
        try:
            claim.bind(f"\0aligner-port-{port}")
        except OSError:
            claim.close()
            return False
        self.enter_context(claim)
        return True


def reserve_free_ports(config: Config, candidates: Iterable[int] = PORTS) -> FreePorts:
    """Return an iterator over ports for the servers and process groups of a run.

    The ports are free on the servers' interface and on loopback. Configured ports are excluded.
    """
    addresses = {get_interface_address(config.server.interface), LOOPBACK}
    return FreePorts(addresses, set(candidates).difference(get_configured_ports(config).values()))


def local_hosts(config: Config) -> dict[str, str]:
    """Return the address of each server group when all groups run on this machine."""
    return dict.fromkeys(count_server_ranks(config), get_client_address(config))


def pick_endpoints(
    config: Config, hosts: Mapping[str, str], ports: Iterator[int]
) -> dict[str, Endpoint]:
    """Return the address and ports of each server group.

    Args:
        config: The run's configuration. Ports with the value 0 are chosen automatically.
        hosts: Address of each server group.
        ports: Free ports.
    """
    return {
        group: Endpoint(
            hosts[group],
            *(
                port or next(ports)
                for port in (configured.http, configured.grpc, configured.metrics)
            ),
        )
        for group, configured in get_group_ports(config).items()
    }


def build_server_opener(config: Config) -> urllib.request.OpenerDirector:
    """Return an object that opens URLs of a run's servers (`get_server_url`).

    Raises:
        OSError: The run's certificate cannot be read.
    """
    # Ignore proxies of the environment: the servers of a run are never behind one.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    tls = get_tls_files(config)
    if tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=tls.client_context()))
    return urllib.request.build_opener(*handlers)


def get_server_url(config: Config, endpoint: Endpoint, path: str) -> str:
    """Return the URL of a path below `/v2/` of a Triton server."""
    scheme = "http" if get_tls_files(config) is None else "https"
    return f"{scheme}://{endpoint.host}:{endpoint.http}/v2/{path}"


def _get_ready_paths(group: str) -> tuple[str, str]:
    """Return the paths of the health checks of a Triton server and of the model of its role."""
    return "health/ready", f"models/{SERVED_MODELS[group.partition('.')[0]]}/ready"


def is_healthy(config: Config, group: str, endpoint: Endpoint, timeout_s: float = 0.3) -> bool:
    """Return whether a Triton server and the model of its role report that they are ready.

    Args:
        config: The run's configuration, for its TLS files.
        group: Server group.
        endpoint: Address and ports of the server.
        timeout_s: Timeout of each of the two HTTP requests, in seconds.
    """
    try:
        opener = build_server_opener(config)
        for path in _get_ready_paths(group):
            url = get_server_url(config, endpoint, path)
            with opener.open(url, timeout=timeout_s) as response:
                if response.status != 200:
                    return False
    except (http.client.HTTPException, OSError):
        return False
    return True


class _UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """See the base class."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def is_own_server_healthy(config: Config, group: str, endpoint: Endpoint, timeout_s: float) -> bool:
    """Return whether the Triton server of this process and the model of its role are ready.

    The request uses a Unix socket that only this user can open. Clients cannot delay it, however
    many connections they have. A process that has not started Triton is checked like the server of
    another process.

    Args:
        config: See `is_healthy`, like the other arguments.
        group: Server group of this process.
        endpoint: Address and ports of the server.
        timeout_s: Timeout of each of the two requests, in seconds.
    """
    path = find_health_socket()
    if path is None:
        return is_healthy(config, group, endpoint, timeout_s)
    try:
        for name in _get_ready_paths(group):
            with contextlib.closing(_UnixConnection(path, timeout_s)) as connection:
                connection.request("GET", f"/v2/{name}")
                if connection.getresponse().status != 200:
                    return False
    except (http.client.HTTPException, OSError):
        return False
    return True


CommandBuilder = Callable[[str, Config], tuple[str, ...]]
"""Function that returns the command of the ranks of a role or server group, from the role and the
run's configuration."""
DEVICES = "ALIGNER_DEVICES"
"""Environment variable with the indices of a role's devices within its Slurm step or node; if it is
unset, the role uses all devices of the step or node.
"""
VERSION = "ALIGNER_VERSION"
"""Environment variable with the release of aligner that starts the ranks of a run."""
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# Allocate large temporary tensors on the heap, keep their memory, and use pages of 2 MiB if the
# machine has them. By default, glibc would unmap the memory after every micro-batch, and the kernel
# would zero the pages of each new mapping.
_MALLOC_TUNABLES = (
    f"glibc.malloc.mmap_threshold={4 << 30}",
    f"glibc.malloc.trim_threshold={16 << 30}",
    "glibc.malloc.hugetlb=1",
)


def build_role_command(
    role: str, config: Config, program: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """Return the command of the ranks of a role or server group.

    Args:
        role: Role or server group; `prepare` is a role, too.
        config: The run's configuration.
        program: Beginning of the command; None uses `python -m aligner` of this Python environment.
            For the roles that host servers, `server.python` has precedence.
    """
    program = program or (sys.executable, "-m", "aligner")
    actions = {"prepare": ("prepare",), "trainer": ("train",)}
    action = actions.get(role, ("serve", f"role={role}"))
    if role not in actions and config.server.python is not None:
        program = (config.server.python, "-m", "aligner")
    return (*program, *action, "--config", str(get_run_paths(config).config))


def world_environment(
    ranks: int, ranks_per_node: int, master: str, master_port: int, threads: int
) -> dict[str, str]:
    """Return the environment variables that all ranks of a role have in common.

    Args:
        ranks: Number of ranks.
        ranks_per_node: Number of ranks on each node.
        master: Address of rank 0.
        master_port: Port of the process group's store on rank 0.
        threads: CPU threads per rank.
    """
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(master_port),
        WORLD_SECRET: secrets.token_hex(16),
        VERSION: __version__,
        **library_environment(threads),
    }


def library_environment(threads: int) -> dict[str, str]:
    """Return the environment variables that libraries read when they are loaded or imported."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        **OPENMP_ENVIRONMENT,
        # torch.compile generates few kernels here, which do not justify a process pool per rank.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # The supervisor reports the exit of a server. Messages of gRPC about lost connections in
        # the clients' logs would be redundant.
        "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "ERROR"),
        "GLIBC_TUNABLES": ":".join(_MALLOC_TUNABLES),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def adopt_environment() -> None:
    """Make this rank end when its launcher ends, and set up the environment of a rank in a job.

    A task of a Slurm job step reads its rank from Slurm's environment variables. A rank whose role
    uses some devices of its node restricts itself to them.

    Raises:
        AlignerError: The node lacks devices of the role.
        ConfigError: This process runs another release of aligner than the launcher.
    """
    terminate_with_launcher()
    if (launcher_version := os.environ.get(VERSION, __version__)) != __version__:
        raise ConfigError(
            f"{sys.executable}: aligner {__version__} is installed in this environment or image,"
            f" but aligner {launcher_version} has started the run; install the same release for"
            " all roles"
        )
    is_task = bool(os.environ.get(IS_TASK))
    if is_task:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
    if devices := os.environ.pop(DEVICES, ""):
        # The rank itself restricts its devices. Slurm would overwrite this variable in the
        # environment of srun with all devices of the job on the node.
        if (
            step_devices := os.environ.get(_VISIBLE_DEVICES)
        ) is not None:  # the cluster manages the devices
            names = step_devices.split(",")
            indices = [int(index) for index in devices.split(",")]
            if max(indices) >= len(names):
                source = "Slurm gave its job step only" if is_task else "its node has only"
                raise AlignerError(
                    f"roles.ROLE.devices: this role uses devices {devices} of its node, but"
                    f" {source} {_VISIBLE_DEVICES}={step_devices}; correct"
                    " cluster.devices_per_node or the key roles.ROLE.devices of the section of the"
                    " cluster"
                )
            devices = ",".join(names[index] for index in indices)
        os.environ[_VISIBLE_DEVICES] = devices
