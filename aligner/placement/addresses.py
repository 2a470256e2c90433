"""Addresses of a run's servers: ports and interfaces that are asked for, where they listen, and the
key and TLS they want."""

import ipaddress
import json
import re
import secrets
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from aligner.errors import ConfigError
from aligner.files import create_private_file, write_file
from aligner.paths import PRIVATE, run_paths
from aligner.placement.roles import server_ranks
from aligner.placement.tls import tls_files
from aligner.schema import Config, PortsConfig

PORTS_PER_SERVER = 3
LOOPBACK = "127.0.0.1"
_ANY = "0.0.0.0"


def interface_address(interface: str) -> str:
    """The IPv4 address of this machine's network interface, such as eth0; an address is itself.

    Raises ConfigError, naming the interfaces that there are, for a name that is none of them.
    """
    try:
        return str(ipaddress.IPv4Address(interface))
    except ValueError:
        pass
    known = {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    }
    if interface not in known:
        raise ConfigError(
            f"server.interface={interface}: must be an IPv4 address or a network interface of"
            " this machine:"
            f" {', '.join(f'{name} ({address})' for name, address in sorted(known.items()))}"
        )
    return known[interface]


def client_address(config: Config) -> str:
    """Where this machine's clients reach the servers: over loopback when they listen everywhere."""
    address = interface_address(config.server.interface)
    return LOOPBACK if address == _ANY else address


def group_ports(config: Config) -> dict[str, PortsConfig]:
    """The ports that each server group is configured with; 0 for those that are picked at launch.

    A replica's are `PORTS_PER_SERVER` above those of the one before it.
    """

    def above(ports: PortsConfig, offset: int) -> PortsConfig:
        return PortsConfig(**{name: port and port + offset for name, port in asdict(ports).items()})

    roles = {
        "generator": config.engine.ports,
        "critic": config.critic.ports,
        "reward": config.reward.ports,
        "teacher": config.teacher.ports,
    }
    found = {}
    for group in server_ranks(config):
        role, _, replica = group.partition(".")
        found[group] = above(roles[role], int(replica or 0) * PORTS_PER_SERVER)
    return found


def explicit_ports(config: Config) -> dict[str, int]:
    """The ports that the configuration fixes, by key; those left at 0 are picked at launch."""
    found = {}
    for group, ports in group_ports(config).items():
        role, _, replica = group.partition(".")
        offset = f" + {int(replica) * PORTS_PER_SERVER} ({group})" if replica else ""
        section = "engine" if role == "generator" else role
        found.update(
            {
                f"{section}.ports.{name}{offset}": port
                for name, port in asdict(ports).items()
                if port
            }
        )
    return found


def port_is_free(interface: str, port: int) -> bool:
    """Whether a server could listen there now; raises OSError for an interface that this machine
    does not have."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((interface, port))
        except PermissionError:
            return False
        except OSError:
            with socket.socket() as any_port:
                any_port.bind((interface, 0))
            return False
    return True


WORLD_SECRET = "ALIGNER_WORLD_SECRET"
"""Environment variable of the ranks that are started together, and find each other by it."""
KEY_HEADER = "triton-access-token"
GRPC_KEY_HEADER = f"triton-grpc-protocol-{KEY_HEADER}"
"""The key's HTTP header and gRPC metadata, those of PyTriton's clients."""


@dataclass(frozen=True)
class Access:
    """How a server is reached beside its address."""

    key: str | None = field(default=None, repr=False)
    """The shared key; None where `server.guard=none`."""
    authorities: Path | None = None
    """PEM file that the server's certificate is checked against; None: no TLS."""
    certificate: Path | None = None
    """PEM file with the client's own certificate (mutual TLS)."""
    certificate_key: Path | None = None


def create_access_key(config: Config) -> None:
    """Make the run's key, unless it has one or needs none: a file that only its owner may read.

    Raises ConfigError where the run has a file that is no key.
    """
    path = run_paths(config).access_key
    if config.server.guard == "none":
        return
    if not path.exists():
        path.parent.mkdir(PRIVATE, parents=True, exist_ok=True)
        # servers started together agree on the first one's
        create_private_file(path, secrets.token_urlsafe(32) + "\n")
    _read_key(path)


def _read_key(path: Path) -> str:
    try:
        key = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise ConfigError(
            f"server.guard=key: cannot read the access key of the run, {path}: {error.strerror}"
        ) from error
    if not re.fullmatch(r"[!-~]+", key):  # a header's value
        raise ConfigError(
            f"server.guard=key: the access key of the run, {path}, is"
            f" {'not valid' if key else 'empty'}; expected one line of printable ASCII characters"
            " without spaces; remove the file, and the next launch creates a new key"
        )
    return key


def run_access(config: Config) -> Access:
    """How the run's own processes reach its servers. Raises ConfigError where the run has no key,
    or a file that is none."""
    key = _read_key(run_paths(config).access_key) if config.server.guard == "key" else None
    tls = tls_files(config)
    if tls is None:
        return Access(key)
    return Access(
        key, tls.authorities, *((tls.certificate, tls.key) if tls.mutual else (None, None))
    )


@dataclass(frozen=True)
class Endpoint:
    """Where one server listens."""

    host: str
    http: int
    grpc: int
    metrics: int


def save_endpoints(endpoints: dict[str, Endpoint], path: Path) -> None:
    """Write the addresses by server group, atomically."""
    write_file(
        path,
        json.dumps({group: asdict(endpoint) for group, endpoint in endpoints.items()}, indent=1)
        + "\n",
    )


def load_endpoints(path: Path) -> dict[str, Endpoint]:
    """Read the addresses by server group (`aligner.placement.roles.server_ranks`)."""
    return {group: Endpoint(**fields) for group, fields in json.loads(path.read_text()).items()}


def replicas(endpoints: dict[str, Endpoint], role: str) -> list[Endpoint]:
    """A role's servers, the first replica first: the groups `reward`, `reward.1`, and so on."""
    return [endpoint for group, endpoint in endpoints.items() if group.partition(".")[0] == role]
