"""TLS certificates for tests, created with the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificates:
    """PEM files of a server and of the certificate authority that signed its certificate."""

    authorities: Path
    certificate: Path
    key: Path

    def overrides(self) -> tuple[str, ...]:
        """Return the overrides that enable TLS."""
        return tuple(
            f"server.tls.{name}={getattr(self, name)}"
            for name in ("certificate", "key", "authorities")
        )


def make_certificates(directory: Path, address: str = "127.0.0.1") -> Certificates:
    """Create a certificate authority and a server certificate for an IP address."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not installed")
    directory.mkdir(parents=True, exist_ok=True)
    new = (
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    )
    _openssl(
        directory,
        *new,
        "-keyout",
        "authority.key",
        "-out",
        "authority.pem",
        "-subj",
        "/CN=authority",
    )
    signed = (
        "-CA",
        "authority.pem",
        "-CAkey",
        "authority.key",
        "-addext",
        f"subjectAltName=IP:{address}",
    )
    usage = ("-addext", "basicConstraints=critical,CA:FALSE")
    _openssl(
        directory,
        *new,
        *signed,
        *usage,
        "-keyout",
        "server.key",
        "-out",
        "server.pem",
        "-subj",
        "/CN=server",
    )
    return Certificates(
        directory / "authority.pem", directory / "server.pem", directory / "server.key"
    )


def _openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)
