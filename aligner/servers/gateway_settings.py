"""What the gateway is told by the process that starts it and Triton, and where the two meet."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aligner.placement.tls import TLSFiles

READY = "ready"
"""What the gateway says once it listens."""


@dataclass(frozen=True)
class GatewaySettings:
    """Where the gateway listens, what it asks for, and where Triton is."""

    address: str
    http: int
    grpc: int
    metrics: int
    sockets: str
    """Directory of Triton's sockets: see `triton_sockets`."""
    max_request_bytes: int
    key: str | None
    """The run's key; None lets anyone in."""
    tls: TLSFiles | None = None
    """gRPC and HTTP are behind TLS."""

    def to_json(self) -> str:
        """As a line of the gateway's input."""
        return json.dumps(asdict(self), default=str) + "\n"

    @staticmethod
    def from_json(line: str) -> "GatewaySettings":
        """What `to_json` gave."""
        fields = json.loads(line)
        if (tls := fields.pop("tls")) is not None:
            mutual = tls.pop("mutual")
            tls = TLSFiles(**{name: Path(file) for name, file in tls.items()}, mutual=mutual)
        return GatewaySettings(**fields, tls=tls)


def triton_addresses(directory: Path) -> dict[str, Any]:
    """Fields of PyTriton's TritonConfig, for a Triton that listens on Unix sockets in a directory,
    and nowhere else."""
    protocols = ("http", "grpc", "metrics")
    return {f"{name}_address": f"unix:{directory}/{name}" for name in protocols} | {
        f"{name}_port": 1 for name in protocols
    }


def triton_sockets(directory: Path) -> dict[str, str]:
    """The paths of those sockets: Triton hangs its port on gRPC's."""
    return {
        "http": f"{directory}/http",
        "grpc": f"{directory}/grpc:1",
        "metrics": f"{directory}/metrics",
    }
