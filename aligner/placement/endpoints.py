"""Addresses of a run's servers, and what a client must show them: the shared key, and TLS."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from aligner.errors import ConfigError
from aligner.files import create_private_file, write_file
from aligner.paths import run_paths
from aligner.schema import Config

KEY_HEADER = "triton-access-token"
"""HTTP header of the key, the one of PyTriton's clients; over gRPC Triton wants `triton-grpc-protocol-` before it."""


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
    """Make the run's key, unless it has one or needs none: a file that only its owner may read."""
    path = run_paths(config).access_key
    if config.server.guard == "none" or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    create_private_file(path, secrets.token_urlsafe(32) + "\n")  # servers that are started together agree on the first one's


def run_access(config: Config) -> Access:
    """How the run's own processes reach its servers. Raises ConfigError where the run has no key."""
    key = None
    if config.server.guard == "key":
        path = run_paths(config).access_key
        try:
            key = path.read_text().strip()
        except OSError as error:
            raise ConfigError(f"server.guard=key: cannot read the run's access key {path}: {error.strerror}") from error
    tls = config.server.tls
    if tls.certificate is None:
        return Access(key)
    shown = (Path(tls.certificate), Path(tls.key or "")) if tls.mutual else (None, None)
    return Access(key, Path(tls.authorities or ""), *shown)


@dataclass(frozen=True)
class Endpoint:
    """Where one server listens."""

    host: str
    http: int
    grpc: int
    metrics: int


def save_endpoints(endpoints: dict[str, Endpoint], path: Path) -> None:
    """Write the addresses by server group, atomically."""
    write_file(path, json.dumps({group: asdict(endpoint) for group, endpoint in endpoints.items()}, indent=1) + "\n")


def load_endpoints(path: Path) -> dict[str, Endpoint]:
    """Read the addresses by server group (`config.placement.server_ranks`)."""
    return {group: Endpoint(**fields) for group, fields in json.loads(path.read_text()).items()}


def replicas(endpoints: dict[str, Endpoint], role: str) -> list[Endpoint]:
    """A role's servers, the first replica first: the groups `reward`, `reward.1`, and so on."""
    return [endpoint for group, endpoint in endpoints.items() if group.partition(".")[0] == role]
