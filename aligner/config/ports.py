"""Listening ports: which are asked for, and whether this machine has them free."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator

from aligner.config.schema import Config


def explicit_ports(config: Config) -> dict[str, int]:
    """The ports that the configuration fixes, by key; those left at 0 are picked at launch."""
    roles = {"critic": config.critic.ports, "reward": config.reward.ports}
    found = {f"{role}.ports.{name}": port for role, ports in roles.items() for name, port in dataclasses.asdict(ports).items()}
    return {key: port for key, port in found.items() if port}


def port_is_free(interface: str, port: int) -> bool:
    """Whether a server could listen there now; raises OSError for an interface that this machine does not have."""
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


def port_problems(config: Config) -> Iterator[str]:
    """One line for each fixed port that is out of range, given twice or in use."""
    interface = config.server.interface
    taken: dict[int, str] = {}
    try:
        port_is_free(interface, 0)
        for key, port in explicit_ports(config).items():
            if port > 65535:
                yield f"{key}={port}: a port is at most 65535"
            elif port in taken:
                yield f"{key}={port}: {taken[port]} has the same port"
            elif not port_is_free(interface, port):
                yield f"{key}={port}: the port is in use on {interface}; give another, or 0 for a free one"
            taken.setdefault(port, key)
    except OSError as error:
        yield f"server.interface={interface}: cannot listen there ({error.strerror or error})"
