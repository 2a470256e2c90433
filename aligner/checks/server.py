"""Checks of the section `server`: ports, interface, TLS files, timeouts and request limits.

The checks compare these settings with each other, with the batches of the run, and with this
machine.
"""

import ssl
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from aligner.errors import ConfigError
from aligner.extras import lacking, unfit_numpy
from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.placement.addresses import (
    client_address,
    explicit_ports,
    interface_address,
    port_is_free,
)
from aligner.placement.roles import has_generator, server_ranks
from aligner.placement.tls import AUTO, TLSFiles, tls_files
from aligner.schema import Config, EvaluationConfig, TLSConfig
from aligner.schema.derived import longest_sequence, longest_sequence_keys
from aligner.schema.evaluation_suites import evaluation_suites
from aligner.schema.server import LAST_PORT


def problems(config: Config, model: ModelShape | None, expected: ExpectedInputs) -> Iterator[str]:
    """Yield a line for each problem of the servers.

    Servers must be able to listen on their ports, be reachable for the run's clients, and accept
    the run's own requests.
    """
    if (
        config.cluster.kind == "local"
        and (groups := server_ranks(config))
        and (package_problem := lacking("server") or unfit_numpy())
    ):
        yield f"this run starts servers ({', '.join(groups)}): {package_problem}"
    yield from _port_problems(config)
    yield from tls_problems(config)
    yield from _patience_problems(config)
    if not config.algorithm.generates:
        return
    longest = longest_sequence(config)
    max_length = config.server.max_sequence_length
    if max_length is not None and max_length < longest:
        yield (
            f"server.max_sequence_length={max_length}: must be at least {longest}, the longest"
            f" sequence ({longest_sequence_keys(config)}); set a larger value or null"
        )
    yield from _request_problems(config, longest)


def _patience_problems(config: Config) -> Iterator[str]:
    """Yield timeouts that are shorter than a permitted start or restart of a server."""
    server = config.server
    cluster = config.cluster
    groups = server_ranks(config)
    if not groups:
        return
    # A restart consists of noticing the failure, stopping the process, and starting a new one.
    restart_s = server.health_timeout_s + cluster.stop_timeout_s + server.start_timeout_s
    if server.max_restarts and server.request_timeout_s <= restart_s:
        yield (
            f"server.request_timeout_s={server.request_timeout_s:g}: must be above {restart_s:g},"
            " because a request waits until its server has restarted. A restart may take"
            f" server.health_timeout_s={server.health_timeout_s:g} s +"
            f" cluster.stop_timeout_s={cluster.stop_timeout_s:g} s +"
            f" server.start_timeout_s={server.start_timeout_s:g} s. Set a larger value or"
            " server.max_restarts=0"
        )
    waiting = next((group for group, ranks in groups.items() if ranks > 1), None)
    if waiting is not None and cluster.collective_timeout_s < server.start_timeout_s:
        yield (
            f"cluster.collective_timeout_s={cluster.collective_timeout_s:g}: must be at least"
            f" server.start_timeout_s={server.start_timeout_s:g}, because the other ranks of the"
            f" {waiting} server wait for its rank 0 to start"
        )


def _request_problems(config: Config, longest: int) -> Iterator[str]:
    """Yield requests that exceed `server.max_request_tokens`, which the servers would reject.

    Padding counts, so that each row may count as many tokens as the longest sequence.
    """
    rollout = config.rollout
    server = config.server
    has_critic = config.algorithm.has_critic
    prompts = rollout.prompts_per_micro_batch
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    # If the batch was generated ahead of training, the trainer requests the values of the whole
    # batch when its step begins.
    scored_samples = (
        samples if has_critic and rollout.steps_ahead else prompts * rollout.samples_per_prompt
    )
    # Purpose, rows, tokens per row, and the alternative to a higher limit.
    requests = [
        (
            "for scores or values of",
            min(scored_samples, server.max_batch_size),
            longest,
            "reduce server.max_batch_size",
        )
    ]
    if has_critic:
        rows = samples // config.algorithm.minibatches
        requests.append(
            ("for a critic update with", rows, longest, "increase algorithm.minibatches")
        )
    if has_generator(config):
        rows = prompts + rollout.spare_prompts
        requests.append(
            (
                "to generate from",
                rows,
                config.data.max_prompt_tokens,
                "increase rollout.micro_batches",
            )
        )
    for suite in evaluation_suites(config) if config.evaluation.every else ():
        requests += _evaluation_requests(config, suite.settings, longest)

    for purpose, rows, tokens, alternative in requests:
        if rows * tokens > server.max_request_tokens:
            yield (
                f"server.max_request_tokens={server.max_request_tokens}: too small for a request"
                f" {purpose} {rows} sequences of up to {tokens} tokens; set {rows * tokens} or"
                f" more, or {alternative}"
            )


def _evaluation_requests(
    config: Config, settings: EvaluationConfig, longest: int
) -> Iterator[tuple[str, int, int, str]]:
    """Yield the largest requests of an evaluation suite; see `_request_problems`.

    An evaluation requests all its prompts at once. The number of prompts in a file is not known
    before the file is read, so that a suite with a file and without `count` yields no request for
    generation.

    Args:
        config: Configuration of the run.
        settings: Settings of the suite.
        longest: Length of the longest sequence in tokens.

    Yields:
        Purpose, rows, tokens per row, and the alternative to a higher limit.
    """
    alternative = "reduce evaluation.count"
    prompts = min(len(settings.prompts) or sys.maxsize, settings.count or sys.maxsize)
    if settings.function is None:
        rows = min(prompts * settings.samples, config.server.max_batch_size)
        yield "for evaluation scores of", rows, longest, "reduce server.max_batch_size"
    if has_generator(config) and prompts < sys.maxsize:
        yield (
            "to generate for an evaluation from",
            prompts,
            config.data.max_prompt_tokens,
            alternative,
        )


def _port_problems(config: Config) -> Iterator[str]:
    """Yield a line for each fixed port that is out of range, used twice or in use.

    An interface that does not exist is a problem, too. Interfaces and free ports are tested only if
    the servers run on this machine, not if this machine submits a Slurm job.
    """
    interface = config.server.interface
    is_local = config.cluster.kind == "local"
    try:
        address = interface_address(interface) if is_local else ""
        if is_local:
            port_is_free(address, 0)
    except ConfigError as error:
        yield str(error)
        return
    except OSError as error:
        yield (
            f"server.interface={interface}: servers cannot listen on this interface"
            f" ({error.strerror or error})"
        )
        return

    key_by_port: dict[int, str] = {}
    for key, port in explicit_ports(config).items():
        if port > LAST_PORT:
            yield f"{key}={port}: must be at most {LAST_PORT}"
        elif port in key_by_port:
            yield f"{key}={port}: {key_by_port[port]} is the same port; set different ports"
        elif is_local and not port_is_free(address, port):
            yield (
                f"{key}={port}: the port is in use on {address}; set another port, or 0 for a"
                " free port"
            )
        key_by_port.setdefault(port, key)


def tls_problems(config: Config) -> Iterator[str]:
    """Yield a line for each reason why the run's clients could not connect to its servers."""
    if config.server.tls.certificate == AUTO:
        yield from _unread(config.server.tls)
        return
    file_problems = list(_missing(config.server.tls))
    yield from file_problems
    files = tls_files(config)
    if file_problems or files is None:
        return
    try:
        address = client_address(config) if config.cluster.kind == "local" else None
    except ConfigError:
        return  # _port_problems reports an unknown interface
    problem = _handshake_problem(files, address)
    if problem is not None:
        yield problem


def check_certificate(config: Config, hosts: Iterable[str]) -> None:
    """Raise ConfigError if the run's clients would reject the servers' certificate on a host.

    Args:
        config: Configuration of the run.
        hosts: Host names or addresses of the servers.
    """
    files = tls_files(config)
    if files is None:
        return
    for host in sorted({*hosts}):
        if (problem := _handshake_problem(files, host)) is not None:
            raise ConfigError(problem)


def _unread(tls: TLSConfig) -> Iterator[str]:
    """Yield the TLS files that are set although the run creates its own files."""
    for name in ("key", "authorities"):
        if (file := getattr(tls, name)) is not None:
            yield (
                f"server.tls.{name}={file}: is not supported with server.tls.certificate={AUTO},"
                f" where the run creates its own files; remove server.tls.{name}"
            )


def _missing(tls: TLSConfig) -> Iterator[str]:
    """Yield the TLS settings that lack another setting, and the files that do not exist."""
    files = {"certificate": tls.certificate, "key": tls.key, "authorities": tls.authorities}
    if tls.certificate is None:
        ineffective = [name for name in ("key", "authorities") if files[name] is not None] + [
            "mutual"
        ] * tls.mutual
        for name in ineffective:
            yield (
                f"server.tls.{name}={getattr(tls, name)}: requires server.tls.certificate; TLS is"
                " off without it"
            )
        return
    for name, file in files.items():
        if file is None:
            yield (
                f"server.tls.{name}=null: must name a PEM file, because server.tls.certificate is"
                " set"
            )
        elif not Path(file).is_file():
            yield f"server.tls.{name}={file}: no such file"


def _handshake_problem(files: TLSFiles, address: str | None) -> str | None:
    """Return the problem of a TLS handshake between a client and a server with these files.

    With mutual TLS, the server verifies the client, too.

    Args:
        files: Certificate, key and authorities of both sides.
        address: Host name or address that the certificate must contain; None disables this test.

    Returns:
        The problem; None if the handshake succeeds.
    """
    certificate = files.certificate
    key = files.key
    authorities = files.authorities
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        try:
            # Without a password argument, OpenSSL would prompt for the password of an encrypted
            # key in the terminal and wait. The empty password is wrong for every encrypted key.
            context.load_cert_chain(certificate, key, password="")
        except (OSError, ValueError) as error:
            return (
                f"server.tls.certificate={certificate}, server.tls.key={key}: expected a"
                f" certificate and its unencrypted private key in PEM format: {error}"
            )
        try:
            context.load_verify_locations(authorities)
        except OSError as error:
            return (
                f"server.tls.authorities={authorities}: expected a PEM file with certificates:"
                f" {error}"
            )

    server.verify_mode = ssl.CERT_REQUIRED if files.mutual else ssl.CERT_NONE
    client.check_hostname = address is not None
    try:
        _shake_hands(server, client, address)
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", None) or error.reason or error
        return (
            f"server.tls.certificate={certificate}: connecting to {address or 'a node'} with"
            f" server.tls.authorities={authorities} would fail: {reason}"
        )
    return None


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, address: str | None) -> None:
    """Perform a TLS handshake in memory, without sockets.

    Raises:
        SSLError: One side rejects the other side.
    """
    to_server = ssl.MemoryBIO()
    to_client = ssl.MemoryBIO()
    unfinished = [
        client.wrap_bio(to_client, to_server, server_hostname=address),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    # Each side continues until it needs a message of the other side.
    while unfinished:
        for side in list(unfinished):
            try:
                side.do_handshake()
                unfinished.remove(side)
            except ssl.SSLWantReadError:
                pass
