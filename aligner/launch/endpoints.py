"""Ports of a run's servers and process groups, and whether its servers are healthy."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping

from aligner.launch.free_ports import PORTS, FreePorts
from aligner.placement.addresses import (
    LOOPBACK,
    Endpoint,
    client_address,
    explicit_ports,
    group_ports,
    http_address,
    listening_addresses,
)
from aligner.placement.roles import server_ranks
from aligner.schema import Config


def free_ports(config: Config, candidates: Iterable[int] = PORTS) -> FreePorts:
    """Ports that are free where the servers listen and, for process groups, on loopback; none that is configured."""
    addresses = {*listening_addresses(config).values(), LOOPBACK}
    return FreePorts(addresses, set(candidates).difference(explicit_ports(config).values()))


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
