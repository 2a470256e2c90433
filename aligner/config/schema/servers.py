"""The critic, the reward, and what their servers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aligner.config.schema.models import MegatronModel, TrainedModel
from aligner.config.schema.options import option, section


@dataclass
class Ports:
    """Listening ports of a server role; 0 takes a free one."""

    http: int = option(0, "HTTP port", minimum=0)
    grpc: int = option(0, "gRPC port", minimum=0)
    metrics: int = option(0, "Prometheus metrics port", minimum=0)


@dataclass
class Critic(TrainedModel):
    """The value model, a server on its own devices."""

    num_layers: int | None = option(
        None,
        "build the critic, or the reward model that is trained, from the model's first layers; all of them when null",
        minimum=1,
    )
    with_reward: bool = option(
        False,
        "serve the reward from the critic's processes too: no reward role, and where both are models each waits in host"
        " memory while the other works",
    )
    ports: Ports = section(Ports)


@dataclass
class Reward(MegatronModel):
    """What scores the samples; the Megatron keys speak of a reward model (kind=model). Several sources are `sources`."""

    kind: str = option(
        "function",
        "function: a Python function; model: a Megatron reward model; remote: an HTTP scorer; combined: the weighted sum of"
        " `sources`",
        choices=("function", "model", "remote", "combined"),
    )
    function: str = option("digit_fraction", "a built-in scorer's name, or module:callable (kind=function)")
    path: str | None = option(None, "reward model directory (kind=model)")
    config: dict[str, Any] = option(
        {},
        "its config.json as YAML, which `aligner validate` goes by while there is no such directory; what it does not say is"
        " as in model.config, all of it when empty (kind=model)",
    )
    url: str | None = option(None, "address that takes queries and answers rewards, as OpenRLHF's remote_rm_url (kind=remote)")
    timeout_s: float = option(60.0, "deadline of a request to the remote scorer, retries included (kind=remote)", minimum=0.1)
    gain: float = option(1.0, "scores are multiplied by it: normalization to a mean and deviation is gain and bias")
    bias: float = option(0.0, "and this is added")
    sources: dict[str, Any] = option(
        {}, "name to kind, weight, gain, bias and function, path, or url and timeout_s (kind=combined)"
    )
    missing_end_score: float | None = option(
        None, "score of a response without an end, an end-of-sequence token or rollout.truncate_token; its own when null"
    )
    replicas: int = option(1, "servers with the same scorer; a request goes to the one with the fewest under way", minimum=1)
    ports: Ports = section(Ports)


@dataclass
class TLS:
    """TLS of the endpoints' gRPC; HTTP, which has none in Triton, then serves this machine alone."""

    certificate: str | None = option(None, "PEM file with the servers' certificate; no TLS when null")
    key: str | None = option(None, "PEM file with its private key")
    authorities: str | None = option(None, "PEM file with the authorities that certificates are checked against")
    mutual: bool = option(False, "servers ask clients for a certificate too; the run's own show the servers'")


@dataclass
class Server:
    """What the critic and reward servers share."""

    interface: str = option("127.0.0.1", "address, or name of the network interface, that the endpoints listen on")
    guard: str = option(
        "key",
        "key: requests must carry the run's key, made at launch (access_key in the run directory); none: anyone is served",
        choices=("key", "none"),
    )
    tls: TLS = section(TLS)
    accept_unnumbered: bool = option(False, "serve critic_train requests that carry no sequence number (foreign clients)")
    start_timeout_s: float = option(180.0, "a role that is not healthy by then ends the run", minimum=1)
    request_timeout_s: float = option(
        300.0,
        "deadline of a request, its retries and a server's restart included; also of each step by which a lost critic is"
        " brought back, a restore or a replayed update",
        minimum=1,
    )
    drain_timeout_s: float = option(30.0, "a server that is told to stop finishes what it has taken for so long", minimum=0)
    max_restarts: int = option(3, "a server that dies is started again so often; 0: its end is the run's", minimum=0)
    max_batch_size: int = option(256, "largest batch of the batching endpoints", minimum=1)
    max_sequence_length: int | None = option(
        None, "longest sequence that is taken, in tokens; the model's positions when null", minimum=1
    )
    max_request_tokens: int = option(2**22, "largest request, in tokens, padding included", minimum=1)
    concurrent_requests: int = option(
        4, "requests that an inference endpoint takes at a time; those that wait together are computed together", minimum=1
    )
    batch_tokens: int = option(16384, "tokens of the requests that are computed together, at most", minimum=1)
