"""TLS certificates that a run creates: hosts, private key, renewal, concurrent creation."""

from __future__ import annotations

import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aligner.checks.server import check_certificate
from aligner.errors import ConfigError
from aligner.placement.tls import create_certificate, get_tls_files, renew_certificate
from aligner.schema import Config, RunConfig, ServerConfig, TLSConfig


@pytest.fixture
def config(tmp_path: Path) -> Config:
    tls = TLSConfig(certificate="auto", mutual=True)
    return Config(
        run=RunConfig(dir=str(tmp_path / "run")), server=ServerConfig(guard="none", tls=tls)
    )


def test_certificate_is_valid_only_for_its_hosts(
    config: Config,
) -> None:
    create_certificate(config, ["198.51.100.1", "node-7"])
    check_certificate(
        config, ["198.51.100.1", "node-7", "127.0.0.1", "localhost", socket.gethostname()]
    )
    for elsewhere in ("198.51.100.2", "node-8"):
        with pytest.raises(ConfigError, match=f"connecting to {elsewhere} .* would fail"):
            check_certificate(config, [elsewhere])


def test_key_is_private_and_renewal_ends_old_trust(config: Config, tmp_path: Path) -> None:
    create_certificate(config)
    files = get_tls_files(config)
    assert files is not None and files.key.stat().st_mode & 0o777 == 0o600
    own = files.certificate.read_text()
    create_certificate(config, ["198.51.100.1"])
    assert files.certificate.read_text() == own, (
        "servers that start by themselves keep the first one's"
    )
    renew_certificate(config, ["198.51.100.1"])
    assert files.certificate.read_text() != own
    old = tmp_path / "old.pem"
    old.write_text(own)
    trusts_the_old = ssl.create_default_context(cafile=old)
    client, server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [trusts_the_old.wrap_bio(client, server, server_hostname="127.0.0.1")]
    ends.append(files.server_context().wrap_bio(server, client, server_side=True))
    with pytest.raises(ssl.SSLCertVerificationError):
        for _ in range(4):
            for end in ends:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue


def test_concurrent_servers_create_one_certificate(config: Config) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: create_certificate(config), range(8)))
    check_certificate(config, ["127.0.0.1"])
    files = get_tls_files(config)
    assert files is not None
    assert sorted(path.name for path in files.key.parent.iterdir()) == [
        "certificate.pem",
        "key.pem",
    ]
    assert [path.name for path in files.key.parent.parent.iterdir()] == ["tls"]
