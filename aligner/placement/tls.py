"""TLS of a run's servers: the files that servers and clients use, and the run's own certificate."""

import contextlib
import ipaddress
import shutil
import socket
import ssl
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import psutil

from aligner.files import create_directory, create_private_file
from aligner.paths import PRIVATE_MODE, get_run_paths
from aligner.schema import Config

# Value of `server.tls.certificate` with which a run creates its own certificate.
AUTO = "auto"
# longer than any run
_LIFETIME = timedelta(days=3650)
# The certificate must already be valid on hosts whose clocks are behind.
_CLOCK_TOLERANCE = timedelta(days=1)


@dataclass(frozen=True)
class TLSFiles:
    """PEM files of servers that use TLS, and of their clients."""

    certificate: Path
    """Certificate of the servers, and of the clients of the run itself."""
    key: Path
    """Key of the certificate."""
    authorities: Path
    """Authorities that verify the certificates of the other side."""
    mutual: bool
    """Whether clients must present a certificate, too (mutual TLS)."""

    def server_context(self) -> ssl.SSLContext:
        """Return the TLS context of a server.

        Raises:
            OSError: A file is missing or invalid.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        if self.mutual:
            context.load_verify_locations(self.authorities)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the TLS context of a client.

        Raises:
            OSError: A file is missing or invalid.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.authorities)
        if self.mutual:
            context.load_cert_chain(self.certificate, self.key)
        return context


def get_tls_files(config: Config) -> TLSFiles | None:
    """Return the TLS files of a run's servers and clients; None without TLS."""
    tls = config.server.tls
    if tls.certificate is None:
        return None
    if tls.certificate == AUTO:
        directory = get_run_paths(config).tls
        return TLSFiles(
            directory / "certificate.pem",
            directory / "key.pem",
            directory / "certificate.pem",
            tls.mutual,
        )
    return TLSFiles(
        Path(tls.certificate), Path(tls.key or ""), Path(tls.authorities or ""), tls.mutual
    )


def create_certificate(config: Config, hosts: Collection[str] = ()) -> None:
    """Create the certificate of a run with `server.tls.certificate=auto`, unless it exists.

    The certificate is self-signed, so it is its own authority: a client that has it trusts only the
    servers of this run. Only the owner may read the key.

    Args:
        config: The run's configuration.
        hosts: Names and addresses of the servers' hosts, in addition to those of this machine.
    """
    directory = get_run_paths(config).tls
    if config.server.tls.certificate != AUTO or directory.exists():
        return
    directory.parent.mkdir(PRIVATE_MODE, parents=True, exist_ok=True)
    certificate, key = _create_self_signed({*hosts, *_local_names()})
    # Servers that start at the same time all use the first certificate that one of them creates.
    with contextlib.suppress(FileExistsError), create_directory(directory) as temporary:
        create_private_file(temporary / "key.pem", key)
        (temporary / "certificate.pem").write_bytes(certificate)


def renew_certificate(config: Config, hosts: Collection[str]) -> None:
    """Replace the certificate of an earlier launch, whose servers ran on other hosts.

    See `create_certificate` for the arguments.
    """
    shutil.rmtree(get_run_paths(config).tls, ignore_errors=True)
    create_certificate(config, hosts)


def _local_names() -> set[str]:
    """Return the host names and IPv4 addresses of this machine."""
    addresses = [address for interface in psutil.net_if_addrs().values() for address in interface]
    # A client verifies the name or address with which it connects.
    return {"localhost", socket.gethostname()} | {
        address.address for address in addresses if address.family == socket.AF_INET
    }


def _create_self_signed(hosts: Collection[str]) -> tuple[bytes, bytes]:
    """Return a self-signed certificate for names and IP addresses, and its key, both in PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def build_general_name(host: str) -> x509.GeneralName:
        try:
            return x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            return x509.DNSName(host)

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "aligner run")])
    now = datetime.now(timezone.utc)
    public_key = key.public_key()
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    )
    usage |= {"crl_sign": False, "encipher_only": False, "decipher_only": False}
    certificate = (
        x509.CertificateBuilder(issuer_name=subject, subject_name=subject, public_key=public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_TOLERANCE)
        .not_valid_after(now + _LIFETIME)
        .add_extension(
            x509.SubjectAlternativeName([build_general_name(host) for host in sorted(hosts)]),
            critical=False,
        )
        # It signs itself, so it has to be a certificate authority.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=True, **usage), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    unencrypted = serialization.NoEncryption()
    private_pem = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, unencrypted)
    return certificate.public_bytes(encoding), private_pem
