"""Checks of `server.tls`: certificates, keys and authorities."""

from __future__ import annotations

import pytest

from aligner.checks.server import check_certificate, find_tls_problems
from aligner.errors import ConfigError
from aligner.schema import Config, ServerConfig, TLSConfig
from tests.certificates import Certificates, make_certificates


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("other"), address="192.0.2.1")


def make_config(
    files: Certificates | None = None, interface: str = "127.0.0.1", **keys: str | bool
) -> Config:
    given = {name: str(path) for name, path in vars(files).items()} if files else {}
    return Config(server=ServerConfig(interface=interface, tls=TLSConfig(**{**given, **keys})))


def problems(
    files: Certificates | None = None, interface: str = "127.0.0.1", **keys: str | bool
) -> list[str]:
    return list(find_tls_problems(make_config(files, interface, **keys)))


@pytest.mark.parametrize("mutual", [True, False])
def test_matching_certificate_files_are_accepted(good: Certificates, mutual: bool) -> None:
    assert problems(good, mutual=mutual) == []
    assert problems(good, "lo", mutual=mutual) == []


def test_missing_tls_settings_are_reported(good: Certificates) -> None:
    assert problems() == []
    assert problems(mutual=True, key="a.pem") == [
        "server.tls.key=a.pem: requires server.tls.certificate; TLS is off without it",
        "server.tls.mutual=True: requires server.tls.certificate; TLS is off without it",
    ]
    assert problems(certificate=str(good.certificate), key="absent.pem") == [
        "server.tls.key=absent.pem: no such file",
        "server.tls.authorities=null: must name a PEM file, because server.tls.certificate is set",
    ]


def test_a_key_of_another_certificate_is_refused(good: Certificates, other: Certificates) -> None:
    (problem,) = problems(good, key=str(other.key))
    assert problem.startswith(
        f"server.tls.certificate={good.certificate}, server.tls.key={other.key}: expected a"
        " certificate and"
    )


def test_authorities_without_certificate_are_refused(good: Certificates) -> None:
    (problem,) = problems(good, authorities=str(good.key))
    assert problem.startswith(
        f"server.tls.authorities={good.key}: expected a PEM file with certificates"
    )


def test_wrong_issuer_or_host_is_refused(good: Certificates, other: Certificates) -> None:
    (unknown,) = problems(good, authorities=str(other.authorities))
    assert (
        "connecting to 127.0.0.1 with server.tls.authorities=" in unknown
        and "unable to get local issuer" in unknown
    )
    (elsewhere,) = problems(other)
    assert "would fail: IP address mismatch, certificate is not valid for '127.0.0.1'" in elsewhere


def test_slurm_certificate_must_match_the_nodes(good: Certificates, other: Certificates) -> None:
    config = make_config(other, "0.0.0.0")
    config.cluster.kind = "slurm"
    assert list(find_tls_problems(config)) == []
    check_certificate(config, ["192.0.2.1", "192.0.2.1"])
    with pytest.raises(
        ConfigError, match=r"connecting to 192\.0\.2\.2 with .* would fail: IP address mismatch"
    ):
        check_certificate(config, ["192.0.2.1", "192.0.2.2"])


def test_automatic_certificate_excludes_own_files() -> None:
    assert problems(certificate="auto", mutual=True) == []
    assert problems(certificate="auto", key="a.pem", authorities="b.pem") == [
        (
            "server.tls.key=a.pem: is not supported with server.tls.certificate=auto, where the"
            " run creates its own files; remove server.tls.key"
        ),
        (
            "server.tls.authorities=b.pem: is not supported with server.tls.certificate=auto,"
            " where the run creates its own files; remove server.tls.authorities"
        ),
    ]
