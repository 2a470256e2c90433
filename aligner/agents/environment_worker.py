"""Program of a worker process, which hosts the environments of many episodes on one asyncio loop.

The pool starts it as `python -m aligner.agents.environment_worker`. Messages are lines of JSON. The
first line of the input contains the settings; the worker answers `{}`, or `{"refused": reason}` and
exits. Each further line is a call of one environment. Calls run concurrently, and each answer
contains the number of its call. At the end of its input, the worker closes its environments and
exits, together with all processes that the environments have started.

While the code of an environment runs, a file that the worker shares with the pool contains the
environment's number. If the process hangs or exits then, this environment is the cause.
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

from aligner.agents.episode_environment import InvalidAnswer, call_environment
from aligner.agents.failures import classify_error
from aligner.agents.sandboxes import SandboxSettings, set_default_settings
from aligner.data.episode_reports import FailureKind
from aligner.errors import ConfigError
from aligner.masking import mask_standard_streams
from aligner.user_code import describe_user_error, import_object, report_user_error

CLOSE = ["close"]
"""Call that closes an environment that has failed, also in the middle of another call."""
FINISH = ["finish"]
"""Call that closes an environment that is no longer needed, also in the middle of another call,
whose exception is then not reported."""
CLOSING_S = 5.0
"""Maximum time for all environments to close after the end of the input, in seconds."""
NOTE = struct.Struct("<QQ")
"""Format of the shared file: number of the environment whose code runs, 0 if none, and number of
steps of environment code since the start."""
# maximum number of characters of an exception's message
_MAX_MESSAGE_CHARACTERS = 2000

# number of the environment that a task belongs to; tasks inherit it from the task that starts them
_environment_number: ContextVar[int] = ContextVar(
    "the environment that a task belongs to, and the tasks that it starts", default=0
)


class _Host:
    """The environments of this process, by the numbers that the pool assigns."""

    def __init__(
        self,
        create_environment: Callable[[], Any],
        max_characters: int,
        responses: IO[str],
        note_fd: int,
    ) -> None:
        self._create_environment = create_environment
        self._max_characters = max_characters
        self._responses = responses
        self._note_fd = note_fd
        self._environments: dict[int, Any] = {}
        # the last call of each environment
        self._calls: dict[int, asyncio.Task[None]] = {}
        # environments that are being closed because they are no longer needed
        self._finished: set[int] = set()
        # number of steps of environment code so far
        self._step_count = 0

    def send(self, content: Mapping[str, Any]) -> None:
        """Send a message to the pool."""
        print(json.dumps(content), file=self._responses, flush=True)

    def start_call(self, line: str) -> None:
        """Start the call of one line of the input."""
        call, number, request = json.loads(line)
        # The task inherits the number; each callback of the loop has its own context.
        _environment_number.set(number)
        # CLOSE and FINISH cancel the previous call if it is still in flight.
        task = asyncio.get_running_loop().create_task(
            self._execute(call, number, request, self._calls.get(number))
        )
        self._calls[number] = task

    async def close(self) -> None:
        """Close every environment."""
        closings = [
            self._close_environment(number, self._calls.get(number))
            for number in self._environments
        ]
        await asyncio.gather(*closings, return_exceptions=True)

    async def run_with_note(self, coroutine: Coroutine[Any, Any, Any], number: int) -> Any:
        """Return a coroutine's result; the note names environment `number` while its code runs."""
        return await self._drive(coroutine, number)

    @types.coroutine
    def _drive(self, coroutine: Coroutine[Any, Any, Any], number: int) -> Generator[Any, Any, Any]:
        """Drive a coroutine like `yield from coroutine`, and note each of its steps.

        A step is the code between two suspensions. Only this code can block the loop, so the note
        is empty while the coroutine is suspended.
        """
        resume = coroutine.send
        value = None
        while True:
            self._step_count += 1
            os.pwrite(self._note_fd, NOTE.pack(number, self._step_count), 0)
            try:
                awaited = resume(value)
            except StopIteration as end:
                return end.value
            finally:
                os.pwrite(self._note_fd, NOTE.pack(0, self._step_count), 0)
            try:
                resume = coroutine.send
                value = yield awaited
            # a cancellation, or an exception of the awaited future: the coroutine handles it
            except BaseException as error:
                resume = coroutine.throw
                value = error

    async def _execute(
        self, call: int, number: int, request: list[Any], previous_call: asyncio.Task[None] | None
    ) -> None:
        """Execute a call, and send its answer; CLOSE and FINISH cancel `previous_call` if it is in
        flight."""
        try:
            if request in (CLOSE, FINISH):
                if request == FINISH:
                    self._finished.add(number)
                answer = await self._close_environment(number, previous_call)
            else:
                if number not in self._environments:
                    self._environments[number] = self._create_environment()
                outcome = await call_environment(
                    self._environments[number], request, self._max_characters
                )
                answer = vars(outcome)
        except InvalidAnswer as error:
            answer = {"problem": str(error), "kind": FailureKind.ERROR.value}
        except BaseException as error:  # the user's code may raise anything
            # The exception of a call that FINISH has cancelled is no failure.
            if number not in self._finished:
                traceback.print_exc()
                report_user_error(error)
            problem = f"{request[0]} raised {describe_user_error(error)}"
            answer = {
                "problem": problem[:_MAX_MESSAGE_CHARACTERS],
                "kind": classify_error(error).value,
            }
        self.send({"call": call, **answer})

    async def _close_environment(
        self, number: int, call: asyncio.Task[None] | None
    ) -> dict[str, Any]:
        """Cancel the call of an environment that is in flight, and close the environment."""
        if call is not None and not call.done():
            call.cancel()
            await asyncio.wait([call])
        self._calls.pop(number, None)
        self._finished.discard(number)
        # None if the environment's constructor has raised an exception
        environment = self._environments.pop(number, None)
        if hasattr(environment, "close"):
            await environment.close()
        return {}


def _build_factory(module: str, name: str, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that creates an environment of the class `module:name`.

    Calls the static method `check` of the class with the arguments if the class has one. Raises
    ConfigError if the class does not exist, lacks a method, or does not accept the arguments.
    """
    environment_class = import_object(module, name)
    missing = [
        method
        for method in ("reset", "step")
        if not callable(getattr(environment_class, method, None))
    ]
    if not callable(environment_class) or missing:
        raise ConfigError(
            f"{name!r} has no {' and no '.join(missing) or 'constructor'}: must be a class with"
            " `reset` and `step`"
        )
    try:
        inspect.signature(environment_class).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{name!r} does not accept the arguments {sorted(arguments)}: {error}"
        ) from error
    except ValueError:  # the class has no signature, for example one written in C
        pass
    # `check` detects configuration errors before the first environment is created.
    if hasattr(environment_class, "check"):
        environment_class.check(**arguments)
    return lambda: environment_class(**arguments)


def _read_requests(requests: IO[str], host: _Host, loop: asyncio.AbstractEventLoop) -> None:
    """Pass the input's lines to the loop; at the end, close all environments and exit.

    Runs in a thread, because environments may block the loop.
    """
    for line in requests:
        loop.call_soon_threadsafe(host.start_call, line)
    asyncio.run_coroutine_threadsafe(host.close(), loop).result()
    # ends the process from this thread, without waiting for threads of environments
    os._exit(0)


async def _serve(host: _Host, requests: IO[str]) -> None:
    """Answer calls until the process exits."""
    loop = asyncio.get_running_loop()

    def create_task(
        loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(
            host.run_with_note(coroutine, _environment_number.get()), loop=loop, **options
        )

    # the steps of tasks that environments start are noted too
    loop.set_task_factory(create_task)
    threading.Thread(target=_read_requests, args=(requests, host, loop), daemon=True).start()
    host.send({})
    await loop.create_future()


def _watch_leader(leader: int) -> None:
    """Kill a process group when its leader has exited, or `CLOSING_S` after the end of the input.

    Runs in a process of its own, because an environment may block the leader.
    """
    os.close(1)  # otherwise the pool would not detect the end of the leader's output
    poll = select.poll()
    leader_exit = os.pidfd_open(leader)
    poll.register(leader_exit, select.POLLIN)
    poll.register(0, 0)  # poll always reports a hang-up, also without a requested event
    poll.poll()

    # the input has ended: give the leader time to close its environments
    poll.unregister(0)
    poll.poll(CLOSING_S * 1000)
    os.killpg(leader, signal.SIGKILL)


def serve() -> None:
    """Run the worker as the leader of its process group, and `_watch_leader` in a child."""
    leader = os.getpid()
    if os.fork() == 0:
        _watch_leader(leader)

    # environments must neither read calls nor print into the answers: their stdin is empty, and
    # their stdout is stderr
    requests = os.fdopen(os.dup(0))
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    mask_standard_streams()
    # a forked child would keep the pipe open and hide the exit of this process from the pool
    os.register_at_fork(after_in_child=lambda: os.close(responses.fileno()))
    module, name, arguments, max_characters, memory_bytes, sandboxes, note_fd, sys.path = (
        json.loads(requests.readline())
    )
    set_default_settings(SandboxSettings.from_json(sandboxes))

    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.RLIM_INFINITY))
    try:
        create_environment = _build_factory(module, name, arguments)
    except ConfigError as error:
        print(json.dumps({"refused": str(error)}), file=responses, flush=True)
        return
    asyncio.run(_serve(_Host(create_environment, max_characters, responses, note_fd), requests))


if __name__ == "__main__":
    serve()
