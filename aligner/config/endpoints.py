"""Addresses of a run's servers, as the launcher writes them and every client reads them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Endpoint:
    """Where one server role listens."""

    host: str
    http: int
    grpc: int
    metrics: int


def save_endpoints(endpoints: dict[str, Endpoint], path: Path) -> None:
    """Write the addresses by role name, atomically."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({role: asdict(endpoint) for role, endpoint in endpoints.items()}, indent=1) + "\n")
    temporary.replace(path)


def load_endpoints(path: Path) -> dict[str, Endpoint]:
    """Read the addresses by role name."""
    return {role: Endpoint(**fields) for role, fields in json.loads(path.read_text()).items()}
