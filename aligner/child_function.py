"""A function that runs in a process of its own, under a deadline: a function that hangs or is
killed costs only that process.

Arguments and results are JSON. Python cannot end a thread, nor stop a regular expression or a long
multiplication from another thread; it can end a process. The child process writes whatever the
function prints to the error output of this process.

Each request has a number, and its answer repeats the number. An answer with another number is
dropped, so a process that the function forked cannot answer in place of the function. Forked
processes also lose both pipes (`_cut_off_forks`).
"""

import contextlib
import faulthandler
import inspect
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from aligner.errors import AlignerError, ConfigError
from aligner.user_code import imported

_IMPORT_S = 180.0
"""Seconds in which the child must start and import the function."""
_LOOK_S = 0.5
"""Seconds between two checks whether the child is alive: a process that the function forked may
keep the pipe open, so that the child's exit does not close the pipe."""
_STACK_SIGNAL = signal.SIGRTMAX
"""Makes the child write its Python stacks. A signal that user code hardly uses."""
_STACK_S, _STACK_LOOK_S = 2.0, 0.1
"""Maximum seconds to wait for the stacks, and seconds between two looks at their size."""
_STACK_LINES = 60


class ChildRaised(AlignerError):
    """The function raised an exception; the message is its type and message. Its traceback is in
    the error output of this process."""


class ChildLost(AlignerError):
    """The process hung or exited during a call. The message is the end of a sentence that begins
    with the function's name. The next call starts another process."""


class ChildTooSlow(ChildLost):
    """The process exceeded its time limit and was killed."""

    def __init__(self, message: str, stack: str = "") -> None:
        """`stack` is the Python stack of the process, without the frames of this module; empty if
        the process did not write it."""
        super().__init__(message)
        self.stack = stack


class ChildFunction:
    """A function of a module, called in a child process that persists between calls; threads take
    turns."""

    def __init__(
        self,
        module: str,
        name: str,
        *,
        through: str | None = None,
        takes: int | None = None,
        deadline_s: float | None = None,
        processor_s: float = 0.0,
        memory_bytes: int | None = None,
    ) -> None:
        """Describe the function; `start` or the first call starts the process.

        Args:
            module: the module that defines the function.
            name: the function's name in the module.
            through: a `module:function` that is called with the function and the arguments,
                instead of the function.
            takes: number of arguments that the function must accept; None: not checked.
            deadline_s: maximum duration of a call in seconds.
            processor_s: maximum CPU time of a call in seconds; 0: no limit.
            memory_bytes: maximum address space of the process.
        """
        self._settings = [module, name, through, takes, processor_s, memory_bytes, sys.path]
        self._deadline_s, self._processor_s = deadline_s, processor_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._received = bytearray()
        """What the process has written behind the last complete line."""
        self._stacks = -1
        """File descriptor of the memory file to which the process writes its stacks."""
        self._number = 0
        """Number of the last request."""

    def start(self) -> None:
        """Have the process ready. Raises ConfigError, with the reason alone, if there is no such
        function."""
        with self._lock:
            self._started()

    def __call__(self, *arguments: Any) -> Any:
        """Return the function's result. Raises ChildRaised, ChildLost and the errors of `start`."""
        with self._lock:
            process = self._started()
            self._number += 1
            try:
                request = json.dumps([self._number, arguments])
                _pipe(process.stdin).write(request.encode() + b"\n")
                _pipe(process.stdin).flush()
            except BrokenPipeError:
                raise self._lost(process) from None
            answer = self._answer(process, self._deadline_s)
        if "raised" in answer:
            raise ChildRaised(answer["raised"])
        return answer["result"]

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-m", __name__]
            # One hash of texts in all of them, so that what depends on the order of a set is the
            # same on every rank.
            environment = {"PYTHONHASHSEED": "0", **os.environ}
            self._stacks = os.memfd_create("stacks")
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=-1,
                env=environment,
                pass_fds=(self._stacks,),
            )
            self._number, self._received = 0, bytearray()
            settings = json.dumps([self._stacks, *self._settings])
            with contextlib.suppress(BrokenPipeError):  # `_answer` finds out why
                _pipe(self._process.stdin).write(settings.encode() + b"\n")
                _pipe(self._process.stdin).flush()
            try:
                answer = self._answer(self._process, _IMPORT_S)
            except ChildTooSlow as error:
                raise ChildTooSlow(
                    f"did not start and import its module within {_IMPORT_S:g} s; Python stack:\n"
                    f"{error.stack}",
                    error.stack,
                ) from None
            if "refused" in answer:
                self._end()
                raise ConfigError(answer["refused"])
        return self._process

    def _answer(self, process: subprocess.Popen[bytes], deadline_s: float | None) -> dict[str, Any]:
        """Wait for the answer to the last request."""
        end = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            answer = json.loads(self._line(process, end, deadline_s), object_hook=_as_foreign)
            if answer["number"] == self._number:
                return answer

    def _line(
        self, process: subprocess.Popen[bytes], end: float | None, deadline_s: float | None
    ) -> bytes:
        """Wait for the next line that the process writes."""
        descriptor = _pipe(process.stdout).fileno()
        readable = select.poll()
        readable.register(descriptor, select.POLLIN)
        while b"\n" not in self._received:
            left = _LOOK_S if end is None else min(_LOOK_S, end - time.monotonic())
            if left <= 0:
                stack = self._read_stack(process)
                self._end()
                raise ChildTooSlow(
                    f"returned no result within {deadline_s:g} s and was killed", stack
                )
            if readable.poll(left * 1000):
                if not (more := os.read(descriptor, 1 << 16)):
                    raise self._lost(process)
                self._received += more
            elif process.poll() is not None:
                raise self._lost(process)
        line, _, self._received = self._received.partition(b"\n")
        return bytes(line)

    def _read_stack(self, process: subprocess.Popen[bytes]) -> str:
        """Have the process write the stacks of its threads and asyncio tasks, and return them."""
        process.send_signal(_STACK_SIGNAL)
        last_size = 0
        end = time.monotonic() + _STACK_S
        while time.monotonic() < end:
            time.sleep(_STACK_LOOK_S)
            size = os.fstat(self._stacks).st_size
            if size and size == last_size:
                break  # nothing was added since the last look
            last_size = size
        return _of_function(os.pread(self._stacks, 1 << 20, 0).decode(errors="replace"))

    def _lost(self, process: subprocess.Popen[bytes]) -> ChildLost:
        code = process.wait()
        self._end()
        if code == -signal.SIGPROF:
            return ChildTooSlow(
                f"used more than {self._processor_s:g} s of CPU time and was killed"
            )
        if code >= 0:
            return ChildLost(f"exited during a call: exit code {code}")
        memory = " (perhaps out of memory)" if code == -signal.SIGKILL else ""
        return ChildLost(f"was killed by {signal.Signals(-code).name}: exit code {code}{memory}")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _pipe(process.stdout).close()
            with contextlib.suppress(BrokenPipeError):
                _pipe(process.stdin).close()
            os.close(self._stacks)


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise AssertionError  # both are pipes
    return stream


def _of_function(stacks: str) -> str:
    """Return the stacks of asyncio tasks, of the main thread and of the other threads, in this
    order, without the frames by which this package called the function."""
    package = f'"{Path(__file__).parent}{os.sep}'
    sections: dict[str, list[str]] = {"task": [], "main": [], "other": []}
    for section in stacks.strip().split("\n\n"):
        lines = section.splitlines()
        calls = [place for place, line in enumerate(lines) if f'"{__file__}"' in line]
        kind = "task" if section.startswith("Task ") else "main" if calls else "other"
        if calls:
            del lines[calls[0] :]
        while lines and package in lines[-1]:
            del lines[-1]
        sections[kind] += lines
    found = [line for lines in sections.values() for line in lines]
    if len(found) > _STACK_LINES:
        found = [*found[:_STACK_LINES], f"  ... {len(found) - _STACK_LINES} more lines"]
    return "\n".join(found)


def serve() -> None:
    """Run the child process: read a line of settings, answer it, and then answer each request."""
    # A terminal sends it to every process; the end of the input ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the function prints is no answer
    own_process, number = os.getpid(), 0

    def answer(content: Mapping[str, Any]) -> None:
        if os.getpid() != own_process:
            # The function forked, and the forked process returned from the function too.
            sys.stderr.flush()
            os._exit(0)
        line = json.dumps({"number": number, **content}, default=_foreign)
        answers.write(line + "\n")
        answers.flush()

    stacks, module, name, through, takes, processor_s, memory_bytes, sys.path = json.loads(
        requests.readline()
    )
    _cut_off_forks(requests.fileno(), answers.fileno())
    _write_stacks_to(stacks)
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.RLIM_INFINITY))
    try:
        function, called = (
            imported(module, name),
            (None if through is None else imported(*through.split(":"))),
        )
        if not callable(function):
            raise ConfigError(f"{name!r} must be callable, got {type(function).__name__}")
        if takes is not None:
            _require_arguments(name, function, takes)
    except ConfigError as error:
        answer({"refused": str(error)})
        return
    answer({})
    for line in requests:
        number, arguments = json.loads(line)
        os.ftruncate(stacks, 0)
        os.lseek(stacks, 0, os.SEEK_SET)
        signal.setitimer(signal.ITIMER_PROF, processor_s)
        try:
            content = {
                "result": function(*arguments) if called is None else called(function, *arguments)
            }
            signal.setitimer(signal.ITIMER_PROF, 0)
            answer(content)
        # the function may be the user's, and fails in its own ways
        except (Exception, SystemExit) as error:
            signal.setitimer(signal.ITIMER_PROF, 0)
            traceback.print_exc()
            answer({"raised": f"{type(error).__name__}: {error}"})


def _cut_off_forks(requests: int, answers: int) -> None:
    """Let processes that this one forks neither read requests nor write answers."""

    def cut_off() -> None:
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (requests, answers):
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)

    os.register_at_fork(after_in_child=cut_off)


def _write_stacks_to(descriptor: int) -> None:
    """Write the stacks of all threads and asyncio tasks to a file at `_STACK_SIGNAL`, and the
    exceptions of threads when they occur."""
    os.set_inheritable(descriptor, False)

    def write_tasks(*_: object) -> None:
        os.write(descriptor, "".join(_task_stacks()).encode(errors="replace"))

    def write_exception(raised: threading.ExceptHookArgs) -> None:
        threading.__excepthook__(raised)
        thread = "?" if raised.thread is None else raised.thread.name
        told = f"{thread} raised {raised.exc_type.__name__}: {raised.exc_value}"
        os.write(descriptor, f"Thread {told}\n\n".encode(errors="replace"))

    signal.signal(_STACK_SIGNAL, write_tasks)
    # The handler in C writes the stacks also while the interpreter is stuck in other C code. Then
    # it calls the one in Python.
    faulthandler.register(_STACK_SIGNAL, file=descriptor, all_threads=True, chain=True)
    threading.excepthook = write_exception


def _task_stacks() -> Iterator[str]:
    """Yield what each task of the running event loop waits for, in the format of faulthandler: the
    stack of a thread shows only the event loop."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no event loop is running
        return
    for task in tasks:
        frames = []
        waiting = task.get_coro()
        while (frame := getattr(waiting, "cr_frame", None)) is not None:
            code = frame.f_code
            frames.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n')
            waiting = waiting.cr_await
        yield f"\nTask {task.get_name()} (most recent call first):\n{''.join(reversed(frames))}"


def _require_arguments(name: str, function: Callable[..., Any], count: int) -> None:
    """Refuse a function that does not accept so many arguments, before a run has generated samples
    for it."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some of those that are not written in Python
        return
    try:
        signature.bind(*[None] * count)
    except TypeError:
        raise ConfigError(
            f"{name}{signature} must take {count} argument{'' if count == 1 else 's'}"
        ) from None


_FOREIGN = "aligner: of a type that JSON does not have"


def _foreign(value: Any) -> Any:
    """Return numbers and texts of NumPy as Python's own; of any other value the name of its
    type."""
    return (
        value.item()
        if hasattr(value, "item") and getattr(value, "ndim", 1) == 0
        else {_FOREIGN: type(value).__name__}
    )


def _as_foreign(value: dict[str, Any]) -> Any:
    """Return an object whose type has the name of the type that JSON does not have."""
    return type(value[_FOREIGN], (), {})() if _FOREIGN in value else value


if __name__ == "__main__":
    serve()
