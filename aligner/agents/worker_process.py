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
from aligner.agents.environment_worker import CLOSE, CLOSING_S, NOTE
from aligner.errors import AlignerError, ConfigError

# timeout in seconds for the start of the process and the import of the environment
_START_S = 180.0
# Seconds for which the code of a late environment must run without a break, before the environment
# is considered to block the worker's loop.
_GRACE_S = 0.2
# interval in seconds at which a late call looks for its answer
_LOOK_S = 0.02
# Maximum size of an answer's JSON line: a fixed part, and the bytes per character if each character
# is escaped, or is a message of its own.
_LINE_BYTES = 1 << 16
_BYTES_PER_CHARACTER = 48


class EnvironmentFailed(AlignerError):
    """An environment gave no valid answer. The message is a clause that can end a sentence."""


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
    most_characters: int
    """Maximum number of characters of an observation."""
    memory_bytes: int | None
    """Limit of the process's address space in bytes; None for no limit."""


class WorkerProcess:
    """A process that hosts environments; create it with `start`."""

    def __init__(self, process: asyncio.subprocess.Process, note: int) -> None:
        self._process = process
        # descriptor of a memory file, in which the worker notes the environment whose code runs
        self._note = note
        self._calls = itertools.count()
        # environment number and answer of each call in flight
        self._waiting: dict[int, tuple[int, asyncio.Future[dict[str, Any]]]] = {}
        self._reading: asyncio.Task[None] | None = None
        # environment that made the pool end the process, and the reason; 0 for no environment
        self._guilty: tuple[int, str] | None = None
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
        """Start a process, which imports the environment; await `ready` before the first call."""
        # a memory file, because the pool must be able to read the note while the worker hangs, and
        # after it has crashed
        note = os.memfd_create("aligner-environment")
        os.pwrite(note, NOTE.pack(0, 0), 0)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", environment_worker.__name__),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES + _BYTES_PER_CHARACTER * settings.most_characters,
            start_new_session=True,
            pass_fds=[note],
        )
        worker = WorkerProcess(process, note)
        message = [
            settings.module,
            settings.name,
            settings.arguments,
            settings.most_characters,
            settings.memory_bytes,
        ]
        # the worker must find the user's modules on the same path
        worker._send([*message, note, sys.path])
        return worker

    async def ready(self) -> None:
        """Wait until the process has imported the environment; end the process if that fails.

        Must not be cancelled.

        Raises:
            ConfigError: The class does not exist or does not accept its arguments. The message
                contains only the reason, no configuration key.
            EnvironmentFailed: The process exited, or did not import the environment in time.
        """
        try:
            line = await asyncio.wait_for(_stream(self._process.stdout).readline(), _START_S)
        except asyncio.TimeoutError:
            raise EnvironmentFailed(
                f"the environment was not imported within {_START_S:g} s; {await self._end()}"
            ) from None
        answer = json.loads(line or "null")
        if answer is None:
            raise EnvironmentFailed(f"the environment was not imported; {await self._end()}")
        if "refused" in answer:
            await self._end()
            raise ConfigError(answer["refused"])
        self._reading = asyncio.create_task(self._read())

    def kill(self) -> None:
        """Kill the process group: the process and all processes that it started in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def ask(self, number: int, asked: Sequence[Any], deadline_s: float) -> dict[str, Any]:
        """Send a call to environment `number`, and return its answer.

        While the code of another environment keeps the process busy, the deadline is extended by up
        to `deadline_s`, because the other environment has a deadline too.

        Args:
            number: Number of the environment; its first call creates it.
            asked: The call, as `asked_outcome` takes it, or `CLOSE`.
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
        call = next(self._calls)
        answer = loop.create_future()
        self._waiting[call] = number, answer
        timer = loop.call_later(deadline_s, self._set_late, call)
        try:
            self._send([call, number, asked])
            response: dict[str, Any] = await answer
            if not response:  # `_set_late` has replaced the future
                _, answer = self._waiting[call]
                await self._late(number, answer, deadline_s)
                response = answer.result()
        finally:
            timer.cancel()
            del self._waiting[call]

        if "problem" in response:
            raise EnvironmentFailed(response["problem"])
        del response["call"]
        return response

    async def close_environment(self, number: int, deadline_s: float) -> None:
        """Close an environment, also in the middle of a call.

        If the environment does not close within the deadline, the process is killed. Raises
        EnvironmentFailed if the `close` of the environment fails.
        """
        with contextlib.suppress(WorkerLost):
            try:
                await self.ask(number, CLOSE, deadline_s)
            except _Late as error:
                self._give_up(number, str(error))
                raise

    async def close(self) -> None:
        """End the process after its environments have closed, or after a timeout."""
        # the end of its input makes the worker close its environments and exit
        _stream(self._process.stdin).close()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=CLOSING_S + 1.0)
            if not self._reading.done():
                self._give_up(0, "was closed")
            await self._reading

    def _set_late(self, call: int) -> None:
        """Answer a call with an empty dict; a new future stands for the answer that is missing."""
        number, answer = self._waiting[call]
        if not answer.done():
            self._waiting[call] = number, asyncio.get_running_loop().create_future()
            answer.set_result({})

    async def _late(
        self, number: int, answer: asyncio.Future[dict[str, Any]], deadline_s: float
    ) -> None:
        """Return as soon as a late call has an answer or an exception; raise _Late if it gets none.

        The environment gets more time while the code of another one runs. If its own code blocks
        the loop, the process is killed.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s + 5 * _GRACE_S
        # the extension of the deadline: another environment's code may have delayed this one
        while self._noted()[0] not in (0, number) and loop.time() < end:
            await asyncio.wait([answer], timeout=_LOOK_S)
            if answer.done():
                return

        problem = f"timed out after {deadline_s:g} s"
        if (note := self._noted())[0] == number:
            await asyncio.wait([answer], timeout=_GRACE_S)
            if answer.done():
                return
            # neither the environment nor the count has changed: the same step still runs
            if self._noted() == note:
                self._give_up(number, f"{problem} and blocked its process")
                await asyncio.wait([answer])
                return
        raise _Late(problem)

    async def _read(self) -> None:
        """Deliver the answers of the process until it ends; then fail the calls in flight."""
        # a line that is not JSON: its source is unknown, and the process cannot be used any more
        with contextlib.suppress(ValueError):
            while line := await _stream(self._process.stdout).readline():
                answer = json.loads(line)
                _, waiting = self._waiting.get(answer["call"], (0, None))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)

        self._is_lost = True
        guilty, reason = self._guilty or (self._noted()[0], "")
        reason = f"{reason}; " * bool(reason) + await self._end()
        # if the cause is unknown, each environment with a call in flight counts as failed
        for number, waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(
                    (EnvironmentFailed if guilty in (0, number) else WorkerLost)(reason)
                )

    def _give_up(self, guilty: int, why: str) -> None:
        """Kill the process because of environment `guilty`; 0 if no environment is the cause."""
        self._guilty = (guilty, why)
        self._is_lost = True
        self.kill()

    async def _end(self) -> str:
        """Kill the process group, release its resources, and return how the process ended."""
        self.kill()
        code = await self._process.wait()
        requests = _stream(self._process.stdin)
        requests.close()
        with contextlib.suppress(ConnectionError):  # it ended before it read all of its input
            await requests.wait_closed()
        os.close(self._note)
        ending = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"exited with code {code}"
        )
        return f"its process {ending}"

    def _noted(self) -> tuple[int, int]:
        """Return the number of the environment whose code runs, 0 if none, and the step count."""
        number, count = NOTE.unpack(os.pread(self._note, NOTE.size, 0))
        return number, count

    def _send(self, message: Sequence[Any]) -> None:
        """Write a message to the process as a line of JSON."""
        _stream(self._process.stdin).write(json.dumps(message).encode() + b"\n")


class _Late(EnvironmentFailed):
    """The environment missed its deadline, but its process still works."""


def _stream(stream: Any) -> Any:
    """Return a stream of the process, which is never None."""
    if stream is None:
        raise AssertionError  # stdin and stdout are pipes
    return stream
