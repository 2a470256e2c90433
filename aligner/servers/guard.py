"""Who may use a server's ports: the run's key, TLS, and what nobody but the server itself may."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aligner.placement.addresses import KEY_HEADER, run_access
from aligner.schema import Config, TLSConfig

_REQUESTS = ("inference", "metadata", "model-config", "statistics")
# Loading a model runs code that its sender chose; shared memory, traces and logs name files of this machine.
_MANAGEMENT = ("model-repository", "shared-memory", "trace", "logging")


@dataclass(frozen=True)
class Guard:
    """What Triton asks of those who speak to it. Health is open: it tells nothing, and launchers poll it.

    Triton manages models over the same ports, so that whoever may do that owns this process: without the run's key they
    are closed with one that no other process knows.
    """

    key: str | None = field(default=None, repr=False)
    """The run's key; None serves anyone."""
    tls: TLSConfig = field(default_factory=TLSConfig)
    own_key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def management_key(self) -> str:
        """What Triton's HTTP asks for where models are managed, as PyTriton does from this process."""
        return self.own_key if self.key is None or self.tls.certificate is not None else self.key

    def triton_settings(self) -> dict[str, Any]:
        """Fields of PyTriton's TritonConfig."""
        everything = (*_REQUESTS, *_MANAGEMENT)
        closed = _MANAGEMENT if self.key is None else everything
        settings: dict[str, Any] = {
            "http_restricted_api": _restricted(closed, self.management_key),
            "grpc_restricted_protocol": _restricted(closed, self.key or self.own_key),
        }
        tls = self.tls
        if tls.certificate is None:
            return settings
        return {
            **settings,
            "http_restricted_api": _restricted(everything, self.management_key),
            "grpc_use_ssl": not tls.mutual,
            "grpc_use_ssl_mutual": tls.mutual,
            "grpc_server_cert": Path(tls.certificate).resolve(),
            "grpc_server_key": Path(tls.key or "").resolve(),
            **({"grpc_root_cert": Path(tls.authorities or "").resolve()} if tls.mutual else {}),
        }


def run_guard(config: Config) -> Guard:
    """The guard of a run's servers. Raises ConfigError where the run has no key yet."""
    return Guard(run_access(config).key, config.server.tls)


def _restricted(apis: tuple[str, ...], key: str) -> str:
    return f"{','.join(apis)}:{KEY_HEADER}={key}"
