"""Checks of the section `server`: ports, interface, TLS files, timeouts and request limits.

The checks compare these settings with each other, with the batches of the run, and with this
machine.
"""

import ssl
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from aligner.errors import ConfigError
from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.placement.addresses import (
    get_client_address,
    get_configured_ports,
    get_interface_address,
    is_port_free,
)
from aligner.placement.roles import count_server_ranks, has_generator
from aligner.placement.server_environment import find_environment_problems
from aligner.placement.tls import AUTO, TLSFiles, get_tls_files
from aligner.schema import Config, EvaluationConfig, TLSConfig
from aligner.schema.derived import describe_max_sequence_length, get_max_sequence_length
from aligner.schema.evaluation_suites import parse_evaluation_suites
from aligner.schema.server import MAX_PORT


def find_problems(
    config: Config, model: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield a line for each problem of the servers.

    Servers must be able to listen on their ports, be reachable for the run's clients, and accept
    the run's own requests.
    """
    # In a job on a cluster, `prepare` checks the environment on its node.
    if config.cluster.kind == "local":
        yield from find_environment_problems(config)
    yield from _find_port_problems(config)
    yield from find_tls_problems(config)
    yield from _find_timeout_problems(config)
    if not config.algorithm.generates_samples:
        return
    max_length = get_max_sequence_length(config)
    limit = config.server.max_sequence_length
    if limit is not None and limit < max_length:
        yield (
            f"server.max_sequence_length={limit}: must be at least {max_length}, the longest"
            f" sequence ({describe_max_sequence_length(config)}); set a larger value or null"
        )
    yield from _find_request_problems(config, max_length)


def _find_timeout_problems(config: Config) -> Iterator[str]:
    """Yield timeouts that are shorter than a permitted start or restart of a server."""
    server = config.server
    cluster = config.cluster
    ranks_by_server = count_server_ranks(config)
    if not ranks_by_server:
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
    multi_rank_server = next((group for group, ranks in ranks_by_server.items() if ranks > 1), None)
    if multi_rank_server is not None and cluster.collective_timeout_s < server.start_timeout_s:
        yield (
            f"cluster.collective_timeout_s={cluster.collective_timeout_s:g}: must be at least"
            f" server.start_timeout_s={server.start_timeout_s:g}, because the other ranks of the"
            f" {multi_rank_server} server wait for its rank 0 to start"
        )


def _find_request_problems(config: Config, max_length: int) -> Iterator[str]:
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
            max_length,
            "reduce server.max_batch_size",
        )
    ]
    if has_critic:
        rows = samples // config.algorithm.minibatches
        requests.append(
            ("for a critic update with", rows, max_length, "increase algorithm.minibatches")
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
    for suite in parse_evaluation_suites(config) if config.evaluation.every else ():
        requests += _iterate_evaluation_requests(config, suite.settings, max_length)

    for purpose, rows, tokens, alternative in requests:
        if rows * tokens > server.max_request_tokens:
            yield (
                f"server.max_request_tokens={server.max_request_tokens}: too small for a request"
                f" {purpose} {rows} sequences of up to {tokens} tokens; set {rows * tokens} or"
                f" more, or {alternative}"
            )


def _iterate_evaluation_requests(
    config: Config, settings: EvaluationConfig, max_length: int
) -> Iterator[tuple[str, int, int, str]]:
    """Yield the largest requests of an evaluation suite; see `_find_request_problems`.

    An evaluation requests all its prompts at once. The number of prompts in a file is not known
    before the file is read, so that a suite with a file and without `count` yields no request for
    generation.

    Args:
        config: Configuration of the run.
        settings: Settings of the suite.
        max_length: Length of the longest sequence in tokens.

    Yields:
        Purpose, rows, tokens per row, and the alternative to a higher limit.
    """
    alternative = "reduce evaluation.count"
    prompts = min(len(settings.prompts) or sys.maxsize, settings.count or sys.maxsize)
    if settings.function is None:
        rows = min(prompts * settings.samples, config.server.max_batch_size)
        yield "for evaluation scores of", rows, max_length, "reduce server.max_batch_size"
    if has_generator(config) and prompts < sys.maxsize:
        yield (
            "to generate for an evaluation from",
            prompts,
            config.data.max_prompt_tokens,
            alternative,
        )


def _find_port_problems(config: Config) -> Iterator[str]:
    """Yield a line for each fixed port that is out of range, used twice or in use.

    An interface that does not exist is a problem, too. Interfaces and free ports are tested only if
    the servers run on this machine, not if this machine submits a Slurm job.
    """
    interface = config.server.interface
    is_local = config.cluster.kind == "local"
    try:
        address = get_interface_address(interface) if is_local else ""
        if is_local:
            is_port_free(address, 0)  # raises OSError if no socket can be bound to the interface
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
    for key, port in get_configured_ports(config).items():
        if port > MAX_PORT:
            yield f"{key}={port}: must be at most {MAX_PORT}"
        elif port in key_by_port:
            yield f"{key}={port}: {key_by_port[port]} is the same port; set different ports"
        elif is_local and not is_port_free(address, port):
            yield (
                f"{key}={port}: the port is in use on {address}; set another port, or 0 for a"
                " free port"
            )
        key_by_port.setdefault(port, key)


def find_tls_problems(config: Config) -> Iterator[str]:
    """Yield a line for each reason why the run's clients could not connect to its servers."""
    if config.server.tls.certificate == AUTO:
        yield from _find_ineffective_tls_files(config.server.tls)
        return
    file_problems = list(_find_missing_tls_files(config.server.tls))
    yield from file_problems
    files = get_tls_files(config)
    if file_problems or files is None:
        return
    try:
        address = get_client_address(config) if config.cluster.kind == "local" else None
    except ConfigError:
        return  # _find_port_problems reports an unknown interface
    problem = _find_handshake_problem(files, address)
    if problem is not None:
        yield problem


def check_certificate(config: Config, hosts: Iterable[str]) -> None:
    """Raise ConfigError if the run's clients would reject the servers' certificate on a host.

    Args:
        config: Configuration of the run.
        hosts: Host names or addresses of the servers.
    """
    files = get_tls_files(config)
    if files is None:
        return
    # Sorted, so that the same host is reported at each launch.
    for host in sorted({*hosts}):
        if (problem := _find_handshake_problem(files, host)) is not None:
            raise ConfigError(problem)


def _find_ineffective_tls_files(tls: TLSConfig) -> Iterator[str]:
    """Yield the TLS files that are set although the run creates its own files."""
    for name in ("key", "authorities"):
        if (file := getattr(tls, name)) is not None:
            yield (
                f"server.tls.{name}={file}: is not supported with server.tls.certificate={AUTO},"
                f" where the run creates its own files; remove server.tls.{name}"
            )


def _find_missing_tls_files(tls: TLSConfig) -> Iterator[str]:
    """Yield the TLS settings that lack another setting, and the files that do not exist."""
    files = {"certificate": tls.certificate, "key": tls.key, "authorities": tls.authorities}
    if tls.certificate is None:
        ineffective_names = [name for name in ("key", "authorities") if files[name] is not None] + [
            "mutual"
        ] * tls.mutual
        for name in ineffective_names:
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


def _find_handshake_problem(files: TLSFiles, address: str | None) -> str | None:
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
        _perform_handshake(server, client, address)
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", None) or error.reason or error
        return (
            f"server.tls.certificate={certificate}: connecting to {address or 'a node'} with"
            f" server.tls.authorities={authorities} would fail: {reason}"
        )
    return None


def _perform_handshake(server: ssl.SSLContext, client: ssl.SSLContext, address: str | None) -> None:
    """Perform a TLS handshake in memory, without sockets.

    Raises:
        SSLError: One side rejects the other side.
    """
    to_server = ssl.MemoryBIO()
    to_client = ssl.MemoryBIO()
    unfinished_sides = [
        client.wrap_bio(to_client, to_server, server_hostname=address),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    # Each side continues until it needs a message of the other side.
    while unfinished_sides:
        for side in list(unfinished_sides):
            try:
                side.do_handshake()
                unfinished_sides.remove(side)
            except ssl.SSLWantReadError:
                pass
