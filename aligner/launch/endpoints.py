"""Ports of a run's servers and process groups, and whether its servers are healthy."""

from __future__ import annotations

import http.client
import random
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping

from aligner.config.endpoints import Endpoint
from aligner.config.placement import server_ranks
from aligner.config.ports import (
    LOOPBACK,
    client_address,
    explicit_ports,
    group_ports,
    http_address,
    listening_addresses,
    port_is_free,
)
from aligner.config.schema import Config

# Below the range from which the kernel gives ports to outgoing connections: a port picked there would often be gone
# again by the time a server has started.
_FIRST_PORT, _LAST_PORT = 20000, 32000


def free_ports(config: Config) -> Iterator[int]:
    """Distinct ports that are free now where the servers listen and, for process groups, on loopback; in random order."""
    candidates = list(range(_FIRST_PORT, _LAST_PORT))
    random.SystemRandom().shuffle(candidates)
    fixed = set(explicit_ports(config).values())
    addresses = {*listening_addresses(config).values(), LOOPBACK}
    for port in candidates:
        if port not in fixed and all(port_is_free(address, port) for address in addresses):
            yield port


def local_hosts(config: Config) -> dict[str, str]:
    """Where each server group is reached when all run on this machine."""
    return dict.fromkeys(server_ranks(config), client_address(config))


def pick_endpoints(config: Config, hosts: Mapping[str, str], ports: Iterator[int]) -> dict[str, Endpoint]:
    """Where each server group listens, on its host: the configured ports, free ones for those left at 0."""
    return {
        group: Endpoint(hosts[group], *(port or next(ports) for port in (wanted.http, wanted.grpc, wanted.metrics)))
        for group, wanted in group_ports(config).items()
    }


def health_address(config: Config, endpoint: Endpoint) -> str:
    """Host and port of a server's HTTP, which alone answers without a key or a certificate whether it is healthy."""
    return f"{http_address(endpoint.host, config.server.tls)}:{endpoint.http}"


def is_ready(address: str, model: str, timeout_s: float = 0.3) -> bool:
    """Whether the Triton server there, and its model, answer that they are ready."""
    # No proxy: a server of this run is never behind one.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for path in ("health/ready", f"models/{model}/ready"):
        try:
            with opener.open(f"http://{address}/v2/{path}", timeout=timeout_s) as answer:
                if answer.status != 200:
                    return False
        except (urllib.error.URLError, http.client.HTTPException, OSError):
            return False
    return True
