"""Ports, interface, TLS files and limits of the servers, against each other, the batches and this
machine."""

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
    """What servers cannot listen on, would not be reached at, or would refuse of the run's own
    requests."""
    if (
        config.cluster.kind == "local"
        and (groups := server_ranks(config))
        and (lack := lacking("server") or unfit_numpy())
    ):
        yield f"this run starts servers ({', '.join(groups)}): {lack}"
    yield from _port_problems(config)
    yield from tls_problems(config)
    yield from _patience_problems(config)
    if not config.algorithm.generates:
        return
    longest, taken = longest_sequence(config), config.server.max_sequence_length
    if taken is not None and taken < longest:
        yield (
            f"server.max_sequence_length={taken}: must be at least {longest}, the longest"
            f" sequence ({longest_sequence_keys(config)}); set a larger value or null"
        )
    yield from _request_problems(config, longest)


def _patience_problems(config: Config) -> Iterator[str]:
    """Deadlines that would end a run in which a server only takes what time it may, to start or to
    be started again."""
    server, cluster, groups = config.server, config.cluster, server_ranks(config)
    if not groups:
        return
    again_s = server.health_timeout_s + cluster.stop_timeout_s + server.start_timeout_s
    if server.max_restarts and server.request_timeout_s <= again_s:
        yield (
            f"server.request_timeout_s={server.request_timeout_s:g}: must be above {again_s:g},"
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
    """Requests that the servers would refuse whole: padding counts, so every row may be as long as
    the longest."""
    rollout, server, critic = config.rollout, config.server, config.algorithm.has_critic
    prompts = rollout.prompts_per_micro_batch
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    # Of a batch that was drawn ahead the values are asked for when it is taken, as a whole.
    asked = samples if critic and rollout.steps_ahead else prompts * rollout.samples_per_prompt
    requests = [
        (
            "for scores or values of",
            min(asked, server.max_batch_size),
            longest,
            "reduce server.max_batch_size",
        )
    ]
    if critic:
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
    for what, rows, tokens, instead in requests:
        if rows * tokens > server.max_request_tokens:
            yield (
                f"server.max_request_tokens={server.max_request_tokens}: too small for a request"
                f" {what} {rows} sequences of up to {tokens} tokens; set {rows * tokens} or more,"
                f" or {instead}"
            )


def _evaluation_requests(
    config: Config, settings: EvaluationConfig, longest: int
) -> Iterator[tuple[str, int, int, str]]:
    """Those of held-out prompts, all of which are asked for at once. How many a file has is not
    known before it is read."""
    instead = "reduce evaluation.count"
    prompts = min(len(settings.prompts) or sys.maxsize, settings.count or sys.maxsize)
    if settings.function is None:
        rows = min(prompts * settings.samples, config.server.max_batch_size)
        yield "for evaluation scores of", rows, longest, "reduce server.max_batch_size"
    if has_generator(config) and prompts < sys.maxsize:
        yield "to generate for an evaluation from", prompts, config.data.max_prompt_tokens, instead


def _port_problems(config: Config) -> Iterator[str]:
    """One line for each fixed port that is out of range, given twice or in use, and for an unknown
    interface.

    What is in use, and which interfaces there are, is asked where the servers will be alone: not
    where a job is submitted.
    """
    interface, is_here = config.server.interface, config.cluster.kind == "local"
    try:
        address = interface_address(interface) if is_here else ""
        if is_here:
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
    taken: dict[int, str] = {}
    for key, port in explicit_ports(config).items():
        if port > LAST_PORT:
            yield f"{key}={port}: must be at most {LAST_PORT}"
        elif port in taken:
            yield f"{key}={port}: {taken[port]} is the same port; set different ports"
        elif is_here and not port_is_free(address, port):
            yield (
                f"{key}={port}: the port is in use on {address}; set another port, or 0 for a"
                " free port"
            )
        taken.setdefault(port, key)


def tls_problems(config: Config) -> Iterator[str]:
    """One line for each thing that would keep the run's own clients from its servers."""
    if config.server.tls.certificate == AUTO:
        yield from _unread(config.server.tls)
        return
    missing = list(_missing(config.server.tls))
    yield from missing
    files = tls_files(config)
    if missing or files is None:
        return
    try:
        address = client_address(config) if config.cluster.kind == "local" else None
    except ConfigError:
        return  # told with the ports
    problem = _handshake_problem(files, address)
    if problem is not None:
        yield problem


def check_certificate(config: Config, hosts: Iterable[str]) -> None:
    """Raise ConfigError where the run's own clients would not accept the servers' certificate on
    one of these hosts."""
    files = tls_files(config)
    if files is None:
        return
    for host in sorted({*hosts}):
        if (problem := _handshake_problem(files, host)) is not None:
            raise ConfigError(problem)


def _unread(tls: TLSConfig) -> Iterator[str]:
    for name in ("key", "authorities"):
        if (file := getattr(tls, name)) is not None:
            yield (
                f"server.tls.{name}={file}: is not supported with server.tls.certificate={AUTO},"
                f" where the run creates its own files; remove server.tls.{name}"
            )


def _missing(tls: TLSConfig) -> Iterator[str]:
    files = {"certificate": tls.certificate, "key": tls.key, "authorities": tls.authorities}
    if tls.certificate is None:
        given = [name for name in ("key", "authorities") if files[name] is not None] + [
            "mutual"
        ] * tls.mutual
        for name in given:
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
    """What a client that connects to `address`, or to any, would object to, or the server where the
    TLS is mutual."""
    certificate, key, authorities = files.certificate, files.key, files.authorities
    server, client = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )
    for context in (server, client):
        try:
            # The empty password stands for none: asked for one, OpenSSL would wait for the
            # terminal.
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
    """A handshake in memory. Raises SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=address),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass
