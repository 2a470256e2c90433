"""A process that hosts many episodes' environments on one asyncio loop: `python -m
aligner.agents.environment_worker`.

It talks JSON, a line a message. The first line of its input has the settings; it answers `{}`, or
`{"refused": why}` and ends. Then a line asks something of one environment, and its answer, which
names the call, comes when it is there: many are under way at once. When its input ends it closes
what it hosts and ends, with all that the environments have started.

While code of an environment runs, a file that the pool shares says whose: it alone is at fault
where that hangs or ends the process.
"""

import asyncio
import inspect
import json
import os
import resource
import select
import signal
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextvars import ContextVar
from typing import IO, Any

from aligner.agents.episode_environment import WrongAnswer, asked_outcome
from aligner.errors import ConfigError
from aligner.user_code import import_object

CLOSE = ["close"]
"""Asked of an environment to end it, whatever it is in the middle of."""
CLOSING_S = 5.0
"""For all environments to close, when the input has ended."""
NOTE = struct.Struct("<QQ")
"""The note of whose code runs: the environment's number, 0 for none, and how often there was one.
"""
_MOST_TOLD = 2000
"""Characters of an exception's message."""

_running: ContextVar[int] = ContextVar(
    "the environment that a task belongs to, and the tasks that it starts", default=0
)


class _Host:
    """The environments of this process, by the numbers that the pool gives them."""

    def __init__(
        self, make: Callable[[], Any], most_characters: int, answers: IO[str], note: int
    ) -> None:
        self._make, self._most_characters, self._answers, self._note = (
            make,
            most_characters,
            answers,
            note,
        )
        self._environments: dict[int, Any] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._notes = 0

    def answer(self, content: Mapping[str, Any]) -> None:
        """Tell the pool."""
        print(json.dumps(content), file=self._answers, flush=True)

    def take(self, line: str) -> None:
        """Begin what a line asks for."""
        call, number, asked = json.loads(line)
        _running.set(number)
        task = asyncio.get_running_loop().create_task(
            self._answered(call, number, asked, self._calls.get(number))
        )
        self._calls[number] = task

    async def close(self) -> None:
        """Close every environment."""
        closings = [self._closed(number, self._calls.get(number)) for number in self._environments]
        await asyncio.gather(*closings, return_exceptions=True)

    async def noted(self, work: Coroutine[Any, Any, Any], number: int) -> Any:
        """A coroutine's result; while it runs, and only then, the note says whose it is."""
        return await self._steps(work, number)

    @types.coroutine
    def _steps(self, work: Coroutine[Any, Any, Any], number: int) -> Generator[Any, Any, Any]:
        go_on, value = work.send, None
        while True:
            self._notes += 1
            os.pwrite(self._note, NOTE.pack(number, self._notes), 0)
            try:
                awaited = go_on(value)
            except StopIteration as end:
                return end.value
            finally:
                os.pwrite(self._note, NOTE.pack(0, self._notes), 0)
            try:
                go_on, value = work.send, (yield awaited)
            # cancelled, or what it awaited has failed: for the coroutine to know
            except BaseException as error:
                go_on, value = work.throw, error

    async def _answered(
        self, call: int, number: int, asked: list[Any], before: asyncio.Task[None] | None
    ) -> None:
        try:
            if asked == CLOSE:
                answer = await self._closed(number, before)
            else:
                if number not in self._environments:
                    self._environments[number] = self._make()
                answer = vars(
                    await asked_outcome(self._environments[number], asked, self._most_characters)
                )
        except WrongAnswer as error:
            answer = {"problem": str(error)}
        except BaseException as error:  # the environment is the user's, and fails in its own ways
            traceback.print_exc()
            answer = {"problem": f"{asked[0]} raised {type(error).__name__}: {error}"[:_MOST_TOLD]}
        self.answer({"call": call, **answer})

    async def _closed(self, number: int, call: asyncio.Task[None] | None) -> dict[str, Any]:
        """End the call that an environment is in, and close it."""
        if call is not None and not call.done():
            call.cancel()
            await asyncio.wait([call])
        self._calls.pop(number, None)
        environment = self._environments.pop(number, None)
        if hasattr(environment, "close"):
            await environment.close()
        return {}


def _made_by(module: str, name: str, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """What makes an environment, whose class may `check` the arguments. Raises ConfigError where
    nothing does."""
    found = import_object(module, name)
    missing = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if not callable(found) or missing:
        raise ConfigError(
            f"{name!r} has no {' and no '.join(missing) or 'constructor'}: must be a class with"
            " `reset` and `step`"
        )
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{name!r} does not accept the arguments {sorted(arguments)}: {error}"
        ) from error
    except ValueError:  # it does not tell what it takes
        pass
    if hasattr(found, "check"):
        found.check(**arguments)
    return lambda: found(**arguments)


def _read(requests: IO[str], host: _Host, loop: asyncio.AbstractEventLoop) -> None:
    """Pass on what is asked; at the end of that, close what there is, and end."""
    for line in requests:
        loop.call_soon_threadsafe(host.take, line)
    asyncio.run_coroutine_threadsafe(host.close(), loop).result()
    os._exit(0)


async def _serve(host: _Host, requests: IO[str]) -> None:
    loop = asyncio.get_running_loop()

    def task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(host.noted(work, _running.get()), loop=loop, **options)

    loop.set_task_factory(task)
    threading.Thread(target=_read, args=(requests, host, loop), daemon=True).start()
    host.answer({})
    await loop.create_future()


def _watch(leader: int) -> None:
    """End a process group when its leader has ended, or has had its time to since their input
    ended."""
    os.close(1)  # the leader's end is to be seen there
    end, leader_end = select.poll(), os.pidfd_open(leader)
    end.register(leader_end, select.POLLIN)
    end.register(0, 0)  # that nobody writes any more is told unasked
    end.poll()
    end.unregister(0)
    end.poll(CLOSING_S * 1000)
    os.killpg(leader, signal.SIGKILL)


def serve() -> None:
    """The process, whose group is its own; another watches it, as environments may have it deaf."""
    leader = os.getpid()
    if os.fork() == 0:
        _watch(leader)
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what environments print is no answer
    # or the pool would not see this process end
    os.register_at_fork(after_in_child=lambda: os.close(answers.fileno()))
    module, name, arguments, most_characters, memory_bytes, note, sys.path = json.loads(
        requests.readline()
    )
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.RLIM_INFINITY))
    try:
        make = _made_by(module, name, arguments)
    except ConfigError as error:
        print(json.dumps({"refused": str(error)}), file=answers, flush=True)
        return
    asyncio.run(_serve(_Host(make, most_characters, answers, note), requests))


if __name__ == "__main__":
    serve()
