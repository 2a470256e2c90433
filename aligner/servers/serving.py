"""The main of a server role's rank: rank 0 hosts Triton, every rank executes, a signal ends them
all."""

import concurrent.futures
import contextlib
import json
import logging
import secrets
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from aligner.errors import AlignerError
from aligner.models.model_source import directory_shape
from aligner.observability.timeline import open_timeline, tell_stage
from aligner.paths import run_paths
from aligner.placement.addresses import (
    create_access_key,
    group_ports,
    interface_address,
    load_endpoints,
    run_access,
)
from aligner.placement.tls import create_certificate, tls_files
from aligner.schema import Config, PortsConfig
from aligner.servers.executor import SpmdExecutor
from aligner.servers.rank_commands import Handler
from aligner.servers.triton_host import Guard, Serve, TritonHost
from aligner.servers.validation import Limits, control_request, validate
from aligner.servers.wire_protocol import (
    CONTROL,
    PROTOCOL_VERSION,
    EndpointSpec,
    InstanceError,
    array_text,
    text_array,
)

_log = logging.getLogger(__name__)

_SPARE_BYTES, _BYTES_A_TOKEN = 2**20, 128
"""A request that is served has no more: four numbers a token, each a text of at most 24 characters
over HTTP."""
_LOGGED = 500  # characters of what a request says that are logged
_SPANS = {
    "infer": "values",
    "train": "critic_train",
    **dict.fromkeys(("begin_checkpoint", "finish_checkpoint"), "checkpoint"),
}
"""What the ops are called in the timeline, where that is not their own name."""


@dataclass(frozen=True)
class Caller:
    """Rank 0's way from a request thread to the ranks."""

    role: str
    executor: SpmdExecutor
    timeout_s: float

    def __call__(
        self,
        op: str,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        alone: bool = False,
        **arguments: Any,
    ) -> Any:
        """The ranks' result. Raises AlignerError when they refuse, or have not answered in time."""
        future = self.executor.submit(op, tensors, alone=alone, **arguments)
        try:
            return future.result(self.timeout_s)
        except concurrent.futures.TimeoutError:
            state = "was still queued and is dropped" if future.cancel() else "is still running"
            raise AlignerError(
                f"the {self.role} ranks did not complete {op} within {self.timeout_s:g} s"
                f" (server.request_timeout_s); the request {state}"
            ) from None


Endpoints = Callable[[Caller], Mapping[EndpointSpec, Serve]]
"""Makes rank 0's endpoint functions, which get validated requests."""


def serve_role(
    role: str,
    config: Config,
    handlers: Mapping[str, Handler],
    endpoints: Endpoints,
    operations: Collection[str],
    limits: Limits,
) -> None:
    """Serve until SIGTERM, SIGINT or a shutdown request; returns when the role has ended in order.

    `operations` are the control operations whose handlers run on every rank. Raises whatever was
    fatal for the world, on every rank that learns of it.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    host = _host(config, role) if rank == 0 else None
    executor = SpmdExecutor(
        handlers,
        batch_tokens=config.server.batch_tokens,
        drain_s=config.server.drain_timeout_s,
        heartbeat_s=min(5.0, config.cluster.collective_timeout_s / 4),
        collective_timeout_s=config.cluster.collective_timeout_s,
        watch=host.check if host is not None else None,
        timeline=open_timeline(config, role, rank, _SPANS),
    )
    if host is None:
        # Rank 0 ends the world: another rank that left by itself would strand the rest in a
        # collective.
        _on_stop_signals(lambda: None)
        executor.run()
        return
    caller = Caller(role, executor, config.server.request_timeout_s)
    instance = secrets.token_hex(8)
    served = {
        **endpoints(caller),
        CONTROL: _control(
            role, instance, executor, caller, {op: handlers[op] for op in operations}
        ),
    }

    def stop_early() -> None:
        _on_stop_signals(executor.shutdown)
        executor.shutdown()
        raise _StoppedEarly

    _on_stop_signals(stop_early)
    try:
        with contextlib.suppress(_StoppedEarly):
            tell_stage(config, role, "starting Triton")
            host.start(
                {
                    spec: _checked(role, spec, serve, limits, instance)
                    for spec, serve in served.items()
                }
            )
            _on_stop_signals(executor.shutdown)
            tell_stage(config, role, None)
            _log.info("%s: ready at %s", role, host.endpoint)
        executor.run()  # returns at once, on every rank, after an early stop
    finally:
        host.stop()


def serve_frozen(
    role: str, config: Config, handlers: Mapping[str, Handler], endpoints: Endpoints, limits: Limits
) -> None:
    """`serve_role` for what never learns: of its version there is no more to tell than the
    protocol's."""

    def version() -> dict[str, Any]:
        return {"protocol": PROTOCOL_VERSION, "version": 0}

    serve_role(role, config, {**handlers, "version": version}, endpoints, ("version",), limits)


def _host(config: Config, role: str) -> TritonHost:
    create_access_key(config)  # there are both already where a launcher started this server
    create_certificate(config)
    server, paths = config.server, run_paths(config)
    ports, log = group_ports(config)[role], paths.triton_log(role)
    if paths.endpoints.exists():  # those that the launcher promised the run's clients
        endpoint = load_endpoints(paths.endpoints)[role]
        ports = PortsConfig(endpoint.http, endpoint.grpc, endpoint.metrics)
    log.parent.mkdir(parents=True, exist_ok=True)
    guard = Guard(
        run_access(config).key,
        tls_files(config),
        _SPARE_BYTES + _BYTES_A_TOKEN * server.max_request_tokens,
    )
    address = interface_address(server.interface)
    # Triton can be tried again before whoever waits for the role gives up
    start_s = server.start_timeout_s / 2
    return TritonHost(
        address, ports, server.max_batch_size, server.concurrent_requests, guard, log, start_s
    )


class _StoppedEarly(BaseException):
    """A signal came while Triton was starting; nothing in between may swallow it."""


def _on_stop_signals(action: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: action())


def model_limits(
    config: Config, directory: Path, vocab_size: int, key: str = "model.path"
) -> Limits:
    """The limits of a model in a Hugging Face directory, which `key` names."""
    shape = directory_shape(directory, key)
    server = config.server
    longest = min(shape.max_positions, server.max_sequence_length or shape.max_positions)
    return Limits(vocab_size, longest, server.max_request_tokens)


def tensor(array: NDArray) -> Tensor:
    """A copy of a request's array, which Triton takes back."""
    return torch.tensor(array)


def _checked(role: str, spec: EndpointSpec, serve: Serve, limits: Limits, instance: str) -> Serve:
    def checked(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
        try:
            validate(spec, arrays, limits)
            if "instance" in arrays:
                _check_instance(array_text(arrays["instance"]), instance)
            return serve(arrays)
        except AlignerError as error:
            trace = (
                f" (trace {arrays['trace_id'].ravel()[:1].tolist()!r:.{_LOGGED}})"
                if "trace_id" in arrays
                else ""
            )
            _log.warning(
                "%s: %s%s: %s: %r",
                role,
                spec.name,
                trace,
                type(error).__name__,
                str(error)[:_LOGGED],
            )
            raise

    return checked


def _check_instance(wanted: str, instance: str) -> None:
    if wanted != instance:
        raise InstanceError(
            f"the request is for server instance {wanted!r}, but the running instance is"
            f" {instance!r}: the server was restarted"
        )


def _control(
    role: str,
    instance: str,
    executor: SpmdExecutor,
    caller: Caller,
    operations: Mapping[str, Handler],
) -> Serve:
    def control(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
        """A JSON request's JSON answer."""
        request = control_request(array_text(arrays["request"]), operations)
        op = request.pop("op")
        if (wanted := request.pop("instance", None)) is not None:
            _check_instance(wanted, instance)
        if op == "health":
            status = "stopping" if executor.stopping else "ok"
            answer = {
                "status": status,
                "role": role,
                "protocol": PROTOCOL_VERSION,
                "queue_depth": executor.queue_depth,
            }
        elif op == "shutdown":
            _log.info("%s: received a shutdown request; shutting down", role)
            executor.shutdown()
            answer = {"status": "stopping", "role": role}
        else:
            answer = caller(op, **request)
        return {"response": text_array(json.dumps({**answer, "instance": instance}))}

    return control
