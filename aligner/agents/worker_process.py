"""A worker of the pool's, seen from the pool's side: starts it, asks it, watches its deadlines,
ends it. Of asyncio."""

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

_START_S = 180.0
"""For the process to start and import the environment."""
_GRACE_S = 0.2
"""For which an environment that is late must keep the loop to itself to be taken for one that hangs
it."""
_LOOK_S = 0.02
_LINE_BYTES, _BYTES_PER_CHARACTER = 1 << 16, 48
"""The most that an answer's JSON takes, with each character escaped, or in a message of its own."""


class EnvironmentFailed(AlignerError):
    """An environment did not answer as it must: what it did, for the end of a sentence."""


class WorkerLost(AlignerError):
    """The process that hosts an environment has ended, and not through that environment."""


@dataclass(frozen=True)
class WorkerSettings:
    """What every worker of a pool is started with."""

    module: str
    name: str
    arguments: dict[str, Any]
    """JSON."""
    most_characters: int
    memory_bytes: int | None


class WorkerProcess:
    """A process that hosts environments, made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, note: int) -> None:
        self._process, self._note = process, note
        self._calls = itertools.count()
        self._waiting: dict[int, tuple[int, asyncio.Future[dict[str, Any]]]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._guilty: tuple[int, str] | None = None
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """Whether the process has ended, or is about to."""
        # the loop was told of its end, and is about to tell
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
        """A process that is about to import the environment; it is of use once it is `ready`."""
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
        told = [
            settings.module,
            settings.name,
            settings.arguments,
            settings.most_characters,
            settings.memory_bytes,
        ]
        worker._send([*told, note, sys.path])
        return worker

    async def ready(self) -> None:
        """Wait until it has imported the environment; where it does not, it is ended. Not to be
        cancelled.

        Raises ConfigError, with the reason alone, where there is no such class, and
        EnvironmentFailed.
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
        """End the process at once, with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def ask(self, number: int, asked: Sequence[Any], deadline_s: float) -> dict[str, Any]:
        """What environment `number` answers. Raises EnvironmentFailed and WorkerLost.

        One that is late is given up, and closed with `close` if its process still runs then. While
        another's code keeps the process busy it may be late, by as much again: that other one has a
        deadline, too.
        """
        if self.is_lost:
            raise WorkerLost("its process exited")
        loop, call = asyncio.get_running_loop(), next(self._calls)
        answer = loop.create_future()
        self._waiting[call] = number, answer
        time_up = loop.call_later(deadline_s, self._set_late, call)
        try:
            self._send([call, number, asked])
            found: dict[str, Any] = await answer
            if not found:
                _, answer = self._waiting[call]
                await self._late(number, answer, deadline_s)
                found = answer.result()
        finally:
            time_up.cancel()
            del self._waiting[call]
        if "problem" in found:
            raise EnvironmentFailed(found["problem"])
        del found["call"]
        return found

    async def close_environment(self, number: int, deadline_s: float) -> None:
        """Close an environment, whatever it is in the middle of; where it does not end, its process
        does.

        Raises EnvironmentFailed where its `close` fails.
        """
        with contextlib.suppress(WorkerLost):
            try:
                await self.ask(number, CLOSE, deadline_s)
            except _Late as error:
                self._give_up(number, str(error))
                raise

    async def close(self) -> None:
        """End the process, once its environments have closed or have had their time for it."""
        _stream(self._process.stdin).close()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=CLOSING_S + 1.0)
            if not self._reading.done():
                self._give_up(0, "was closed")
            await self._reading

    def _set_late(self, call: int) -> None:
        """Give who waits for an answer an empty one; a further future waits for what is still to
        come."""
        number, answer = self._waiting[call]
        if not answer.done():
            self._waiting[call] = number, asyncio.get_running_loop().create_future()
            answer.set_result({})

    async def _late(
        self, number: int, answer: asyncio.Future[dict[str, Any]], deadline_s: float
    ) -> None:
        """Return once there is an answer in spite of all; raises _Late where there is none."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s + 5 * _GRACE_S
        while self._noted()[0] not in (0, number) and loop.time() < end:
            await asyncio.wait([answer], timeout=_LOOK_S)
            if answer.done():
                return
        late = f"timed out after {deadline_s:g} s"
        if (before := self._noted())[0] == number:
            await asyncio.wait([answer], timeout=_GRACE_S)
            if answer.done():
                return
            if self._noted() == before:
                self._give_up(number, f"{late} and blocked its process")
                await asyncio.wait([answer])
                return
        raise _Late(late)

    async def _read(self) -> None:
        # no line of JSON: whatever wrote it, the process is of no use any more
        with contextlib.suppress(ValueError):
            while line := await _stream(self._process.stdout).readline():
                answer = json.loads(line)
                _, waiting = self._waiting.get(answer["call"], (0, None))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        self._is_lost = True
        guilty, what = self._guilty or (self._noted()[0], "")
        what = f"{what}; " * bool(what) + await self._end()
        for number, waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(
                    (EnvironmentFailed if guilty in (0, number) else WorkerLost)(what)
                )

    def _give_up(self, guilty: int, why: str) -> None:
        """End the process; it is environment `guilty` that has brought it about."""
        self._guilty, self._is_lost = (guilty, why), True
        self.kill()

    async def _end(self) -> str:
        """End the process if it has not, with all that it has started; how it ended."""
        self.kill()
        code = await self._process.wait()
        requests = _stream(self._process.stdin)
        requests.close()
        with contextlib.suppress(ConnectionError):  # it has ended before it read all
            await requests.wait_closed()
        os.close(self._note)
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"exited with code {code}"
        )
        return f"its process {how}"

    def _noted(self) -> tuple[int, int]:
        """The environment whose code runs, 0 for none, and how often one began to."""
        number, count = NOTE.unpack(os.pread(self._note, NOTE.size, 0))
        return number, count

    def _send(self, message: Sequence[Any]) -> None:
        _stream(self._process.stdin).write(json.dumps(message).encode() + b"\n")


class _Late(EnvironmentFailed):
    """It gave no answer in time, and its process goes on."""


def _stream(stream: Any) -> Any:
    if stream is None:
        raise AssertionError  # both are pipes
    return stream
