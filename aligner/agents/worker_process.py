"""The pool's side of a worker process: start it, send calls, enforce deadlines, and end it.

All methods run on an asyncio loop. `environment_worker` is the other side, the program of the
worker process.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aligner.agents import environment_worker as environment_worker
from aligner.agents.environment_worker import CLOSE, CLOSING_S, FINISH, NOTE
from aligner.agents.sandboxes import SandboxSettings
from aligner.data.episode_reports import FailureKind
from aligner.errors import AlignerError, ConfigError
from aligner.file_limits import parse_json

# timeout in seconds for the start of the process and the import of the environment
_START_TIMEOUT_S = 180.0
# Seconds for which the code of a late environment must run without a break, before the environment
# is considered to block the worker's loop.
_GRACE_PERIOD_S = 0.2
# polling interval for the answer to a late call, in seconds
_POLL_S = 0.02
# Maximum size of an answer's JSON line: a fixed part, and the bytes per character if each character
# is escaped, or is a message of its own.
_LINE_BYTES = 1 << 16
_BYTES_PER_CHARACTER = 48


class EnvironmentFailed(AlignerError):
    """An environment gave no valid answer. The message is a clause that can end a sentence."""

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message)
        self.kind = kind


class WorkerLost(AlignerError):
    """The worker process of an environment has ended, but this environment is not the cause."""


@dataclass(frozen=True)
class WorkerSettings:
    """Settings that all workers of a pool share."""

    module: str
    """Module of the environment class."""
    name: str
    """Name of the environment class in its module."""
    arguments: dict[str, Any]
    """Keyword arguments of the environment class, as JSON values."""
    max_characters: int
    """Maximum number of characters of an observation."""
    memory_bytes: int | None
    """Limit of the process's address space in bytes; None for no limit."""
    sandboxes: SandboxSettings
    """Default settings of the sandboxes that environments create."""


class WorkerProcess:
    """A process that hosts environments; create it with `start`."""

    def __init__(self, process: asyncio.subprocess.Process, note_fd: int) -> None:
        self._process = process
        # descriptor of a memory file, in which the worker notes the environment whose code runs
        self._note_fd = note_fd
        self._call_numbers = itertools.count()
        # environment number and answer of each call in flight
        self._pending: dict[int, tuple[int, asyncio.Future[dict[str, Any]]]] = {}
        self._reader: asyncio.Task[None] | None = None
        # environment that made the pool end the process, and the reason; 0 for no environment
        self._cause: tuple[int, str] | None = None
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """Whether the process has ended or is being ended."""
        # WNOWAIT leaves the exit status to asyncio. If asyncio has already collected it, waitid
        # raises ChildProcessError, and the process has ended.
        with contextlib.suppress(ChildProcessError):
            if (
                not self._is_lost
                and os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                is None
            ):
                return False
        self._is_lost = True
        return True

    @staticmethod
    async def start(settings: WorkerSettings) -> "WorkerProcess":
        """Start a process, which imports the environment.

        Await `wait_until_ready` before the first call.
        """
        # a memory file, because the pool must be able to read the note while the worker hangs, and
        # after it has crashed
        note_fd = os.memfd_create("aligner-environment")
        os.pwrite(note_fd, NOTE.pack(0, 0), 0)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            environment_worker.__name__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES + _BYTES_PER_CHARACTER * settings.max_characters,
            # a process group of its own, which `kill` ends with all child processes of environments
            start_new_session=True,
            pass_fds=[note_fd],
        )
        worker = WorkerProcess(process, note_fd)
        message = [
            settings.module,
            settings.name,
            settings.arguments,
            settings.max_characters,
            settings.memory_bytes,
            settings.sandboxes.to_json(),
        ]
        # the worker must import the user's modules from the same path
        worker._send([*message, note_fd, sys.path])
        return worker

    async def wait_until_ready(self) -> None:
        """Wait until the process has imported the environment; end the process if that fails.

        Must not be cancelled.

        Raises:
            ConfigError: The class does not exist or does not accept its arguments. The message
                contains only the reason, no configuration key.
            EnvironmentFailed: The process exited, or did not import the environment in time.
        """
        try:
            line = await asyncio.wait_for(
                _get_pipe(self._process.stdout).readline(), _START_TIMEOUT_S
            )
        except asyncio.TimeoutError:
            _, reason = await self._terminate()
            raise EnvironmentFailed(
                f"the environment was not imported within {_START_TIMEOUT_S:g} s; {reason}",
                FailureKind.INFRASTRUCTURE,
            ) from None
        answer = parse_json(line or "null")
        if answer is None:
            _, reason = await self._terminate()
            raise EnvironmentFailed(
                f"the environment was not imported; {reason}", FailureKind.INFRASTRUCTURE
            )
        if "refused" in answer:
            await self._terminate()
            raise ConfigError(answer["refused"])
        self._reader = asyncio.create_task(self._read())

    def kill(self) -> None:
        """Kill the process group: the process and all processes that it started in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def call(self, number: int, request: Sequence[Any], deadline_s: float) -> dict[str, Any]:
        """Send a call to environment `number`, and return its answer.

        While the code of another environment keeps the process busy, the deadline is extended by up
        to `deadline_s`, because the other environment has a deadline too.

        Args:
            number: Number of the environment; its first call creates it.
            request: The argument `request` of `call_environment`, `CLOSE` or `FINISH`.
            deadline_s: Maximum time in seconds from the sending of the call.

        Raises:
            EnvironmentFailed: The environment raised an exception, gave an invalid answer, missed
                its deadline, or ended the process. If the process still runs, close the environment
                with `close_environment`.
            WorkerLost: The process ended, but this environment is not the cause.
        """
        if self.is_lost:
            raise WorkerLost("its process exited")

        loop = asyncio.get_running_loop()
        call = next(self._call_numbers)
        answer = loop.create_future()
        self._pending[call] = (number, answer)
        timer = loop.call_later(deadline_s, self._mark_late, call)
        try:
            self._send([call, number, request])
            response: dict[str, Any] = await answer
            if not response:  # `_mark_late` has replaced the future
                _, answer = self._pending[call]
                await self._wait_for_late_answer(number, answer, deadline_s)
                response = answer.result()
        finally:
            timer.cancel()
            del self._pending[call]

        if "problem" in response:
            raise EnvironmentFailed(response["problem"], FailureKind(response["kind"]))
        del response["call"]
        return response

    async def close_environment(self, number: int, deadline_s: float, *, has_failed: bool) -> None:
        """Close an environment, also in the middle of a call.

        If the environment does not close within the deadline, the process is killed. Raises
        EnvironmentFailed if the `close` of the environment fails.

        Args:
            number: Number of the environment.
            deadline_s: Maximum time in seconds.
            has_failed: Whether the environment has failed. Otherwise the call in progress is not
                needed any more, and its exception is not reported.
        """
        with contextlib.suppress(WorkerLost):
            try:
                await self.call(number, CLOSE if has_failed else FINISH, deadline_s)
            except _LateAnswer as error:
                self._kill_because_of(number, str(error))
                raise

    async def close(self) -> None:
        """End the process after its environments have closed, or after a timeout."""
        # at the end of its input, the worker closes its environments and exits
        _get_pipe(self._process.stdin).close()
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=CLOSING_S + 1.0)
            if not self._reader.done():
                self._kill_because_of(0, "was closed")
            await self._reader

    def _mark_late(self, call: int) -> None:
        """Answer a late call with an empty dict, and create a new future for its real answer."""
        number, answer = self._pending[call]
        if not answer.done():
            # `call` gets the old future's result, and awaits the new future with a timeout.
            self._pending[call] = (number, asyncio.get_running_loop().create_future())
            answer.set_result({})

    async def _wait_for_late_answer(
        self, number: int, answer: asyncio.Future[dict[str, Any]], deadline_s: float
    ) -> None:
        """Return as soon as a late call has an answer or an exception.

        Raises _LateAnswer after the extended deadline. The deadline is extended while the code of
        another environment runs. If this environment's code blocks the loop, the process is killed.
        """
        loop = asyncio.get_running_loop()
        # The other environment has the same deadline, after which its own call ends the process.
        end = loop.time() + deadline_s + 5 * _GRACE_PERIOD_S
        # Extend the deadline while the code of another environment runs.
        while self._read_note()[0] not in (0, number) and loop.time() < end:
            await asyncio.wait([answer], timeout=_POLL_S)
            if answer.done():
                return

        problem = f"timed out after {deadline_s:g} s"
        note = self._read_note()
        if note[0] == number:
            await asyncio.wait([answer], timeout=_GRACE_PERIOD_S)
            if answer.done():
                return
            # The environment and the step count are unchanged, so the same step still runs.
            if self._read_note() == note:
                self._kill_because_of(number, f"{problem} and blocked its process")
                await asyncio.wait([answer])
                return
        raise _LateAnswer(problem)

    async def _read(self) -> None:
        """Deliver the answers of the process until it ends; then fail the calls in flight."""
        # ValueError: a line is not JSON; its source is unknown, so the process is ended
        with contextlib.suppress(ValueError):
            while line := await _get_pipe(self._process.stdout).readline():
                answer = parse_json(line)
                _, pending_answer = self._pending.get(answer["call"], (0, None))
                if pending_answer is not None and not pending_answer.done():
                    pending_answer.set_result(answer)

        self._is_lost = True
        # If the process has crashed in the code of an environment, the note contains its number.
        cause, reason = self._cause or (self._read_note()[0], "")
        code, exit_reason = await self._terminate()
        reason = f"{reason}; " * bool(reason) + exit_reason
        kind = FailureKind.ERROR
        if self._cause is not None:
            kind = FailureKind.TIMEOUT
        elif not cause or code == -signal.SIGKILL:
            # SIGKILL comes from outside the process, for example from the kernel's out-of-memory
            # killer, which may have chosen any process.
            kind = FailureKind.INFRASTRUCTURE

        # if the cause is unknown, each environment with a call in flight counts as failed
        for number, pending_answer in self._pending.values():
            if not pending_answer.done():
                pending_answer.set_exception(
                    EnvironmentFailed(reason, kind) if cause in (0, number) else WorkerLost(reason)
                )

    def _kill_because_of(self, cause: int, reason: str) -> None:
        """Kill the process because of environment `cause`; 0 if no environment is the cause."""
        self._cause = (cause, reason)
        self._is_lost = True
        self.kill()

    async def _terminate(self) -> tuple[int, str]:
        """Kill the process group, release its resources, and return its exit code and a description
        of its exit."""
        self.kill()
        code = await self._process.wait()
        requests = _get_pipe(self._process.stdin)
        requests.close()
        with contextlib.suppress(ConnectionError):  # the process may exit before it reads all input
            await requests.wait_closed()
        os.close(self._note_fd)
        if code < 0:
            return code, f"its process was killed by {signal.Signals(-code).name}"
        return code, f"its process exited with code {code}"

    def _read_note(self) -> tuple[int, int]:
        """Return the number of the environment whose code runs, 0 if none, and the step count."""
        number, count = NOTE.unpack(os.pread(self._note_fd, NOTE.size, 0))
        return number, count

    def _send(self, message: Sequence[Any]) -> None:
        """Write a message to the process as a line of JSON."""
        _get_pipe(self._process.stdin).write(json.dumps(message).encode() + b"\n")


class _LateAnswer(EnvironmentFailed):
    """The environment missed its deadline, but its process can still answer calls."""

    def __init__(self, message: str) -> None:
        super().__init__(message, FailureKind.TIMEOUT)


def _get_pipe(stream: Any) -> Any:
    """Return a stream of the process, with its type narrowed: it is never None."""
    if stream is None:
        raise AssertionError  # stdin and stdout are pipes
    return stream
