"""Keys that all servers share, such as ports, TLS, timeouts and limits: section `server`."""

from dataclasses import dataclass

from aligner.schema.options import option, section

MAX_PORT = 65535
"""Highest TCP port number."""


@dataclass
class PortsConfig:
    """Ports of the server; 0 means a free port."""

    http: int = option(0, "HTTP port.", minimum=0, maximum=MAX_PORT)
    grpc: int = option(0, "gRPC port.", minimum=0, maximum=MAX_PORT)
    metrics: int = option(0, "Port of the Prometheus metrics.", minimum=0, maximum=MAX_PORT)


@dataclass
class TLSConfig:
    """TLS of the HTTP and gRPC endpoints."""

    certificate: str | None = option(
        None,
        "PEM file of the servers' certificate. `auto` means that the run creates a certificate"
        " for the hosts of its servers; null means no TLS.",
    )
    key: str | None = option(None, "PEM file of the certificate's private key.")
    authorities: str | None = option(
        None, "PEM file of the certificate authorities that are used to check certificates."
    )
    mutual: bool = option(
        False,
        "Whether servers also require a client certificate (mutual TLS). The run's own clients"
        " use the servers' certificate.",
    )


@dataclass
class ServerConfig:
    """Settings of all servers."""

    python: str | None = option(
        None,
        "Path of the Python interpreter with which the ranks of critic, reward, teacher and"
        " generator run; null means the interpreter of the launcher. Its environment must have the"
        " same release of aligner, with the extra `server`.",
    )
    interface: str = option(
        "127.0.0.1",
        "Address or name of the network interface on which the endpoints listen.",
        read_if="algorithm.trainer=online|preferences or cluster.kind!=local",
    )
    guard: str = option(
        "key",
        "Authentication. `key`: every request except health checks and requests for metrics must"
        " contain the run's access key (file `access_key` in the run directory, created at"
        " launch); `none`: no authentication, so that anyone can send requests.",
        choices=("key", "none"),
    )
    tls: TLSConfig = section(TLSConfig)
    accept_unnumbered: bool = option(
        False,
        "Whether to accept `critic_train` requests without a sequence number, from third-party"
        " clients.",
        read_if="algorithm.with_critic=true or algorithm.advantage=gae",
    )
    start_timeout_s: float = option(
        180.0,
        "Maximum startup time of a role in seconds. The run fails if a role is not healthy"
        " after this time. While the data are prepared, only the time without progress counts.",
        minimum=1,
        read_if="always",
    )
    request_timeout_s: float = option(
        300.0,
        "Timeout in seconds of a request, including retries and a restart of the server. The"
        " timeout also applies to each step in the recovery of a lost critic (a restore or a"
        " replayed update).",
        minimum=1,
    )
    health_timeout_s: float = option(
        60.0,
        "Maximum time in seconds without an answer from a healthy server, or without a heartbeat"
        " from one of its ranks since the start of its process. After this time, the server is"
        " killed and restarted.",
        minimum=1,
    )
    drain_timeout_s: float = option(
        30.0,
        "Maximum time in seconds for a stopping server to complete its accepted requests.",
        minimum=0,
    )
    max_restarts: int = option(
        3,
        "Maximum number of restarts of a failed server per hour; 0 means that the first failure"
        " ends the run.",
        minimum=0,
    )
    max_batch_size: int = option(
        256,
        "Maximum number of sequences per request to `critic_infer`, `reward_model` or"
        " `teacher_logprobs`.",
        minimum=1,
    )
    max_sequence_length: int | None = option(
        None,
        "Maximum sequence length of a request in tokens; null means the model's maximum number"
        " of positions.",
        minimum=1,
    )
    max_request_tokens: int = option(
        2**22, "Maximum size of a request in tokens, including padding.", minimum=1
    )
    concurrent_requests: int = option(
        4,
        "Maximum number of concurrent requests that each of `critic_infer`, `reward_model` and"
        " `teacher_logprobs` accepts. Accepted requests that are waiting are computed in one"
        " batch.",
        minimum=1,
    )
    batch_tokens: int = option(
        16384,
        "Maximum number of tokens, including padding, in a batch of several requests; 1 means that"
        " each request is computed alone.",
        minimum=1,
    )
