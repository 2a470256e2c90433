"""What the servers share: ports, keys, TLS, limits."""

from dataclasses import dataclass

from aligner.schema.options import option, section

LAST_PORT = 65535


@dataclass
class PortsConfig:
    """Listening ports of a server role; 0 takes a free one."""

    http: int = option(0, "HTTP port", minimum=0, maximum=LAST_PORT)
    grpc: int = option(0, "gRPC port", minimum=0, maximum=LAST_PORT)
    metrics: int = option(0, "Prometheus metrics port", minimum=0, maximum=LAST_PORT)


@dataclass
class TLSConfig:
    """TLS of the endpoints, HTTP and gRPC."""

    certificate: str | None = option(
        None,
        "PEM file with the servers' certificate; auto: the run makes one for its servers' hosts; no"
        " TLS when null",
    )
    key: str | None = option(None, "PEM file with its private key")
    authorities: str | None = option(
        None, "PEM file with the authorities that certificates are checked against"
    )
    mutual: bool = option(
        False, "servers ask clients for a certificate too; the run's own show the servers'"
    )


@dataclass
class ServerConfig:
    """What all servers share."""

    interface: str = option(
        "127.0.0.1",
        "address, or name of the network interface, that the endpoints listen on",
        read="algorithm.trainer=online|preferences or cluster.kind=slurm",
    )
    guard: str = option(
        "key",
        "key: requests must carry the run's key, made at launch (access_key in the run directory);"
        " none: anyone is served",
        choices=("key", "none"),
    )
    tls: TLSConfig = section(TLSConfig)
    accept_unnumbered: bool = option(
        False,
        "serve critic_train requests that carry no sequence number (foreign clients)",
        read="algorithm.with_critic=true or algorithm.advantage=gae",
    )
    start_timeout_s: float = option(
        180.0, "a role that is not healthy by then ends the run", minimum=1, read="always"
    )
    request_timeout_s: float = option(
        300.0,
        "deadline of a request, its retries and a server's restart included; also of each step by"
        " which a lost critic is brought back, a restore or a replayed update",
        minimum=1,
    )
    health_timeout_s: float = option(
        60.0,
        "a server that was healthy and gives no answer for so long, or a rank of it that shows no"
        " life, is killed and started again",
        minimum=1,
    )
    drain_timeout_s: float = option(
        30.0, "a server that is told to stop finishes what it has taken for so long", minimum=0
    )
    max_restarts: int = option(
        3, "a server that dies is started again so often; 0: its end is the run's", minimum=0
    )
    max_batch_size: int = option(256, "largest batch of the batching endpoints", minimum=1)
    max_sequence_length: int | None = option(
        None,
        "longest sequence that is taken, in tokens; the model's positions when null",
        minimum=1,
    )
    max_request_tokens: int = option(
        2**22, "largest request, in tokens, padding included", minimum=1
    )
    concurrent_requests: int = option(
        4,
        "requests that an inference endpoint takes at a time; those that wait together are computed"
        " together",
        minimum=1,
    )
    batch_tokens: int = option(
        16384, "tokens of the requests that are computed together, at most", minimum=1
    )
