"""Execution of commands by all ranks of a server in lockstep, in the order of arrival at rank 0."""

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
from aligner.servers.rank_commands import Command, Handler, RowBatcher, count_rows, take_batch

_DTYPES = {str(dtype): dtype for dtype in (torch.int64, torch.int32, torch.float32, torch.bool)}
# Interval in which rank 0 notices a shutdown that a signal handler has requested.
_POLL_S = 0.05
# Operations of the executor itself.
_HEARTBEAT = "_heartbeat"
_SHUTDOWN = "_shutdown"


class ServerStopping(AlignerError):
    """The server is shutting down and accepts no more requests."""


class ServerFailed(AlignerError):
    """The server exits because of a failure during a request, whose progress is unknown."""


class SpmdExecutor:
    """Executes the same commands on all ranks of a server.

    Rank 0 accepts commands from any thread. Every rank then calls the same handler with the same
    tensors. Commands are executed in the order of their arrival. Consecutive compatible commands
    are executed as one batch if their handler has a `batcher`. The ranks communicate through gloo,
    whatever backend the model uses.

    An AlignerError that all ranks raise is sent to the caller of the command, and the ranks
    continue. Any other error stops all ranks, because their states may differ.

    A handler may be a generator, whose return value is the result. Each `yield` is a pause, at
    which all ranks have made the same progress. Waiting commands whose handler has `runs_at_pauses`
    are executed at the pause, ahead of other commands.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        batch_tokens: int = 0,
        drain_s: float = 0.0,
        heartbeat_s: float = 5.0,
        collective_timeout_s: float = 600.0,
        health_check: Callable[[], None] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """Create the executor. Collective.

        Args:
            handlers: Function of each operation.
            batch_tokens: Maximum number of tokens in a batch of commands, including padding.
            drain_s: Time in seconds for finishing accepted commands after `shutdown`.
            heartbeat_s: Interval of the collectives of an idle executor in seconds; must be well
                below `collective_timeout_s`.
            collective_timeout_s: Time in seconds after which a rank that does not respond stops all
                ranks.
            health_check: Called on rank 0 about once per heartbeat; an exception stops all ranks.
            timeline: Records a span for each operation of this rank.
        """
        self._handlers = dict(handlers)
        self._batchers: dict[str, RowBatcher] = {
            op: batcher for op in handlers if (batcher := getattr(handlers[op], "batcher", None))
        }
        self._pause_ops = {
            op for op, handler in handlers.items() if getattr(handler, "runs_at_pauses", False)
        }
        self._batch_tokens = batch_tokens
        self._drain_s = drain_s
        self._heartbeat_s = heartbeat_s
        self._health_check = health_check
        self._timeline = timeline or Timeline(None)
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        timeout = timedelta(seconds=collective_timeout_s)
        self._group = (
            dist.new_group(backend="gloo", timeout=timeout) if self._world_size > 1 else None
        )
        self._queue: deque[Command] = deque()
        self._queue_changed = threading.Condition()
        self._running: list[Command] = []
        # End of the time for finishing accepted commands; None before a shutdown.
        self._stop_deadline: float | None = None
        self._is_closed = False

    @property
    def queue_depth(self) -> int:
        """Number of commands that wait for execution, without the running commands."""
        return len(self._queue)

    @property
    def is_stopping(self) -> bool:
        """Whether new commands are refused."""
        return self._stop_deadline is not None or self._is_closed

    def submit(
        self,
        op: str,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        is_unbatched: bool = False,
        **arguments: Any,
    ) -> Future[Any]:
        """Queue a command, on rank 0.

        Args:
            op: Name of the operation.
            tensors: Tensors for the handler, on the CPU.
            is_unbatched: Whether the command must not be batched with other commands.
            **arguments: Further arguments for the handler; JSON values.

        Returns:
            A future of rank 0's result, or of the AlignerError that all ranks raised.

        Raises:
            ServerStopping: The server is shutting down.
        """
        command = Command(op, tensors or {}, arguments, is_unbatched)
        with self._queue_changed:
            if self.is_stopping:
                raise ServerStopping("the server is shutting down")
            self._queue.append(command)
            self._queue_changed.notify()
        return command.future

    def shutdown(self) -> None:
        """Refuse new commands, and end `run` on all ranks after accepted commands are finished.

        Accepted commands are executed for up to `drain_s`. A running command is always completed,
        because no rank can leave it. Signal handlers may call this method.
        """
        # Only sets an attribute: a signal handler must not acquire a lock that its own thread may
        # hold. `_run_leader` polls the attribute.
        if self._stop_deadline is None:
            self._stop_deadline = time.monotonic() + self._drain_s

    def run(self) -> None:
        """Execute commands until shutdown. Every rank calls this method.

        Any exception that it raises is fatal for all ranks.
        """
        try:
            if self._rank == 0:
                self._run_leader()
            else:
                while self._execute_received() != _SHUTDOWN:
                    pass
        finally:
            self._fail_pending()

    def _run_leader(self) -> None:
        """Send commands and heartbeats to all ranks until shutdown, on rank 0."""
        last_heartbeat = time.monotonic()
        while not self._is_drain_over() and (self._stop_deadline is None or self._queue):
            commands = self._take_next()
            if time.monotonic() - last_heartbeat > self._heartbeat_s:
                last_heartbeat = time.monotonic()
                if self._health_check is not None:
                    self._health_check()
                # The other ranks wait in a broadcast, which times out without heartbeats.
                if not commands:
                    self._send_and_execute(Command(_HEARTBEAT))
            if commands:
                self._running = commands
                self._execute_and_answer(commands)
        self._send_and_execute(Command(_SHUTDOWN))

    def _is_drain_over(self) -> bool:
        """Return whether a shutdown was requested and its time for finishing commands is over."""
        return self._stop_deadline is not None and time.monotonic() >= self._stop_deadline

    def _take_next(self) -> list[Command]:
        """Remove the next command from the queue, with those to batch with it.

        The result is empty if no command arrives within a short time.
        """
        with self._queue_changed:
            if not self._queue:
                self._queue_changed.wait(_POLL_S)
            while self._queue:
                commands = take_batch(self._queue, self._batchers, self._batch_tokens)
                if commands := [
                    command for command in commands if _start_unless_cancelled(command)
                ]:
                    return commands
            return []

    def _take_at_pause(self) -> Command | None:
        """Remove the next command that may run at a pause; return None if there is none."""
        if not self._queue or self._is_drain_over():
            return None
        with self._queue_changed:
            for command in [queued for queued in self._queue if queued.op in self._pause_ops]:
                self._queue.remove(command)
                if _start_unless_cancelled(command):
                    return command
        return None

    def _execute_and_answer(self, commands: list[Command]) -> None:
        """Execute commands as one batch, and set the results of their futures.

        If the batch is refused, its commands are put back into the queue as separate commands,
        because only one of them may be the cause.
        """
        batcher = self._batchers[commands[0].op] if len(commands) > 1 else None
        try:
            result = self._send_and_execute(
                batcher.batch(commands) if batcher is not None else commands[0]
            )
        except AlignerError as error:
            # An UnavailableError does not depend on the request, and would occur for each command.
            if batcher is not None and not isinstance(error, UnavailableError):
                with self._queue_changed:
                    self._queue.extendleft(
                        replace(command, is_unbatched=True) for command in reversed(commands)
                    )
                return
            for command in commands:
                command.future.set_exception(error)
            return

        parts = [result] if batcher is None else batcher.split(result, commands)
        for command, part in zip(commands, parts, strict=True):
            command.future.set_result(part)

    def _execute_received(self) -> str:
        """Execute the next command from rank 0, and return its operation."""
        command = self._broadcast(None)
        self._run_handler(command)
        return command.op

    def _send_and_execute(self, command: Command) -> Any:
        """Broadcast a command from rank 0, execute it, and return its result."""
        if self._group is not None:
            self._broadcast(command)
        return self._run_handler(command)

    def _run_handler(self, command: Command) -> Any:
        """Call the command's handler, and return its result on every rank.

        Raises:
            AlignerError: All ranks have raised it. Only rank 0 raises it again, for the caller.
            RuntimeError: Only some of the ranks have raised an AlignerError.
        """
        if command.op in (_HEARTBEAT, _SHUTDOWN):
            return None

        error = result = None
        try:
            with self._timeline.span(command.op, **count_rows(command)):
                result = self._handlers[command.op](**command.tensors, **command.arguments)
                if isinstance(result, Generator):
                    result = self._run_with_pauses(command.op, result)
        except AlignerError as raised:
            error = raised
        self._timeline.flush()
        self._check_agreement(command.op, error=error)
        if error is not None and self._rank == 0:
            raise error
        return result

    def _run_with_pauses(self, op: str, steps: Generator[None, None, Any]) -> Any:
        """Run a generator, execute other commands at its pauses, and return its result."""
        with contextlib.closing(steps):
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value
                self._run_commands_at_pause(op)

    def _run_commands_at_pause(self, op: str) -> None:
        """Execute the commands that wait for a pause of `op`, one by one."""
        while True:
            command = self._take_at_pause() if self._rank == 0 else None
            if not self._check_agreement(op, pausing=True, is_next=command is not None):
                return
            if command is None:
                self._execute_received()
                continue
            # Both callers must get an error if the server fails during the inner command.
            outer_commands = self._running
            self._running = [*self._running, command]
            self._execute_and_answer([command])
            self._running = outer_commands

    def _check_agreement(
        self,
        op: str,
        *,
        pausing: bool = False,
        error: AlignerError | None = None,
        is_next: bool = False,
    ) -> bool:
        """Check that all ranks are at the same pause or have finished with the same outcome.

        This method is collective.

        Args:
            op: The operation.
            pausing: Whether this rank is at a pause.
            error: The error with which the handler of this rank has finished.
            is_next: On rank 0, whether a command follows at this pause.

        Returns:
            Rank 0's `is_next`.

        Raises:
            RuntimeError: The ranks differ.
        """
        if self._group is None:
            return is_next
        # The sums are 0 or the number of ranks if all ranks agree. Only rank 0 can set `is_next`.
        counts = torch.tensor([error is not None, pausing, is_next], dtype=torch.int64)
        dist.all_reduce(counts, group=self._group)
        failed, paused, following = counts.tolist()
        if 0 < failed < self._world_size:
            raise RuntimeError(
                f"{op}: {failed} of {self._world_size} ranks raised an error, the other ranks did"
                f" not; rank {self._rank}: {error or 'no error'}"
            ) from error
        if 0 < paused < self._world_size:
            state = "paused" if pausing else "finished"
            raise RuntimeError(
                f"{op}: {paused} of {self._world_size} ranks paused, the other ranks finished;"
                f" rank {self._rank} {state}"
            )
        return bool(following)

    def _broadcast(self, command: Command | None) -> Command:
        """Return rank 0's command on every rank; the other ranks pass None. Collective."""
        # The header has op, arguments and the tensors' shapes. The tensors follow separately.
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

    def _fail_pending(self) -> None:
        """Set an error for all commands without a result."""
        with self._queue_changed:
            self._is_closed = True
            queued = [command for command in self._queue if _start_unless_cancelled(command)]
            self._queue.clear()
        for command in queued:
            command.future.set_exception(ServerStopping("the server is shutting down"))
        for command in self._running:
            if not command.future.done():
                command.future.set_exception(
                    ServerFailed(f"the server failed while running {command.op}; see its log")
                )


def _start_unless_cancelled(command: Command) -> bool:
    """Mark a command as running, and return False if its caller has cancelled it.

    Afterwards the caller cannot cancel it any more.
    """
    return command.future.running() or command.future.set_running_or_notify_cancel()
