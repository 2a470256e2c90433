"""TLS of a run's servers: the files that they take, and the certificate that a run makes for
itself."""

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

from aligner.files import create_private_file, new_directory
from aligner.paths import PRIVATE, run_paths
from aligner.schema import Config

AUTO = "auto"
"""server.tls.certificate of a run that makes its own."""
_LIFETIME = timedelta(days=3650)
_CLOCKS_DIFFER = timedelta(days=1)


@dataclass(frozen=True)
class TLSFiles:
    """PEM files of servers behind TLS."""

    certificate: Path
    key: Path
    authorities: Path
    """What the certificates that are shown are checked against."""
    mutual: bool
    """Whether clients must show a certificate; the run's own show the servers'."""

    def server_context(self) -> ssl.SSLContext:
        """A server's end. Raises OSError for files that are none."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        if self.mutual:
            context.load_verify_locations(self.authorities)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """A client's end. Raises OSError for files that are none."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.authorities)
        if self.mutual:
            context.load_cert_chain(self.certificate, self.key)
        return context


def tls_files(config: Config) -> TLSFiles | None:
    """What the run's servers and clients use; None without TLS."""
    tls = config.server.tls
    if tls.certificate is None:
        return None
    if tls.certificate == AUTO:
        own = run_paths(config).tls
        return TLSFiles(
            own / "certificate.pem", own / "key.pem", own / "certificate.pem", tls.mutual
        )
    return TLSFiles(
        Path(tls.certificate), Path(tls.key or ""), Path(tls.authorities or ""), tls.mutual
    )


def create_certificate(config: Config, hosts: Collection[str] = ()) -> None:
    """Make the certificate of a run with server.tls.certificate=auto, for these hosts and this
    machine, unless it has one.

    It signs itself, so that it is its own authority: whoever has it trusts this run's servers and
    no others. Its key is readable by the owner alone.
    """
    directory = run_paths(config).tls
    if config.server.tls.certificate != AUTO or directory.exists():
        return
    directory.parent.mkdir(PRIVATE, parents=True, exist_ok=True)
    certificate, key = _signed_by_itself({*hosts, *_names_of_this_machine()})
    # Servers that are started together agree on the first one's.
    with contextlib.suppress(FileExistsError), new_directory(directory) as started:
        create_private_file(started / "key.pem", key)
        (started / "certificate.pem").write_bytes(certificate)


def renew_certificate(config: Config, hosts: Collection[str]) -> None:
    """`create_certificate`, in the place of that of an earlier launch, whose hosts were others."""
    shutil.rmtree(run_paths(config).tls, ignore_errors=True)
    create_certificate(config, hosts)


def _names_of_this_machine() -> set[str]:
    addresses = [address for interface in psutil.net_if_addrs().values() for address in interface]
    return {"localhost", socket.gethostname()} | {
        each.address for each in addresses if each.family == socket.AF_INET
    }


def _signed_by_itself(hosts: Collection[str]) -> tuple[bytes, bytes]:
    """A certificate for names and IP addresses, and its key, in PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def general_name(host: str) -> x509.GeneralName:
        try:
            return x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            return x509.DNSName(host)

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "aligner run")])
    now, public = datetime.now(timezone.utc), key.public_key()
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    )
    usage |= {"crl_sign": False, "encipher_only": False, "decipher_only": False}
    certificate = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + _LIFETIME)
        .add_extension(
            x509.SubjectAlternativeName([general_name(host) for host in sorted(hosts)]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=True, **usage), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
    encoding, unencrypted = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, unencrypted)
    return certificate.public_bytes(encoding), private
