"""One world of ranks that executes commands in lockstep, in the order in which they arrived at rank 0."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import AlignerError

Handler = Callable[..., Any]
"""Called with the command's tensors and arguments by keyword, on every rank."""

_DTYPES = {str(dtype): dtype for dtype in (torch.int64, torch.float32, torch.bool)}
_POLL_S = 0.2  # how soon a shutdown that a signal handler asked for is seen
_HEARTBEAT, _SHUTDOWN = "_heartbeat", "_shutdown"


class ServerStopping(AlignerError):
    """The server is shutting down and takes no more requests."""


@dataclass(frozen=True)
class Command:
    """Work for the whole world."""

    op: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON values"""
    future: Future[Any] = field(default_factory=Future)


class SpmdExecutor:
    """Rank 0 takes commands from any thread; every rank runs the same handler on the same tensors.

    An AlignerError that every rank raises goes to the command's caller, and the world goes on; anything else ends the
    world, because its ranks may have parted ways. Ranks wait for each other in gloo, whatever the model computes in.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        heartbeat_s: float = 5.0,
        watch: Callable[[], None] | None = None,
    ) -> None:
        """`heartbeat_s` must be well below the collective timeout.

        `watch` is called on rank 0 about once a heartbeat, and ends the world by raising.
        """
        self._handlers = dict(handlers)
        self._heartbeat_s = heartbeat_s
        self._watch = watch
        self._size = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._group = dist.new_group(backend="gloo") if self._size > 1 else None
        self._waiting: deque[Command] = deque()
        self._arrived = threading.Condition()
        self._running: Command | None = None
        self._stopping = False
        self._closed = False

    @property
    def queue_depth(self) -> int:
        """Commands that wait, the running one not counted."""
        return len(self._waiting)

    def submit(self, op: str, tensors: Mapping[str, Tensor] | None = None, **arguments: Any) -> Future[Any]:
        """Queue a command on rank 0. The future holds rank 0's result, or the AlignerError that all ranks raised."""
        command = Command(op, tensors or {}, arguments)
        with self._arrived:
            if self._stopping or self._closed:
                raise ServerStopping("the server is shutting down")
            self._waiting.append(command)
            self._arrived.notify()
        return command.future

    def shutdown(self) -> None:
        """Finish the running command, refuse the waiting ones, end `run` on every rank. Safe in a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Execute commands until shutdown. Every rank calls it; whatever it raises is fatal for the whole world."""
        try:
            if self._rank == 0:
                self._lead()
            else:
                self._follow()
        finally:
            self._refuse_rest()

    def _lead(self) -> None:
        last_sign = time.monotonic()
        while not self._stopping:
            command = self._take()
            if time.monotonic() - last_sign > self._heartbeat_s:
                last_sign = time.monotonic()
                if self._watch is not None:
                    self._watch()
                if command is None:
                    self._send_and_execute(Command(_HEARTBEAT))
            if command is not None:
                self._running = command
                self._answer(command)
        self._send_and_execute(Command(_SHUTDOWN))

    def _take(self) -> Command | None:
        """The next command; nothing after a short wait."""
        with self._arrived:
            if not self._waiting:
                self._arrived.wait(_POLL_S)
            while self._waiting:
                command = self._waiting.popleft()
                if command.future.set_running_or_notify_cancel():
                    return command
            return None

    def _answer(self, command: Command) -> None:
        try:
            result = self._send_and_execute(command)
        except AlignerError as error:
            command.future.set_exception(error)
        else:
            command.future.set_result(result)

    def _send_and_execute(self, command: Command) -> Any:
        if self._group is not None:
            self._send(command)
        return self._run_handler(command)

    def _follow(self) -> None:
        op = ""
        while op != _SHUTDOWN:
            command = self._receive()
            op = command.op
            with contextlib.suppress(_AgreedError):  # rank 0 tells it
                self._run_handler(command)

    def _run_handler(self, command: Command) -> Any:
        if command.op in (_HEARTBEAT, _SHUTDOWN):
            return None
        error: AlignerError | None = None
        result = None
        try:
            result = self._handlers[command.op](**command.tensors, **command.arguments)
        except AlignerError as raised:
            error = raised
        if self._group is not None:
            failed = torch.tensor([int(error is not None)])
            dist.all_reduce(failed, group=self._group)
            if 0 < int(failed) < self._size:
                raise RuntimeError(
                    f"{command.op}: {int(failed)} of {self._size} ranks refused it, this one: {error}"
                ) from error
        if error is not None:
            raise error if self._rank == 0 else _AgreedError from error
        return result

    def _send(self, command: Command) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in command.tensors.items()}
        shapes = {name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()}
        header = json.dumps({"op": command.op, "tensors": shapes, "arguments": dict(command.arguments)}).encode()
        data = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for tensor in (torch.tensor([data.numel()]), data, *tensors.values()):
            dist.broadcast(tensor, 0, group=self._group)

    def _receive(self) -> Command:
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, group=self._group)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._group)
        header = json.loads(data.numpy().tobytes())
        tensors = {name: torch.empty(shape, dtype=_DTYPES[dtype]) for name, (dtype, shape) in header["tensors"].items()}
        for tensor in tensors.values():
            dist.broadcast(tensor, 0, group=self._group)
        return Command(header["op"], tensors, header["arguments"])

    def _refuse_rest(self) -> None:
        """Leave no caller without an answer."""
        with self._arrived:
            self._closed = True
            waiting = [command for command in self._waiting if command.future.set_running_or_notify_cancel()]
            self._waiting.clear()
        for command in waiting:
            command.future.set_exception(ServerStopping("the server is shutting down"))
        if self._running is not None and not self._running.future.done():
            message = f"the server failed while it ran {self._running.op}; see its log"
            self._running.future.set_exception(AlignerError(message))


class _AgreedError(Exception):
    """On the ranks beside rank 0: every rank raised an AlignerError."""
