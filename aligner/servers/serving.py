"""The main of a server role's rank: rank 0 hosts Triton, every rank executes, a signal ends them all."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import signal
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from aligner.config.endpoints import load_endpoints
from aligner.config.families import read_config
from aligner.config.paths import run_paths
from aligner.config.schema import Config, Ports
from aligner.errors import AlignerError
from aligner.servers.executor import Handler, SpmdExecutor
from aligner.servers.host import Serve, TritonHost
from aligner.servers.protocol import (
    CONTROL,
    PROTOCOL_VERSION,
    EndpointSpec,
    RequestError,
    array_text,
    text_array,
)
from aligner.servers.validation import Limits, validate

RoleName = Literal["critic", "reward"]


class Caller:
    """Rank 0's way from a request thread to the ranks."""

    def __init__(self, role: str, executor: SpmdExecutor, timeout_s: float) -> None:
        self._role = role
        self._executor = executor
        self._timeout_s = timeout_s

    def __call__(self, op: str, tensors: Mapping[str, Tensor] | None = None, **arguments: Any) -> Any:
        """The ranks' result. Raises AlignerError when they refuse, or have not answered in time."""
        future = self._executor.submit(op, tensors, **arguments)
        try:
            return future.result(self._timeout_s)
        except concurrent.futures.TimeoutError:
            state = "was not begun and is dropped" if future.cancel() else "goes on"
            raise AlignerError(
                f"the {self._role}'s ranks did not answer {op} within {self._timeout_s:g} s; it {state}"
            ) from None


def serve_role(
    role: RoleName,
    config: Config,
    handlers: Mapping[str, Handler],
    endpoints: Callable[[Caller], Mapping[EndpointSpec, Serve]],
    operations: Collection[str],
    limits: Limits,
) -> None:
    """Serve until SIGTERM, SIGINT or a shutdown request; returns when the role has ended in order.

    `endpoints` makes rank 0's endpoint functions, which get validated requests; `operations` are the control operations
    whose handlers run on every rank. Raises whatever was fatal for the world, on every rank that learns of it.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    host = TritonHost(config.server.interface, _ports(config, role), config.server.max_batch_size) if rank == 0 else None
    executor = SpmdExecutor(
        handlers,
        heartbeat_s=min(5.0, config.cluster.collective_timeout_s / 4),
        watch=host.check if host is not None else None,
    )
    if host is None:
        # Rank 0 ends the world: another rank that left by itself would strand the rest in a collective.
        _on_stop_signals(lambda: None)
        executor.run()
        return
    caller = Caller(role, executor, config.server.request_timeout_s)
    served = {**endpoints(caller), CONTROL: _control(role, executor, caller, operations)}
    starting = True

    def stop() -> None:
        nonlocal starting
        executor.shutdown()
        if starting:
            starting = False
            raise _StoppedEarly

    _on_stop_signals(stop)
    try:
        with contextlib.suppress(_StoppedEarly):
            host.start({spec: _validated(spec, serve, limits) for spec, serve in served.items()})
            starting = False
            print(f"{role}: ready at {host.endpoint}", flush=True)
        executor.run()  # returns at once, on every rank, after an early stop
    finally:
        host.stop()


def _ports(config: Config, role: RoleName) -> Ports:
    """The ports that the launcher promised the run's clients; those of the configuration where there was no launcher."""
    promised = run_paths(config).endpoints
    if not promised.exists():
        return getattr(config, role).ports
    endpoint = load_endpoints(promised)[role]
    return Ports(endpoint.http, endpoint.grpc, endpoint.metrics)


class _StoppedEarly(BaseException):
    """A signal came while Triton was starting; nothing in between may swallow it."""


def _on_stop_signals(action: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: action())


def model_limits(config: Config, directory: Path, vocab_size: int) -> Limits:
    """The limits of a model in a Hugging Face directory."""
    path = directory / "config.json"
    shape = read_config(json.loads(path.read_text()), str(path))
    server = config.server
    longest = min(shape.max_positions, server.max_sequence_length or shape.max_positions)
    return Limits(vocab_size, longest, server.max_batch_size, server.max_request_tokens)


def tensor(array: NDArray) -> Tensor:
    """A copy of a request's array, which Triton takes back."""
    return torch.tensor(array)


def _validated(spec: EndpointSpec, serve: Serve, limits: Limits) -> Serve:
    def checked(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
        validate(spec, arrays, limits)
        return serve(arrays)

    return checked


def _control(role: RoleName, executor: SpmdExecutor, caller: Caller, operations: Collection[str]) -> Serve:
    allowed = ("health", "shutdown", *operations)

    def control(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
        """A JSON request's JSON answer."""
        request = _control_request(array_text(arrays["request"]), allowed)
        op = request.pop("op")
        if op == "health":
            answer = {"status": "ok", "role": role, "protocol": PROTOCOL_VERSION, "queue_depth": executor.queue_depth}
        elif op == "shutdown":
            executor.shutdown()
            answer = {"status": "stopping", "role": role}
        else:
            answer = caller(op, **request)
        return {"response": text_array(json.dumps(answer))}

    return control


def _control_request(text: str, allowed: Collection[str]) -> dict[str, Any]:
    """Raises RequestError unless it is an allowed operation with exactly its arguments."""
    try:
        request = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"control: request is not JSON: {error}") from error
    op = request.get("op") if isinstance(request, dict) else None
    if op not in allowed:
        raise RequestError(f"control: got op {op!r}, allowed: {', '.join(allowed)}")
    expected = {"op", "step"} if op in ("checkpoint", "begin_checkpoint", "restore") else {"op"}
    if set(request) != expected:
        raise RequestError(f"control: {op} got keys {', '.join(sorted(request))}, allowed: {', '.join(sorted(expected))}")
    step = request.get("step", 0)
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise RequestError(f"control: {op} got step {step!r}, allowed: an integer, 0 and up")
    return request
