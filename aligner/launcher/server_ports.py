"""Ports for a run's servers and process groups: free ones, given once on a machine; and whether its
servers are healthy."""

import contextlib
import http.client
import random
import socket
import urllib.request
from collections.abc import Collection, Iterable, Iterator, Mapping

from aligner.errors import AlignerError
from aligner.placement.addresses import (
    LOOPBACK,
    Endpoint,
    client_address,
    explicit_ports,
    group_ports,
    interface_address,
    port_is_free,
)
from aligner.placement.roles import server_ranks
from aligner.placement.tls import tls_files
from aligner.schema import Config

PORTS = range(20000, 32000)
"""Below those that the kernel gives to outgoing connections: such a one would often be gone before
a server has started."""
SERVED_MODELS = {
    "generator": "generate",
    "critic": "critic_infer",
    "reward": "reward_model",
    "teacher": "teacher_logprobs",
}
"""By role, the Triton model that must be ready for a server to be healthy."""


class FreePorts(contextlib.ExitStack):
    """Iterator over distinct ports, those of `candidates` that are free on all of `addresses`, in
    random order.

    A port is claimed until its server listens, by an abstract Unix socket that bears its number: no
    other FreePorts in this network namespace gives it. Claims end with `close`, the `with` block or
    the process, however it ends.
    """

    def __init__(
        self, addresses: Iterable[str] = (LOOPBACK,), candidates: Collection[int] = PORTS
    ) -> None:
        super().__init__()
        self._addresses = frozenset(addresses)
        self._candidates = list(candidates)
        random.SystemRandom().shuffle(self._candidates)

    def __iter__(self) -> "FreePorts":
        return self

    def __next__(self) -> int:
        """The next port. Raises AlignerError when there is none, and OSError for an address that
        this machine lacks."""
        while self._candidates:
            port = self._candidates.pop()
            if self._claim(port) and all(
                port_is_free(address, port) for address in self._addresses
            ):
                return port
        raise AlignerError(f"no free port left on {' and '.join(sorted(self._addresses))}")

    def _claim(self, port: int) -> bool:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0aligner-port-{port}")
        except OSError:
            claim.close()
            return False
        self.enter_context(claim)
        return True


def free_ports(config: Config, candidates: Iterable[int] = PORTS) -> FreePorts:
    """Ports that are free where the servers listen and, for process groups, on loopback; none that
    is configured."""
    addresses = {interface_address(config.server.interface), LOOPBACK}
    return FreePorts(addresses, set(candidates).difference(explicit_ports(config).values()))


def local_hosts(config: Config) -> dict[str, str]:
    """Where each server group is reached when all run on this machine."""
    return dict.fromkeys(server_ranks(config), client_address(config))


def pick_endpoints(
    config: Config, hosts: Mapping[str, str], ports: Iterator[int]
) -> dict[str, Endpoint]:
    """Where each server group listens, on its host: the configured ports, free ones for those left
    at 0."""
    return {
        group: Endpoint(
            hosts[group],
            *(port or next(ports) for port in (wanted.http, wanted.grpc, wanted.metrics)),
        )
        for group, wanted in group_ports(config).items()
    }


def is_healthy(config: Config, group: str, endpoint: Endpoint, timeout_s: float = 0.3) -> bool:
    """Whether the Triton server there, and the model that the group serves, answer that they are
    ready."""
    role = group.partition(".")[0]
    tls = tls_files(config)
    # a server is never behind a proxy
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    try:
        if tls is not None:
            handlers.append(urllib.request.HTTPSHandler(context=tls.client_context()))
        opener = urllib.request.build_opener(*handlers)
        for path in ("health/ready", f"models/{SERVED_MODELS[role]}/ready"):
            url = (
                f"{'http' if tls is None else 'https'}://{endpoint.host}:{endpoint.http}/v2/{path}"
            )
            with opener.open(url, timeout=timeout_s) as answer:
                if answer.status != 200:
                    return False
    except (http.client.HTTPException, OSError):
        return False
    return True
