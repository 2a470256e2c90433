"""One world of ranks that executes commands in lockstep, in the order in which they arrived at rank
0."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.data.collectives import broadcast_json
from aligner.errors import AlignerError, UnavailableError
from aligner.observability.timeline import Timeline
from aligner.servers.rank_commands import Command, Handler, RowJoin, rows_of, take_together

_DTYPES = {str(dtype): dtype for dtype in (torch.int64, torch.int32, torch.float32, torch.bool)}
_POLL_S = 0.05  # how soon a shutdown that a signal handler asked for is seen
_HEARTBEAT, _SHUTDOWN = "_heartbeat", "_shutdown"


class ServerStopping(AlignerError):
    """The server is shutting down and takes no more requests."""


class ServerFailed(AlignerError):
    """The server ends by a failure while it works on a request; how far it came is unknown."""


class SpmdExecutor:
    """Rank 0 takes commands from any thread; every rank runs the same handler on the same tensors.

    An AlignerError that every rank raises goes to the command's caller, and the world goes on;
    anything else ends the world, because its ranks may have parted ways. Ranks wait for each other
    in gloo, whatever the model computes in. Commands run in the order of their arrival; alike ones
    that wait next to each other run as one where their handler is marked with a `join`.

    A handler may be a generator, whose return value is the result. Each `yield` is a pause at which
    every rank has come equally far: what waits then, and is marked `at_pauses`, runs there, ahead
    of what is not.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        batch_tokens: int = 0,
        drain_s: float = 0.0,
        heartbeat_s: float = 5.0,
        collective_timeout_s: float = 600.0,
        watch: Callable[[], None] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """A rank that lets the others wait for `collective_timeout_s` ends the world; `heartbeat_s`
        must be well below it.

        Commands that run as one have `batch_tokens` at most. `watch` is called on rank 0 about once
        a heartbeat and ends the world by raising. What this rank computes is a span of the
        `timeline`, by its op.
        """
        self._handlers = dict(handlers)
        self._joins: dict[str, RowJoin] = {
            op: join for op in handlers if (join := getattr(handlers[op], "join", None))
        }
        self._at_pauses = {
            op for op, handler in handlers.items() if getattr(handler, "at_pauses", False)
        }
        self._batch_tokens = batch_tokens
        self._drain_s = drain_s
        self._heartbeat_s = heartbeat_s
        self._watch = watch
        self._timeline = timeline or Timeline(None)
        self._size = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        timeout = timedelta(seconds=collective_timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if self._size > 1 else None
        self._waiting: deque[Command] = deque()
        self._arrived = threading.Condition()
        self._running: list[Command] = []
        self._stop_by: float | None = None
        self._closed = False

    @property
    def queue_depth(self) -> int:
        """Commands that wait, the running ones not counted."""
        return len(self._waiting)

    @property
    def stopping(self) -> bool:
        """Whether new commands are refused."""
        return self._stop_by is not None or self._closed

    def submit(
        self,
        op: str,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        alone: bool = False,
        **arguments: Any,
    ) -> Future[Any]:
        """Queue a command on rank 0, not to be joined with others where it is to run `alone`.

        The future holds rank 0's result, or the AlignerError that all ranks raised.
        """
        command = Command(op, tensors or {}, arguments, alone)
        with self._arrived:
            if self.stopping:
                raise ServerStopping("the server is shutting down")
            self._waiting.append(command)
            self._arrived.notify()
        return command.future

    def shutdown(self) -> None:
        """Refuse new commands, finish those taken for up to `drain_s`, then end `run` on every
        rank.

        Safe in a signal handler. The running command is finished however long it takes: no rank can
        leave it.
        """
        if self._stop_by is None:
            self._stop_by = time.monotonic() + self._drain_s

    def run(self) -> None:
        """Execute commands until shutdown. Every rank calls it; whatever it raises is fatal for the
        whole world."""
        try:
            if self._rank == 0:
                self._lead()
            else:
                while self._follow_once() != _SHUTDOWN:
                    pass
        finally:
            self._refuse_rest()

    def _lead(self) -> None:
        last_sign = time.monotonic()
        while not self._is_overdue() and (self._stop_by is None or self._waiting):
            commands = self._take()
            if time.monotonic() - last_sign > self._heartbeat_s:
                last_sign = time.monotonic()
                if self._watch is not None:
                    self._watch()
                if not commands:
                    self._send_and_execute(Command(_HEARTBEAT))
            if commands:
                self._running = commands
                self._answer(commands)
        self._send_and_execute(Command(_SHUTDOWN))

    def _is_overdue(self) -> bool:
        """Whether a stop was asked for, and the time to finish what was taken is over."""
        return self._stop_by is not None and time.monotonic() >= self._stop_by

    def _take(self) -> list[Command]:
        """The next command with those that can run with it; nothing after a short wait."""
        with self._arrived:
            if not self._waiting:
                self._arrived.wait(_POLL_S)
            while self._waiting:
                commands = take_together(self._waiting, self._joins, self._batch_tokens)
                if commands := [each for each in commands if _is_wanted(each)]:
                    return commands
            return []

    def _take_at_pause(self) -> Command | None:
        """The next command that runs at pauses, if any waits."""
        if not self._waiting or self._is_overdue():
            return None
        with self._arrived:
            for command in [each for each in self._waiting if each.op in self._at_pauses]:
                self._waiting.remove(command)
                if _is_wanted(command):
                    return command
        return None

    def _answer(self, commands: list[Command]) -> None:
        """Run the commands as one; where that is refused, they are next one by one: the refusal may
        be about one of them."""
        join = self._joins[commands[0].op] if len(commands) > 1 else None
        try:
            result = self._send_and_execute(
                join.joined(commands) if join is not None else commands[0]
            )
        except AlignerError as error:
            if join is not None and not isinstance(error, UnavailableError):
                with self._arrived:
                    self._waiting.extendleft(
                        replace(command, alone=True) for command in reversed(commands)
                    )
                return
            for command in commands:
                command.future.set_exception(error)
            return
        parts = [result] if join is None else join.split(result, commands)
        for command, part in zip(commands, parts, strict=True):
            command.future.set_result(part)

    def _follow_once(self) -> str:
        """Run the command that rank 0 sends, and say which it was."""
        command = self._broadcast(None)
        self._run_handler(command)
        return command.op

    def _send_and_execute(self, command: Command) -> Any:
        if self._group is not None:
            self._broadcast(command)
        return self._run_handler(command)

    def _run_handler(self, command: Command) -> Any:
        if command.op in (_HEARTBEAT, _SHUTDOWN):
            return None
        error = result = None
        try:
            with self._timeline.span(command.op, **rows_of(command)):
                result = self._handlers[command.op](**command.tensors, **command.arguments)
                if isinstance(result, Generator):
                    result = self._run_with_pauses(command.op, result)
        except AlignerError as raised:
            error = raised
        self._timeline.flush()
        self._agree(command.op, error=error)
        if error is not None and self._rank == 0:  # which tells it
            raise error
        return result

    def _run_with_pauses(self, op: str, steps: Generator[None, None, Any]) -> Any:
        """What the generator returns; other commands run at its pauses."""
        with contextlib.closing(steps):
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value
                self._pause(op)

    def _pause(self, op: str) -> None:
        """Run what waits for a pause of `op`, one by one."""
        while True:
            command = self._take_at_pause() if self._rank == 0 else None
            if not self._agree(op, pausing=True, is_next=command is not None):
                return
            if command is None:
                self._follow_once()
                continue
            outer, self._running = self._running, [*self._running, command]
            self._answer([command])
            self._running = outer

    def _agree(
        self,
        op: str,
        *,
        pausing: bool = False,
        error: AlignerError | None = None,
        is_next: bool = False,
    ) -> bool:
        """Every rank has come to a pause of the command, or to its end by the same way; whether
        rank 0 says `is_next`."""
        if self._group is None:
            return is_next
        counts = torch.tensor([error is not None, pausing, is_next], dtype=torch.int64)
        dist.all_reduce(counts, group=self._group)
        failed, paused, following = counts.tolist()
        if 0 < failed < self._size:
            raise RuntimeError(
                f"{op}: {failed} of {self._size} ranks raised an error, the other ranks did not;"
                f" rank {self._rank}: {error or 'no error'}"
            ) from error
        if 0 < paused < self._size:
            state = "paused" if pausing else "finished"
            raise RuntimeError(
                f"{op}: {paused} of {self._size} ranks paused, the other ranks finished;"
                f" rank {self._rank} {state}"
            )
        return bool(following)

    def _broadcast(self, command: Command | None) -> Command:
        """Rank 0's command on every rank; the others give None. Collective."""
        header = None
        if command is not None:
            tensors = {name: tensor.contiguous() for name, tensor in command.tensors.items()}
            shapes = {
                name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()
            }
            header = {"op": command.op, "tensors": shapes, "arguments": dict(command.arguments)}
        header = broadcast_json(header, group=self._group)
        if command is None:
            tensors = {
                name: torch.empty(shape, dtype=_DTYPES[dtype])
                for name, (dtype, shape) in header["tensors"].items()
            }
            command = Command(header["op"], tensors, header["arguments"])
        for tensor in tensors.values():
            dist.broadcast(tensor, 0, group=self._group)
        return command

    def _refuse_rest(self) -> None:
        """Leave no caller without an answer."""
        with self._arrived:
            self._closed = True
            waiting = [command for command in self._waiting if _is_wanted(command)]
            self._waiting.clear()
        for command in waiting:
            command.future.set_exception(ServerStopping("the server is shutting down"))
        for command in self._running:
            if not command.future.done():
                command.future.set_exception(
                    ServerFailed(f"the server failed while running {command.op}; see its log")
                )


def _is_wanted(command: Command) -> bool:
    """Whether its caller has not given it up; from now on he cannot."""
    return command.future.running() or command.future.set_running_or_notify_cancel()
