"""Ports of a run's servers and process groups, and whether its servers are healthy."""

from __future__ import annotations

import http.client
import random
import urllib.error
import urllib.request
from collections.abc import Iterator

from aligner.config.endpoints import Endpoint
from aligner.config.ports import explicit_ports, port_is_free
from aligner.config.schema import Config, Ports

# Below the range from which the kernel gives ports to outgoing connections: a port picked there would often be gone
# again by the time a server has started.
_FIRST_PORT, _LAST_PORT = 20000, 32000
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def free_ports(config: Config) -> Iterator[int]:
    """Distinct ports that are free now on the servers' interface, in random order."""
    candidates = list(range(_FIRST_PORT, _LAST_PORT))
    random.SystemRandom().shuffle(candidates)
    fixed = set(explicit_ports(config).values())
    for port in candidates:
        if port not in fixed and port_is_free(config.server.interface, port):
            yield port


def pick_endpoints(config: Config, ports: Iterator[int]) -> dict[str, Endpoint]:
    """Where the critic and the reward server listen: the configured ports, free ones for those left at 0."""
    host = _ANY_ADDRESS.get(config.server.interface, config.server.interface)

    def endpoint(wanted: Ports) -> Endpoint:
        return Endpoint(host, *(port or next(ports) for port in (wanted.http, wanted.grpc, wanted.metrics)))

    return {"critic": endpoint(config.critic.ports), "reward": endpoint(config.reward.ports)}


def is_ready(endpoint: Endpoint, model: str, timeout_s: float = 0.3) -> bool:
    """Whether the Triton server there, and its model, answer that they are ready."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    # No proxy: a server of this run is never behind one.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for path in ("health/ready", f"models/{model}/ready"):
        try:
            with opener.open(f"http://{host}:{endpoint.http}/v2/{path}", timeout=timeout_s) as answer:
                if answer.status != 200:
                    return False
        except (urllib.error.URLError, http.client.HTTPException, OSError):
            return False
    return True
