"""The common part of all servers: `serve_role` runs one rank of a role.

It hosts Triton on rank 0, executes commands on every rank, and stops all ranks on a signal.
"""

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
from aligner.observability.timeline import open_timeline, report_stage
from aligner.paths import get_run_paths
from aligner.placement.addresses import (
    create_access_key,
    get_group_ports,
    get_interface_address,
    load_access,
    load_endpoints,
)
from aligner.placement.tls import create_certificate, get_tls_files
from aligner.schema import Config, PortsConfig
from aligner.servers.executor import SpmdExecutor
from aligner.servers.rank_commands import Handler
from aligner.servers.triton_host import EndpointFunction, Guard, TritonHost
from aligner.servers.validation import Limits, parse_control_request, validate
from aligner.servers.wire_protocol import (
    CONTROL,
    PROTOCOL_VERSION,
    EndpointSpec,
    InstanceError,
    decode_text,
    encode_text,
)

_log = logging.getLogger(__name__)

# Maximum size of a request: over HTTP, each token has up to four numbers, and each number is a text
# of at most 24 characters.
_REQUEST_OVERHEAD_BYTES = 2**20
_BYTES_PER_TOKEN = 128
# Texts of a request, such as error messages, are truncated to this length in logs.
_MAX_LOGGED_CHARACTERS = 500
# Names of operations in the timeline, if they differ from the operation's own name.
_SPAN_NAMES = {
    "infer": "values",
    "train": "critic_train",
    **dict.fromkeys(("begin_checkpoint", "finish_checkpoint"), "checkpoint"),
}


@dataclass(frozen=True)
class Caller:
    """Submits commands to the ranks, from the request threads of rank 0."""

    role: str
    """Role of the server, for messages."""
    executor: SpmdExecutor
    timeout_s: float
    """Time limit of a command in seconds."""

    def __call__(
        self,
        op: str,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        is_unbatched: bool = False,
        **arguments: Any,
    ) -> Any:
        """Execute a command on all ranks, and return its result.

        Args:
            op: Name of the operation.
            tensors: Tensors for the handler, on the CPU.
            is_unbatched: Whether the command must not be batched with other commands.
            **arguments: Further arguments for the handler; JSON values.

        Raises:
            AlignerError: The ranks refused the command, or did not complete it in time.
        """
        future = self.executor.submit(op, tensors, is_unbatched=is_unbatched, **arguments)
        try:
            return future.result(self.timeout_s)
        except concurrent.futures.TimeoutError:
            state = "was still queued and is dropped" if future.cancel() else "is still running"
            raise AlignerError(
                f"the {self.role} ranks did not complete {op} within {self.timeout_s:g} s"
                f" (server.request_timeout_s); the request {state}"
            ) from None


EndpointFactory = Callable[[Caller], Mapping[EndpointSpec, EndpointFunction]]
"""Function that creates rank 0's endpoint functions. They receive validated requests."""


def serve_role(
    role: str,
    config: Config,
    handlers: Mapping[str, Handler],
    create_endpoints: EndpointFactory,
    operations: Collection[str],
    limits: Limits,
) -> None:
    """Serve a role until SIGTERM, SIGINT or a shutdown request. Collective.

    The function returns after an orderly shutdown. An exception that is fatal for the ranks is
    raised on every rank that notices it.

    Args:
        role: Name of the role, or of its replica.
        config: The run's configuration.
        handlers: The function that each rank executes for an operation.
        create_endpoints: Creates the endpoint functions of rank 0.
        operations: Control operations whose handlers run on every rank.
        limits: Limits of requests.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    host = _create_host(config, role) if rank == 0 else None
    executor = SpmdExecutor(
        handlers,
        batch_tokens=config.server.batch_tokens,
        drain_s=config.server.drain_timeout_s,
        heartbeat_s=min(5.0, config.cluster.collective_timeout_s / 4),
        collective_timeout_s=config.cluster.collective_timeout_s,
        health_check=host.check if host is not None else None,
        timeline=open_timeline(config, role, rank, _SPAN_NAMES),
    )
    if host is None:
        # Only rank 0 starts a shutdown. If another rank exited by itself, the remaining ranks would
        # wait in a collective.
        _set_stop_action(lambda: None)
        executor.run()
        return

    caller = Caller(role, executor, config.server.request_timeout_s)
    instance = secrets.token_hex(8)
    functions = {
        **create_endpoints(caller),
        CONTROL: _create_control_function(
            role, instance, executor, caller, {op: handlers[op] for op in operations}
        ),
    }

    def stop_early() -> None:
        """Stop while Triton is starting."""
        _set_stop_action(executor.shutdown)
        executor.shutdown()
        raise _StoppedEarly

    _set_stop_action(stop_early)
    try:
        with contextlib.suppress(_StoppedEarly):
            report_stage(config, role, "starting Triton")
            host.start(
                {
                    spec: _with_validation(role, spec, serve, limits, instance)
                    for spec, serve in functions.items()
                }
            )
            _set_stop_action(executor.shutdown)
            report_stage(config, role, None)
            _log.info("%s: ready at %s", role, host.endpoint)
        executor.run()  # after an early stop, it returns immediately on every rank
    finally:
        host.stop()


def serve_frozen(
    role: str,
    config: Config,
    handlers: Mapping[str, Handler],
    create_endpoints: EndpointFactory,
    limits: Limits,
) -> None:
    """Serve a role whose models never change.

    The function calls `serve_role`. The operation `version` always returns version 0.
    """

    def version() -> dict[str, Any]:
        return {"protocol": PROTOCOL_VERSION, "version": 0}

    serve_role(
        role, config, {**handlers, "version": version}, create_endpoints, ("version",), limits
    )


def _create_host(config: Config, role: str) -> TritonHost:
    """Return the Triton host of a role, which is not started yet."""
    # If a launcher started this server, both exist already.
    create_access_key(config)
    create_certificate(config)

    server = config.server
    paths = get_run_paths(config)
    ports = get_group_ports(config)[role]
    log = paths.triton_log(role)
    if paths.endpoints.exists():  # the addresses that the launcher has given to the clients
        endpoint = load_endpoints(paths.endpoints)[role]
        ports = PortsConfig(endpoint.http, endpoint.grpc, endpoint.metrics)
    log.parent.mkdir(parents=True, exist_ok=True)

    guard = Guard(
        load_access(config).key,
        get_tls_files(config),
        _REQUEST_OVERHEAD_BYTES + _BYTES_PER_TOKEN * server.max_request_tokens,
    )
    address = get_interface_address(server.interface)
    # Half of the role's startup time, so that a second attempt to start Triton is possible.
    start_s = server.start_timeout_s / 2
    return TritonHost(
        address, ports, server.max_batch_size, server.concurrent_requests, guard, log, start_s
    )


class _StoppedEarly(BaseException):
    """A signal arrived while Triton was starting.

    It is a BaseException so that no handler between the signal handler and `serve_role` catches it.
    """


def _set_stop_action(action: Callable[[], None]) -> None:
    """Call the function on SIGTERM and SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: action())


def compute_model_limits(
    config: Config, directory: Path, vocab_size: int, key: str = "model.path"
) -> Limits:
    """Return the request limits of a model.

    Args:
        config: The run's configuration.
        directory: The model's directory in Hugging Face format.
        vocab_size: Size of the vocabulary.
        key: Configuration key of the directory, for errors.
    """
    shape = directory_shape(directory, key)
    server = config.server
    longest = min(shape.max_positions, server.max_sequence_length or shape.max_positions)
    return Limits(vocab_size, longest, server.max_request_tokens)


def copy_to_tensor(array: NDArray) -> Tensor:
    """Return a copy of a request's array as a tensor; Triton reuses the memory of the array."""
    return torch.tensor(array)


def _with_validation(
    role: str, spec: EndpointSpec, serve: EndpointFunction, limits: Limits, instance: str
) -> EndpointFunction:
    """Return the endpoint function with validation of requests and logging of errors."""

    def serve_validated(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
        """Validate and serve a request, and log an error of the request."""
        try:
            validate(spec, arrays, limits)
            if "instance" in arrays:
                _check_instance(decode_text(arrays["instance"]), instance)
            return serve(arrays)
        except AlignerError as error:
            trace = (
                f" (trace {arrays['trace_id'].ravel()[:1].tolist()!r:.{_MAX_LOGGED_CHARACTERS}})"
                if "trace_id" in arrays
                else ""
            )
            _log.warning(
                "%s: %s%s: %s: %r",
                role,
                spec.name,
                trace,
                type(error).__name__,
                str(error)[:_MAX_LOGGED_CHARACTERS],
            )
            raise

    return serve_validated


def _check_instance(requested: str, instance: str) -> None:
    """Raise InstanceError if a request is for another start of the server."""
    if requested != instance:
        raise InstanceError(
            f"the request is for server instance {requested!r}, but the running instance is"
            f" {instance!r}: the server was restarted"
        )


def _create_control_function(
    role: str,
    instance: str,
    executor: SpmdExecutor,
    caller: Caller,
    operations: Mapping[str, Handler],
) -> EndpointFunction:
    """Return the function of the endpoint `control`."""

    def control(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
        """Execute a JSON request, and return the JSON answer."""
        request = parse_control_request(decode_text(arrays["request"]), operations)
        op = request.pop("op")
        if (requested := request.pop("instance", None)) is not None:
            _check_instance(requested, instance)
        if op == "health":
            status = "stopping" if executor.is_stopping else "ok"
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
        return {"response": encode_text(json.dumps({**answer, "instance": instance}))}

    return control
