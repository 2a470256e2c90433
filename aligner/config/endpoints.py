"""Addresses of a run's servers, as the launcher writes them and every client reads them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from aligner.files import write_file


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
