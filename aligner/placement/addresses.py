"""Addresses of a run's servers: configured ports and interfaces, endpoints, and access.

The endpoints of a run are stored in a file. `Access` contains the key and the TLS files with which
clients reach the servers.
"""

import ipaddress
import json
import re
import secrets
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from aligner.errors import ConfigError
from aligner.file_limits import read_json_object
from aligner.files import create_private_file, write_file
from aligner.paths import PRIVATE_MODE, get_run_paths
from aligner.placement.roles import count_server_ranks
from aligner.placement.tls import get_tls_files
from aligner.schema import Config, PortsConfig

# Number of ports of a server: HTTP, gRPC and metrics.
PORTS_PER_SERVER = 3
LOOPBACK = "127.0.0.1"
_ALL_INTERFACES = "0.0.0.0"


def get_interface_address(interface: str, key: str = "server.interface") -> str:
    """Return the IPv4 address of a network interface of this machine.

    Args:
        interface: Name of an interface, such as `eth0`, or an IPv4 address, which is returned
            unchanged.
        key: Key that sets the interface, for errors.

    Raises:
        ConfigError: There is no such interface; the error lists the interfaces.
    """
    try:
        return str(ipaddress.IPv4Address(interface))
    except ValueError:
        pass
    addresses_by_name = {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    }
    if interface not in addresses_by_name:
        choices = ", ".join(
            f"{name} ({address})" for name, address in sorted(addresses_by_name.items())
        )
        raise ConfigError(
            f"{key}={interface}: must be an IPv4 address or a network interface of this"
            f" machine: {choices}"
        )
    return addresses_by_name[interface]


def get_client_address(config: Config) -> str:
    """Return the address at which clients on this machine reach the servers.

    This is the loopback address if the servers listen on all interfaces.
    """
    address = get_interface_address(config.server.interface)
    return LOOPBACK if address == _ALL_INTERFACES else address


def get_group_ports(config: Config) -> dict[str, PortsConfig]:
    """Return the configured ports of each server group; 0 means that the launch chooses the port.

    The ports of a replica are `PORTS_PER_SERVER` above those of the previous replica.
    """

    def add_offset(ports: PortsConfig, offset: int) -> PortsConfig:
        # 0 stays 0, which means that the launch chooses the port.
        return PortsConfig(**{name: port and port + offset for name, port in asdict(ports).items()})

    ports_by_role = {
        "generator": config.engine.ports,
        "critic": config.critic.ports,
        "reward": config.reward.ports,
        "teacher": config.teacher.ports,
    }
    ports_by_group = {}
    for group in count_server_ranks(config):
        role, _, replica = group.partition(".")
        offset = int(replica or 0) * PORTS_PER_SERVER
        ports_by_group[group] = add_offset(ports_by_role[role], offset)
    return ports_by_group


def get_configured_ports(config: Config) -> dict[str, int]:
    """Return the configured ports by key, without the ports that the launch chooses."""
    ports_by_key = {}
    for group, ports in get_group_ports(config).items():
        role, _, replica = group.partition(".")
        # Only the first replica's ports are values of keys; the others are described as a sum.
        offset = f" + {int(replica) * PORTS_PER_SERVER} ({group})" if replica else ""
        section = "engine" if role == "generator" else role
        for name, port in asdict(ports).items():
            if port:
                ports_by_key[f"{section}.ports.{name}{offset}"] = port
    return ports_by_key


def is_port_free(interface: str, port: int) -> bool:
    """Return whether a server could listen on the port now.

    Raises:
        OSError: This machine does not have the interface.
    """
    with socket.socket() as listener:
        # Otherwise a port whose last connections are in TIME_WAIT would not be free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((interface, port))
        except PermissionError:  # a port below 1024
            return False
        except OSError:
            # Distinguish a used port from a missing interface, for which this raises OSError.
            with socket.socket() as any_port:
                any_port.bind((interface, 0))
            return False
    return True


WORLD_SECRET = "ALIGNER_WORLD_SECRET"
"""Environment variable with a secret that only ranks of the same start share."""
# Names of the access key in the clients of PyTriton: HTTP header and gRPC metadata.
KEY_HEADER = "triton-access-token"
GRPC_KEY_HEADER = f"triton-grpc-protocol-{KEY_HEADER}"


@dataclass(frozen=True)
class Access:
    """Key and TLS files with which a client reaches a server."""

    key: str | None = field(default=None, repr=False)
    """The shared access key; None with `server.guard=none`."""
    authorities: Path | None = None
    """PEM file of the authorities that verify the server's certificate; None without TLS."""
    certificate: Path | None = None
    """PEM file with the client's own certificate, for mutual TLS."""
    certificate_key: Path | None = None
    """PEM file with the key of the client's certificate."""


def create_access_key(config: Config) -> None:
    """Create the access key of a run, in a file that only its owner may read.

    Nothing happens if the run has a key, or requires none.

    Raises:
        ConfigError: The existing file is not a valid key.
    """
    path = get_run_paths(config).access_key
    if config.server.guard == "none":
        return
    if not path.exists():
        path.parent.mkdir(PRIVATE_MODE, parents=True, exist_ok=True)
        # Servers that start at the same time all use the first key that one of them creates.
        create_private_file(path, secrets.token_urlsafe(32) + "\n")
    _read_access_key(path)


def _read_access_key(path: Path) -> str:
    """Return the key in a file, or raise ConfigError if it is not valid."""
    try:
        key = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise ConfigError(
            f"server.guard=key: cannot read the access key of the run, {path}: {error.strerror}"
        ) from error
    # The key is the value of an HTTP header.
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(
            f"server.guard=key: the access key of the run, {path}, is"
            f" {'not valid' if key else 'empty'}; expected one line of printable ASCII characters"
            " without spaces; remove the file, and the next launch creates a new key"
        )
    return key


def load_access(config: Config) -> Access:
    """Return the access of the run's own processes to its servers.

    Raises:
        ConfigError: The run has no valid key.
    """
    has_key = config.server.guard == "key"
    key = _read_access_key(get_run_paths(config).access_key) if has_key else None
    tls = get_tls_files(config)
    if tls is None:
        return Access(key)
    # A client presents a certificate of its own only with mutual TLS.
    if tls.mutual:
        return Access(key, tls.authorities, tls.certificate, tls.key)
    return Access(key, tls.authorities, None, None)


@dataclass(frozen=True)
class Endpoint:
    """Host and ports of one server."""

    host: str
    http: int
    grpc: int
    metrics: int


def save_endpoints(endpoints: dict[str, Endpoint], path: Path) -> None:
    """Write the endpoint of each server group to a file, atomically."""
    content = {group: asdict(endpoint) for group, endpoint in endpoints.items()}
    write_file(path, json.dumps(content, indent=1) + "\n")


def load_endpoints(path: Path) -> dict[str, Endpoint]:
    """Read the endpoint of each server group from a file.

    See `aligner.placement.roles.count_server_ranks` for the names of the groups.

    Raises:
        ConfigError: The file does not contain endpoints.
    """
    content = read_json_object(path)
    try:
        return TypeAdapter(dict[str, Endpoint]).validate_python(content)
    except ValueError as error:
        raise ConfigError(f"{path}: not a valid list of endpoints: {error}") from error


def select_role_endpoints(endpoints: dict[str, Endpoint], role: str) -> list[Endpoint]:
    """Return the endpoints of all replicas of a role, in order: `reward`, `reward.1`, …"""
    return [endpoint for group, endpoint in endpoints.items() if group.partition(".")[0] == role]
